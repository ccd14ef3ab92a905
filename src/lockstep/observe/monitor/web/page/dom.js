// Elements and texts. Whatever comes from a run becomes text, never HTML.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A text in which control signs, and those that turn the direction of writing, can be seen. */
export function visible(text) {
  return String(text).replace(CONTROL, (sign) =>
    `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** An element: properties are attributes, functions are listeners; children are texts or nodes. */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, visible(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child == null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
}

/** Replaces what an element shows if `data` is other data than last time. */
export function renew(element, data, make) {
  const key = JSON.stringify(data);
  if (element.lastKey === key) return;
  element.lastKey = key;
  const children = [make(data)];
  element.replaceChildren();
  add(element, children);
}

export function number(value) {
  if (typeof value !== "number") return value == null ? "" : String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e9) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

export function percent(part) {
  return `${Math.round(100 * part)} %`;
}

export function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const pad = (part) => String(part).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

export function moment(time) {
  if (!time) return "";
  const date = new Date(time * 1000);
  return Number.isNaN(date.getTime()) ? "" : date.toISOString().slice(0, 19).replace("T", " ");
}

/** A table; cells are texts or nodes, those of `numeric` columns stand to the right. */
export function table(headers, rows, numeric = []) {
  const isRight = (place) => (numeric.includes(place) ? "right" : null);
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": headers.join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, headers.map((name, i) => el("th", { class: isRight(i), scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) =>
        el("tr", {}, row.map((cell, i) => el("td", { class: isRight(i) }, cell)))))));
}

export function details(title, ...children) {
  return el("details", {}, el("summary", {}, title), children);
}

/** The beginning of a digest, with all of it to be seen and copied. */
export function digest(sha256) {
  if (!sha256) return "";
  return el("code", { class: "digest", title: sha256 }, sha256.slice(0, 12));
}

export function state(name) {
  const known = ["running", "completed", "stopped", "failed", "killed", "new"];
  return el("span", { class: `state ${known.includes(name) ? name : "other"}` }, name);
}

/** Calls once, some time after the last of several calls. */
export function later(call, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), milliseconds);
  };
}
