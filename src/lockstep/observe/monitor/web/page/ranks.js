// Processes over time, and what they spend it with.

import { clock, el, moment, number, percent, size, svg, table } from "./dom.js";

export const KINDS = [
  ["compute_s", "compute"], ["communication_s", "exchange"], ["data_s", "data"], ["checkpoint_s", "checkpoints"],
];
const WIDTH = 1000;
const ROW = 18;
const MARKS = { lost: "✕", recovered: "◆", rebalanced: "⇄", joined: "+", error: "!", resumed: "▶", start: "▶", end: "■" };

/** A bar for each process from when it came to when it was lost, and what happened to the run. */
export function timeline(run) {
  const { processes, started, newest } = run;
  if (!processes.length) return el("p", { class: "quiet" }, "No process has said that it takes part.");
  const span = Math.max(1e-3, newest - started);
  const x = (time) => WIDTH * Math.min(1, Math.max(0, (time - started) / span));
  const marks = run.happenings.filter((h) => MARKS[h.kind] && !["joined", "start"].includes(h.kind));
  const height = ROW * processes.length + ROW;
  const bars = processes.map((process, row) => {
    const [from, to] = [x(process.since), x(process.until ?? newest)];
    const isLost = process.until != null;
    return svg("rect", { x: from, y: ROW * row + 3, width: Math.max(2, to - from), height: ROW - 6, rx: 2, class: isLost ? "life lost" : process.is_late ? "life late" : "life" },
      svg("title", {}, `slot ${process.slot} on ${process.host}, pid ${process.pid}: since ${clock(process.since - started)}${isLost ? `, lost at ${clock(process.until - started)}${process.reason ? `: it ${process.reason}` : ""}` : ""}`));
  });
  const lines = marks.map((mark) => svg("line", { x1: x(mark.time), x2: x(mark.time), y1: 0, y2: height - ROW, class: `mark ${mark.kind}` }, svg("title", {}, mark.text)));
  const saved = run.checkpoints.map((one) => svg("line", { x1: x(one.time), x2: x(one.time), y1: height - ROW + 4, y2: height - 4, class: "mark saved" }, svg("title", {}, `checkpoint of step ${number(one.step)}`)));
  const names = el("div", { class: "names" },
    processes.map((p) => el("span", { title: p.host }, p.until == null ? `rank ${p.rank}` : `slot ${p.slot} (lost)`)), el("span", {}, "checkpoints"));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", height, role: "img", "aria-label": `${processes.length} processes over ${clock(span)}` }, bars, lines, saved);
  const lost = processes.filter((p) => p.until != null);
  return [
    el("div", { class: "timeline" }, names, picture),
    el("p", { class: "quiet" }, `${moment(started)} UTC, and ${clock(span)} from there`),
    lost.length ? el("ul", {}, lost.map((p) => el("li", {}, `slot ${p.slot} on ${p.host} was lost after ${clock(p.until - started)}${p.reason ? `: it ${p.reason}` : ""}`))) : "",
    el("ul", { class: "events" }, run.happenings.filter((h) => ["lost", "recovered", "rebalanced", "resumed", "joined"].includes(h.kind)).slice(-30).reverse()
      .map((h) => el("li", {}, el("time", {}, clock(h.time - started)), ` ${MARKS[h.kind]} ${h.text}`))),
  ];
}

function bar(seconds) {
  const total = KINDS.reduce((sum, [kind]) => sum + (Number(seconds?.[kind]) || 0), 0);
  if (!total) return "";
  let x = 0;
  const parts = KINDS.map(([kind, name]) => {
    const width = 100 * (Number(seconds[kind]) || 0) / total;
    x += width;
    return svg("rect", { x: x - width, y: 0, width, height: 10, class: `kind ${kind}` }, svg("title", {}, `${name}: ${percent(width / 100)}`));
  });
  const text = KINDS.map(([kind, name]) => `${name} ${percent((Number(seconds[kind]) || 0) / total)}`).join(", ");
  return svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "split", role: "img", "aria-label": text }, parts);
}

function share(seconds, kind) {
  const total = KINDS.reduce((sum, [name]) => sum + (Number(seconds[name]) || 0), 0);
  return total ? percent((Number(seconds[kind]) || 0) / total) : "";
}

/** Of each rank: what its time goes to, its microbatches and memory. */
export function ranks(run) {
  const living = run.processes.filter((p) => p.until == null).sort((a, b) => a.rank - b.rank);
  if (!living.length) return el("p", { class: "quiet" }, "No rank takes part.");
  const legend = el("p", { class: "legend" }, KINDS.map(([kind, name]) => el("span", { class: `key ${kind}` }, name)));
  const rows = living.map((p) => [
    p.rank, p.host, p.device, bar(p.now), bar(p.seconds), ...KINDS.map(([kind]) => share(p.seconds, kind)),
    number(p.num_microbatches),
    p.peak_bytes ? size(p.peak_bytes) + (p.device_busy ? `, ${percent(p.device_busy)} busy` : "") : "",
  ]);
  const headers = ["rank", "host", "device", "now", "in all", ...KINDS.map(([, name]) => name), "microbatches", "memory"];
  return [legend, table(headers, rows, [0, 5, 6, 7, 8, 9, 10])];
}
