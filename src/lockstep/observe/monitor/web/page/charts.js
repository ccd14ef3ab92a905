// The curves of the runs that are shown: only charts that can be seen are drawn and asked for.

import { Chart } from "./chart.js";
import { el, later, visible } from "./dom.js";
import { attach } from "./gestures.js";
import { ask } from "./net.js";
import { spliced } from "./series.js";

const POINTS = 500;
const DEEPER_MS = 120;

export class Charts {
  /** @param runs gives the runs that are shown: `{id, label, colour, names, generation, step}` */
  constructor(root, runs) {
    Object.assign(this, { runs, cards: new Map(), data: new Map(), deep: new Map(), names: [], numChanges: 0 });
    this.group = { range: null, weight: 0, isLog: false, isPanning: false, span: 1, zoom: (range) => this.zoom(range) };
    this.search = el("input", { type: "search", id: "metrics", placeholder: "part of a name", autocomplete: "off", spellcheck: "false", input: later(() => this.filter(), 120) });
    this.smoothing = el("input", { type: "range", id: "smoothing", min: "0", max: "0.99", step: "0.01", value: "0", input: () => this.change({ weight: Number(this.smoothing.value) }) });
    this.log = el("input", { type: "checkbox", id: "log", change: () => this.change({ isLog: this.log.checked }) });
    this.pan = el("input", { type: "checkbox", id: "pan", change: () => { this.group.isPanning = this.pan.checked; root.classList.toggle("panning", this.pan.checked); } });
    this.back = el("button", { type: "button", id: "reset", disabled: true, click: () => this.zoom(null) }, "whole run");
    this.note = el("p", { class: "quiet", id: "sampled", role: "status" });
    this.grid = el("div", { class: "charts" });
    this.count = el("span", { class: "quiet" });
    root.append(
      el("div", { class: "bar" },
        el("label", {}, "Metrics ", this.search), this.count,
        el("label", {}, "smoothing ", this.smoothing),
        el("label", {}, this.log, " logarithmic"), el("label", {}, this.pan, " drag to pan"), this.back),
      this.note, this.grid,
      el("p", { class: "quiet" }, "Drag to zoom, with Shift to pan; Ctrl and the wheel zoom; double-click shows the whole run. Keys on a chart: + − ← → 0."));
    this.seen = new IntersectionObserver((entries) => this.look(entries), { rootMargin: "120px" });
    this.loadSoon = later(() => this.load(), 15);
    this.deepenSoon = later(() => this.deepen(), DEEPER_MS);
  }

  close() {
    this.isClosed = true;
    this.seen.disconnect();
    for (const card of this.cards.values()) card.chart?.close();
  }

  /** Takes what is known of the runs by now; charts of new metrics come to the end. */
  update() {
    const names = new Set(this.runs().flatMap((run) => run.names));
    this.group.span = Math.max(1, ...this.runs().map((run) => run.step));
    for (const [name, card] of this.cards) {
      if (names.has(name)) continue;
      card.chart?.close();
      card.element.remove();
      this.cards.delete(name);
    }
    const order = (name) => (name === "train/loss" ? 0 : name.startsWith("train/") ? 2 : name.includes("/") ? 1 : 3);
    this.names = [...names].map((name, place) => [order(name), place, name])
      .sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((entry) => entry[2]);
    const known = this.cards.size;
    const fresh = this.names.filter((name) => !this.cards.has(name));
    for (const name of fresh) this.cards.set(name, this.card(name));
    if (fresh.length && known) this.names.forEach((name) => this.grid.append(this.cards.get(name).element));
    else this.grid.append(...fresh.map((name) => this.cards.get(name).element));
    this.filter();
    this.refresh();
  }

  card(name) {
    const readout = el("span", { class: "readout" });
    const place = el("div", { class: "plot" });
    const element = el("figure", { class: "chart", tabindex: "0", "data-metric": name, "aria-label": `curve of ${name}` },
      el("figcaption", {}, el("b", { title: name }, name), readout), place, el("span", { class: "odd" }));
    const card = { name, element, place, readout, chart: null, isSeen: false };
    attach(element, () => card.chart, this.group);
    this.seen.observe(element);
    element.card = card;
    return card;
  }

  filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const card of this.cards.values()) {
      const isIn = words.every((word) => card.name.toLowerCase().includes(word));
      if (card.element.hidden === isIn) card.element.hidden = !isIn;
      count += isIn;
    }
    this.count.textContent = count === this.cards.size ? `${count}` : `${count} of ${this.cards.size}`;
  }

  look(entries) {
    for (const { target, isIntersecting } of entries) {
      target.card.isSeen = isIntersecting;
      if (!isIntersecting) {
        target.card.chart?.close();
        target.card.chart = null;
      } else {
        this.draw(target.card);
      }
    }
    this.loadSoon();
    if (this.group.range) this.deepenSoon();
  }

  shownCards() {
    return [...this.cards.values()].filter((card) => card.isSeen);
  }

  /** Asks again for what is seen; what is not is asked for when it is. */
  refresh() {
    this.numChanges += 1;
    for (const entry of this.data.values()) entry.isOld = true;
    for (const entry of this.deep.values()) entry.isOld = true;
    this.loadSoon();
    if (this.group.range) this.deepenSoon();
  }

  async load() {
    await Promise.all(this.runs().map(async (run) => {
      const wanted = this.shownCards().filter(({ name }) => this.data.get(key(run, name))?.isOld ?? run.numbers.has(name));
      await this.fetch(run, wanted, this.data, []);
    }));
    this.say();
  }

  async fetch(run, cards, store, query) {
    const known = this.numChanges;
    const numbers = new Map(cards.filter((card) => run.numbers.has(card.name)).map((card) => [String(run.numbers.get(card.name)), card]));
    if (!numbers.size) return;
    try {
      const found = await ask(`/api/runs/${run.id}/curves`, [["curves", [...numbers.keys()].join(",")], ["most", POINTS], ...query]);
      if (this.isClosed || found.generation !== run.generation) return;
      for (const [number, card] of numbers) {
        const curve = found.curves[number];
        if (curve) store.set(key(run, card.name), { ...curve, isOld: known !== this.numChanges, range: query.length ? query.map((pair) => pair[1]) : null });
        if (card.isSeen) this.draw(card);
      }
    } catch {
      // The page says that it is not connected; the next change asks again.
    }
  }

  draw(card) {
    const curves = this.runs().flatMap((run) => {
      const coarse = this.data.get(key(run, card.name));
      if (!coarse) return [];
      const fine = this.deep.get(key(run, card.name));
      const whole = fine && this.group.range ? spliced(coarse, fine, ...fine.range) : coarse;
      return [{ label: run.label, colour: run.colour, step: whole.step, value: whole.value, low: whole.low, high: whole.high, odd: coarse.num_odd }];
    });
    if (!curves.length) return;
    card.chart ??= new Chart(card.place, card.readout, this.group);
    card.chart.show(curves);
    const odd = curves.reduce((sum, curve) => sum + curve.odd, 0);
    card.element.querySelector(".odd").textContent = odd ? `${odd} ${odd === 1 ? "place" : "places"} with NaN or ∞` : "";
  }

  say() {
    const coarse = this.runs().filter((run) => run.sampledOf > 1);
    this.note.textContent = visible(coarse.map((run) => `${run.label}: sampled 1 of ${run.sampledOf.toLocaleString("en")} rows, exact up to ${run.percent}`).join("; "));
  }

  change(values) {
    Object.assign(this.group, values);
    this.shownCards().forEach((card) => this.draw(card));
  }

  /** Shows a range of steps in all charts; null for the whole run. */
  zoom(range) {
    this.group.range = range && range[1] - range[0] > 1e-6 ? range : range && [range[0] - 0.5, range[0] + 0.5];
    this.back.disabled = !range;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.shownCards().forEach((card) => (this.group.range ? card.chart?.rescale() : this.draw(card)));
    });
    if (range) this.deepenSoon();
  }

  /** Asks for all that there is in the range that is shown, and half as much beside it. */
  async deepen() {
    if (!this.group.range) return;
    const [first, last] = this.group.range;
    const margin = (last - first) / 2;
    const query = [["first", Math.floor(first - margin)], ["last", Math.ceil(last + margin)]];
    const isThere = (entry) => entry && !entry.isOld && entry.range[0] <= first && last <= entry.range[1]
      && entry.range[1] - entry.range[0] <= 2 * (last - first) + 2; // a wider one is coarser
    await Promise.all(this.runs().map((run) => {
      const wanted = this.shownCards().filter(({ name }) => !isThere(this.deep.get(key(run, name))));
      return this.fetch(run, wanted, this.deep, query);
    }));
  }

  repaint() {
    for (const card of this.cards.values()) {
      card.chart?.close();
      card.chart = null;
      if (card.isSeen) this.draw(card);
    }
  }
}

function key(run, name) {
  return `${run.id} ${run.generation} ${name}`;
}
