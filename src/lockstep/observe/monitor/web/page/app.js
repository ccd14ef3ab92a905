// Which view is shown, and what keeps it up to date.

import { el } from "./dom.js";
import { ListView } from "./list.js";
import { Changes } from "./net.js";
import { RunView } from "./run.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let view = null;

/** The address after `#`: a list, or a run with others laid over it. */
function place() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const match = /^\/run\/([0-9a-f]{16})$/.exec(path);
  const others = (new URLSearchParams(query).get("with") ?? "").split(",");
  return match ? { id: match[1], others: others.filter((id) => /^[0-9a-f]{16}$/.test(id)) } : null;
}

function show() {
  const at = place();
  if (at && view instanceof RunView && view.id === at.id) {
    view.layOver(at.others);
    return;
  }
  view?.close();
  main.replaceChildren();
  view = at ? new RunView(main, at.id, at.others) : new ListView(main);
  scrollTo(0, 0);
}

function tell(isConnected) {
  connection.textContent = isConnected ? "live" : "not connected: trying again…";
  connection.className = isConnected ? "live" : "lost";
}

function chooseTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function remember(name) {
  try {
    localStorage.setItem("theme", name);
  } catch {
    // A browser that keeps nothing shows the system's theme next time.
  }
}

function recall() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

chooseTheme({ light: "light", dark: "dark" }[recall()]);
document.getElementById("theme").addEventListener("click", () => {
  const name = isDark() ? "light" : "dark";
  chooseTheme(name);
  remember(name);
  view?.repaint?.();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.repaint?.());
addEventListener("hashchange", show);
main.append(el("p", { class: "quiet" }, "reading…"));
show();
new Changes((change) => view.take(change), tell);
