// The page of one run, with others laid over it.

import { Charts } from "./charts.js";
import { el, later, renew, state, visible } from "./dom.js";
import { ask } from "./net.js";
import * as panels from "./panels.js";
import { ranks, timeline } from "./ranks.js";

const COLOURS = 8;
const MOST_OTHERS = 19;

export class RunView {
  constructor(root, id, others) {
    Object.assign(this, { id, others: [], known: new Map(), list: [], configs: {} });
    this.notice = el("p", { class: "notice bad", id: "gone", role: "alert", hidden: true });
    this.head = el("section", { id: "head" });
    this.reading = el("section", { id: "reading" });
    root.append(this.notice, this.head, this.reading);
    this.panels = {};
    const add = (name, title) => {
      const body = el("div", { id: name });
      root.append(el("section", { class: "panel", "aria-labelledby": `${name}-title` }, el("h2", { id: `${name}-title` }, title), body));
      this.panels[name] = body;
      return body;
    };
    add("diagnosis", "Diagnosis");
    const curves = add("curves", "Curves");
    this.overlay = this.overlayChooser();
    curves.append(this.overlay.element);
    this.charts = new Charts(curves, () => this.shown());
    add("timeline", "Ranks over time");
    add("ranks", "Where ranks spend their time");
    add("bits", "The same bits");
    add("evaluations", "Evaluations");
    add("checkpoints", "Checkpoints");
    add("warnings", "Warnings and errors");
    this.logs = this.logPanel(add("logs", "Logs"));
    add("config", "Config");
    add("events", "Events");
    this.loadListSoon = later(() => this.loadList(), 500);
    this.loadList();
    this.layOver(others);
  }

  close() {
    this.isClosed = true;
    this.charts.close();
  }

  repaint() {
    this.charts.repaint();
  }

  /** Shows these runs too. */
  layOver(others) {
    this.others = [...new Set(others)].filter((id) => id !== this.id).slice(0, MOST_OTHERS);
    this.load([this.id, ...this.others]);
  }

  take(change) {
    if (change.list) this.loadListSoon();
    const mine = [this.id, ...this.others].filter((id) => change.all || change.runs.includes(id));
    if (mine.length) this.load(mine);
  }

  async load(ids) {
    await Promise.all(ids.map(async (id) => {
      try {
        this.known.set(id, await ask(`/api/runs/${id}`));
        if (id === this.id) this.notice.hidden = true;
      } catch (error) {
        if (id !== this.id || error.status !== 404) return;
        this.notice.textContent = visible(`This run is not there any more: ${error.message}. What is shown is the newest that was known.`);
        this.notice.hidden = false;
      }
    }));
    if (!this.isClosed) this.show();
  }

  async loadList() {
    try {
      this.list = (await ask("/api/runs", [["sort", "-started"]])).runs;
    } catch {
      return;
    }
    if (this.isClosed) return;
    this.overlay.show();
    this.show();
  }

  /** The runs that curves are of: this one first. */
  shown() {
    return [this.id, ...this.others].flatMap((id, place) => {
      const run = this.known.get(id);
      if (!run) return [];
      const { names, generation } = run.curves;
      const numbers = (run.numbers ??= new Map(names.map((name, number) => [name, number])));
      const part = run.reading.size ? run.reading.offset / run.reading.size : 1;
      return [{
        id, names, generation, numbers, label: run.name, colour: place % COLOURS, step: run.step,
        sampledOf: run.reading.is_whole ? 1 : run.reading.sampled_of, percent: `${Math.round(100 * part)} %`,
      }];
    });
  }

  show() {
    const run = this.known.get(this.id);
    if (!run) return;
    document.title = visible(`${run.name} · Lockstep monitor`);
    const others = this.others.map((id) => this.known.get(id)).filter(Boolean);
    const { curves, ...rest } = run;
    renew(this.head, rest, panels.header);
    renew(this.reading, [run.reading, run.problems], () => panels.reading(run));
    renew(this.panels.diagnosis, run.diagnosis, panels.diagnosis);
    renew(this.panels.timeline, [run.processes, run.happenings, run.checkpoints, run.newest], () => timeline(run));
    renew(this.panels.ranks, run.processes, () => ranks(run));
    const twins = this.list.filter((one) => run.sha256 && one.sha256 === run.sha256 && one.id !== run.id).map((one) => one.name);
    renew(this.panels.bits, [run.end, run.checkpoints, twins, others.map((o) => [o.name, o.sha256, o.checkpoints])], () => panels.bits({ run, others, twins }));
    renew(this.panels.evaluations, run.evaluations, () => panels.evaluations(run));
    renew(this.panels.checkpoints, run.checkpoints, () => panels.checkpoints(run));
    renew(this.panels.warnings, run.happenings, () => panels.warnings(run));
    this.keepOpen(this.panels.events, () => renew(this.panels.events, run.happenings, () => panels.happenings(run)));
    this.overlay.show();
    this.charts.update();
    this.logs.take(run.logs, run.newest);
    this.showConfig(others);
  }

  /** Details that somebody has opened stay open. */
  keepOpen(element, change) {
    const isOpen = element.querySelector("details")?.open;
    change();
    if (isOpen && element.querySelector("details")) element.querySelector("details").open = true;
  }

  async showConfig(others) {
    const ids = [this.id, ...others.map((other) => other.id)];
    const key = ids.join();
    if (this.configKey === key) return;
    this.configKey = key;
    try {
      const [own, found] = await Promise.all([
        ask(`/api/runs/${this.id}/config`), ask("/api/differences", ids.map((id) => ["run", id]))]);
      const names = found.runs.map((id) => this.known.get(id)?.name ?? id);
      renew(this.panels.config, [own, names, found.keys], () => panels.config({ own, names, differences: found.keys }));
    } catch {
      this.configKey = "";
    }
  }

  overlayChooser() {
    const filter = el("input", { type: "search", placeholder: "part of a name", "aria-label": "runs to lay over", autocomplete: "off", input: () => show() });
    const items = el("ul", { class: "choices" });
    const legend = el("p", { class: "legend", id: "legend" });
    const choose = (id, isChosen) => {
      const others = isChosen ? [...this.others, id] : this.others.filter((other) => other !== id);
      location.hash = `#/run/${this.id}${others.length ? `?with=${others.join(",")}` : ""}`;
    };
    const show = () => {
      renew(legend, [this.id, ...this.others].map((id) => this.known.get(id)?.name ?? ""), (names) =>
        names.length > 1 ? names.map((name, place) => el("span", { class: `key run-${place % COLOURS}` }, name)) : []);
      const word = filter.value.toLowerCase();
      const left = this.list.filter((run) => run.id !== this.id && run.name.toLowerCase().includes(word)).slice(0, 100);
      renew(items, left.map((run) => [run.id, run.name, run.state, this.others.includes(run.id)]), (rows) =>
        rows.map(([id, name, now, isChosen]) => el("li", {}, el("label", {}, el("input", { type: "checkbox", "data-other": id, checked: isChosen, change: (event) => choose(id, event.target.checked) }), " ", name, " ", state(now)))));
    };
    return { show, element: el("div", {}, el("details", { id: "overlay" }, el("summary", {}, "lay other runs over this one"), filter, items), legend) };
  }

  logPanel(body) {
    const choice = el("select", { "aria-label": "log", change: () => load() });
    const filter = el("input", { type: "search", placeholder: "lines with, such as rank 1", "aria-label": "lines with", autocomplete: "off", input: () => write() });
    const text = el("pre", { class: "log", tabindex: "0", "aria-label": "end of the log" });
    const note = el("span", { class: "quiet" });
    let content = "";
    const write = () => {
      const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
      const word = filter.value.toLowerCase();
      const lines = visible(content).split("\n");
      text.textContent = (word ? lines.filter((line) => line.toLowerCase().includes(word)) : lines).join("\n");
      if (isAtEnd) text.scrollTop = text.scrollHeight;
    };
    const load = async () => {
      if (!choice.value) return;
      try {
        const log = await ask(`/api/runs/${this.id}/log`, [["name", choice.value]]);
        content = log.text;
        note.textContent = log.is_cut ? "the end of it" : "";
      } catch (error) {
        note.textContent = visible(error.message);
      }
      write();
    };
    const nothing = el("p", { class: "quiet" }, "There are no logs.");
    const bar = el("div", { class: "bar" }, choice, filter, note);
    const take = (names, newest) => {
      bar.hidden = text.hidden = !names.length;
      nothing.hidden = names.length > 0;
      renew(choice, names, () => names.map((name) => el("option", { value: name }, name)));
      if (this.logOf !== newest) load();
      this.logOf = newest;
    };
    body.append(nothing, bar, text);
    return { take };
  }
}
