// Parts of the page of one run.

import { clock, details, digest, el, moment, number, percent, size, state, table } from "./dom.js";

export function header(run) {
  const total = run.total_steps ? ` / ${number(run.total_steps)}` : "";
  const part = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0;
  const seconds = run.newest - run.started;
  const plan = run.plan;
  const facts = [
    ["step", `${number(run.step)}${total}`],
    ["ranks", plan ? `${run.ranks} (${plan.launcher}, ${plan.transport}, ${plan.device})` : run.ranks || ""],
    ["parameters", plan ? number(plan.num_parameters) : ""],
    ["batch", plan ? `${number(plan.batch_size)} samples in ${number(plan.num_microbatches)} microbatches` : ""],
    ["started", run.started ? `${moment(run.started)} UTC` : ""],
    ["so far", seconds > 0 ? clock(seconds) : ""],
    ["SHA-256", digest(run.sha256)],
    ["tags", run.tags.length ? run.tags.map((tag) => el("span", { class: "tag" }, tag)) : ""],
  ].filter(([, value]) => value !== "");
  return [
    el("h1", {}, run.name, " ", state(run.state)),
    el("p", { class: "quiet path" }, `${run.task ? `${run.task} · ` : ""}${run.path}`),
    run.total_steps ? el("progress", { class: "whole", value: part, max: 1, "aria-label": `step ${run.step} of ${run.total_steps}` }) : "",
    ended(run),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: "newest" }, Object.entries(run.metrics).map(([name, value]) => el("span", { class: "metric" }, `${name} `, el("b", {}, number(value))))),
  ];
}

function ended(run) {
  if (run.state === "killed") return el("p", { class: "notice bad", role: "status" }, "The run was killed: it has ended without a result. `lockstep resume` goes on with it.");
  if (run.state === "failed") return el("p", { class: "notice bad", role: "status" }, `The run has failed: ${run.end?.message ?? "see events.jsonl"}`);
  if (run.state === "completed" || run.state === "stopped") {
    const why = run.end?.reason ? `: ${run.end.reason}` : "";
    return el("p", { class: "notice", role: "status" }, `The run has ended (${run.state}${why}).`);
  }
  return "";
}

export function reading(run) {
  const { offset, size: whole, is_whole: isWhole } = run.reading;
  const notes = [];
  if (!isWhole && whole) notes.push(el("p", { class: "quiet", role: "status" }, `Reading the events: ${percent(offset / whole)} of ${size(whole)}.`));
  if (run.problems.length) {
    const more = run.num_problems - run.problems.length;
    notes.push(el("div", { class: "notice bad", id: "problems" }, el("b", {}, `Cannot be read (${number(run.num_problems)}):`),
      el("ul", {}, run.problems.map((problem) => el("li", {}, problem)), more > 0 ? el("li", {}, `and ${number(more)} more`) : "")));
  }
  return notes;
}

export function diagnosis({ causes, healthy }) {
  if (!causes.length) return el("p", {}, healthy || "Nothing to judge by yet.");
  return causes.map((cause) => el("div", { class: "cause", "data-cause": cause.name },
    el("p", {}, el("b", {}, cause.sentence), cause.lost !== null ? ` (${percent(cause.lost)} of the time)` : ""),
    el("ul", {}, cause.evidence.map((line) => el("li", {}, line))),
    el("p", { class: "advice" }, `→ ${cause.advice}`)));
}

export function checkpoints(run) {
  if (!run.checkpoints.length) return el("p", { class: "quiet" }, "None yet.");
  const rows = run.checkpoints.map((one) => [
    number(one.step), clock(one.time - run.started), size(one.num_bytes), `${number(one.stall_s)} s`,
    `${number(one.write_s)} s`, one.sha256 ? digest(one.sha256) : el("span", { class: "quiet" }, "not there any more"),
  ]);
  return table(["step", "after", "size", "training waited", "writing took", "SHA-256 of the model"], rows, [0, 1, 2, 3, 4]);
}

export function evaluations(run) {
  if (!run.evaluations.length) return el("p", { class: "quiet" }, "None yet.");
  const names = [...new Set(run.evaluations.flatMap((one) => Object.keys(one.metrics)))].slice(0, 8);
  const rows = run.evaluations.map((one) => [
    number(one.step), one.split, `${number(one.seconds)} s`,
    ...names.map((name) => number(Object.hasOwn(one.metrics, name) ? one.metrics[name] : null)),
  ]);
  return table(["step", "split", "took", ...names], rows, [0, 2, ...names.map((_, i) => i + 3)]);
}

/** Digests that ranks agreed on, and whether the other runs that are shown have the same. */
export function bits({ run, others, twins }) {
  const mine = saved(run);
  const digests = Object.entries(run.end?.digests ?? {});
  const lines = digests.map(([name, value]) => el("li", {}, `final ${name}: `, el("code", { class: "long" }, value)));
  if (digests.length) lines.push(el("li", {}, twins.length ? `${twins.length} other runs have these parameters: ${twins.slice(0, 8).join(", ")}` : "No other run in these folders has the same parameters."));
  const compared = others.map((other) => {
    const theirs = saved(other);
    // Files of other sizes hold other parts of the model, so their digests cannot be compared.
    const steps = [...mine.keys()].filter((step) => String(theirs.get(step)?.cut) === String(mine.get(step).cut)).sort((a, b) => a - b);
    const parted = steps.find((step) => mine.get(step).sha256 !== theirs.get(step).sha256);
    const final = run.sha256 && other.sha256 ? (run.sha256 === other.sha256 ? "the same" : "another one") : "not known of both";
    const bySteps = !steps.length ? "no step is saved by both" : parted == null ? `the same in all ${steps.length} that both have` : `differ from step ${number(parted)} on`;
    // Only runs of one config should be equal.
    const hashes = [run, other].map((one) => one.plan?.config_hash);
    const isAlike = Boolean(hashes[0]) && hashes[0] === hashes[1];
    return [other.name, isAlike ? "the same" : "another one", verdict(final, isAlike), verdict(bySteps, isAlike)];
  });
  return [
    el("p", { class: "quiet" }, "Before a checkpoint all ranks compare their digests; one that differs ends the run."),
    lines.length ? el("ul", {}, lines) : el("p", {}, "There is no final digest yet."),
    compared.length ? table(["run", "config", "final parameters", "checkpoints"], compared) : el("p", { class: "quiet" }, "Choose other runs to compare with."),
  ];
}

/** Checkpoints whose models have known digests, by step. */
function saved(run) {
  return new Map(run.checkpoints.filter((one) => one.sha256).map((one) => [one.step, one]));
}

function verdict(text, isAlike) {
  const isOther = text.startsWith("another") || text.startsWith("differ");
  const sign = text.startsWith("the same") ? "same" : isOther && isAlike ? "other" : "unknown";
  return el("span", { class: `verdict ${sign}` }, text);
}

export function warnings(run) {
  const found = run.happenings.filter((h) => ["warning", "error"].includes(h.kind)).reverse();
  if (!found.length) return el("p", { class: "quiet" }, "None.");
  return el("ul", { class: "events" }, found.map((h) => el("li", { class: h.kind }, el("time", {}, clock(h.time - run.started)), " ", el("span", { class: "message" }, h.text))));
}

export function happenings(run) {
  const rows = run.happenings.slice().reverse().map((h) => [clock(h.time - run.started), h.kind, h.text]);
  return details(`all ${rows.length} newest events`, table(["after", "kind", "event"], rows, [0]));
}

export function config({ own, names, differences }) {
  const keys = Object.entries(differences);
  const parts = [];
  if (names.length > 1) {
    parts.push(keys.length ? table(["key", ...names], keys.map(([key, values]) => [key, ...values])) : el("p", {}, "All runs that are shown have the same config."));
  }
  const rows = Object.entries(own);
  parts.push(rows.length ? details(`all ${rows.length} keys`, table(["key", "value"], rows)) : el("p", { class: "quiet" }, "config.yaml is not there, or cannot be read."));
  return parts;
}
