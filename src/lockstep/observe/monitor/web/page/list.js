// The list of runs: filtered, sorted, and chosen from.

import { digest, el, later, moment, number, state, visible } from "./dom.js";
import { ask } from "./net.js";

const COLUMNS = [
  ["name", "run"], ["state", "state"], ["step", "step"], ["ranks", "ranks"],
];
const MOST_METRICS = 4;

export class ListView {
  constructor(root) {
    this.rows = new Map();
    this.chosen = new Set();
    this.order = "-started";
    this.metrics = [];
    this.filter = el("input", {
      type: "search", id: "filter", placeholder: "val/loss<0.3, state=running, name~sweep",
      spellcheck: "false", autocomplete: "off", "aria-describedby": "filter-error",
      input: later(() => this.load(), 200),
    });
    this.error = el("p", { id: "filter-error", class: "error", role: "alert" });
    this.count = el("span", { class: "quiet", id: "count" });
    this.together = el("button", { type: "button", id: "together", disabled: true, click: () => this.open() },
      "show chosen together");
    this.head = el("tr");
    this.body = el("tbody");
    root.append(
      el("div", { class: "bar" }, el("label", { for: "filter" }, "Runs where"), this.filter, this.together, this.count),
      this.error,
      el("div", { class: "wide" }, el("table", { id: "runs" }, el("thead", {}, this.head), this.body)));
    document.title = "Lockstep monitor";
    this.load();
  }

  close() {
    this.isClosed = true;
  }

  take(change) {
    if (change.list) this.load();
  }

  async load() {
    // Of several questions on their way only the newest counts.
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const conditions = this.filter.value.split(",").map((text) => ["where", text.trim()]);
    try {
      const found = await ask("/api/runs", [["sort", this.order], ...conditions.filter(([, text]) => text)]);
      if (turn !== this.turn || this.isClosed) return;
      this.error.textContent = "";
      this.show(found);
    } catch (error) {
      if (turn === this.turn && error.status === 400) this.error.textContent = visible(error.message);
    }
  }

  show(found) {
    this.count.textContent = found.runs.length === found.total
      ? `${found.total} runs` : `${found.runs.length} of ${found.total} runs`;
    this.chooseMetrics(found.runs);
    const ids = new Set(found.runs.map((run) => run.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.rows.delete(id);
      this.chosen.delete(id);
    }
    found.runs.forEach((run, place) => {
      const row = this.row(run);
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
    });
    this.update();
  }

  /** The metrics that most runs have get a column. */
  chooseMetrics(runs) {
    const counts = new Map();
    for (const run of runs) {
      for (const name of Object.keys(run.metrics)) counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const weight = (name) => counts.get(name) + (name.startsWith("val/") ? 0.5 : 0);
    const names = [...counts.keys()].sort((a, b) => weight(b) - weight(a)).slice(0, MOST_METRICS).sort();
    const key = JSON.stringify([names, this.order]);
    if (key === this.headKey) return;
    this.headKey = key;
    this.metrics = names;
    const columns = [...COLUMNS, ...names.map((name) => [name, name]), ["sha256", "SHA-256"], ["tags", "tags"], ["started", "started (UTC)"]];
    this.head.replaceChildren(el("th", {}, el("span", { class: "hidden" }, "chosen")),
      ...columns.map(([name, title]) => this.header(name, title)));
  }

  header(name, title) {
    const isUp = this.order === name;
    const isDown = this.order === `-${name}`;
    const sorted = isUp ? "ascending" : isDown ? "descending" : "none";
    const turn = () => {
      this.order = isDown ? name : isUp ? `-${name}` : name === "started" ? "-started" : name;
      this.load();
    };
    return el("th", { scope: "col", "aria-sort": sorted },
      el("button", { type: "button", class: "plain", title, click: turn }, title, isUp ? " ↑" : isDown ? " ↓" : ""));
  }

  row(run) {
    let row = this.rows.get(run.id);
    if (!row) {
      const box = el("input", { type: "checkbox", "aria-label": `choose ${run.name}`, change: () => {
        if (box.checked) this.chosen.add(run.id);
        else this.chosen.delete(run.id);
        this.update();
      } });
      row = el("tr", { "data-run": run.id }, el("td", {}, box));
      this.rows.set(run.id, row);
    }
    const key = JSON.stringify([run, this.metrics]);
    if (row.lastKey === key) return row;
    row.lastKey = key;
    while (row.children.length > 1) row.lastChild.remove();
    row.append(...this.cells(run));
    return row;
  }

  cells(run) {
    const total = run.total_steps ? ` / ${number(run.total_steps)}` : "";
    const part = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0;
    return [
      el("td", {}, el("a", { href: `#/run/${run.id}`, title: run.path }, run.name), " ",
        el("span", { class: "quiet" }, run.task),
        run.problems.length ? el("span", { class: "error", title: run.problems.join("\n") }, " cannot be read") : ""),
      el("td", {}, state(run.state)),
      el("td", { class: "right" }, `${number(run.step)}${total}`,
        run.total_steps ? el("progress", { value: part, max: 1, "aria-label": "progress" }) : ""),
      el("td", { class: "right" }, run.ranks || ""),
      ...this.metrics.map((name) => el("td", { class: "right" }, number(Object.hasOwn(run.metrics, name) ? run.metrics[name] : null))),
      el("td", {}, digest(run.sha256)),
      el("td", {}, run.tags.map((tag) => el("span", { class: "tag" }, tag))),
      el("td", { class: "quiet" }, moment(run.started)),
    ];
  }

  update() {
    this.together.disabled = this.chosen.size < 1;
    this.together.textContent = this.chosen.size > 1 ? `show ${this.chosen.size} together` : "show chosen together";
  }

  open() {
    const [first, ...others] = this.chosen;
    location.hash = `#/run/${first}${others.length ? `?with=${others.join(",")}` : ""}`;
  }
}
