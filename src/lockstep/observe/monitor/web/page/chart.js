// One chart: a metric of one or more runs, with bands from least to greatest.

import uPlot from "/uplot/uPlot.esm.js";
import { number } from "./dom.js";
import { aligned, pointAt, positive, smoothed } from "./series.js";

const HEIGHT = 210;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  /**
   * @param place element that it is drawn in
   * @param readout element that says the values under the pointer
   * @param group what all charts share: the range of steps, smoothing, the axis
   */
  constructor(place, readout, group) {
    Object.assign(this, { place, readout, group, curves: [], plot: null, shape: "" });
    this.resizes = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT }));
    this.resizes.observe(place);
  }

  width() {
    return Math.max(120, this.place.clientWidth);
  }

  /** Shows curves: `{label, colour, step, value, low, high}` each, the colour by its number. */
  show(curves) {
    this.curves = curves;
    const { weight, isLog, span } = this.group;
    const fit = isLog ? positive : (values) => values;
    const shown = curves.map((curve) => {
      const lines = [fit(smoothed(curve.step, curve.value, weight, span))];
      if (curve.low) lines.push(fit(curve.low), fit(curve.high));
      else if (weight) lines.push(fit(curve.value));
      return { step: curve.step, columns: lines };
    });
    const shape = JSON.stringify([curves.map((c, i) => [c.colour, shown[i].columns.length]), isLog]);
    const data = aligned(shown);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.rescale();
    } else {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(shown, isLog), data, this.place);
      this.rescale();
    }
    this.say(this.plot.cursor.idx);
  }

  options(shown, isLog) {
    const series = [{}];
    const bands = [];
    shown.forEach((curve, i) => {
      const stroke = colour(`--run-${this.curves[i].colour}`);
      const line = { stroke, width: 1.5, points: { size: 4 } };
      const unseen = { stroke: "transparent", width: 1, points: { show: false } };
      const place = series.push(line) - 1;
      if (curve.columns.length === 3) {
        series.push(unseen, unseen);
        bands.push({ series: [place + 2, place + 1], fill: `${stroke}38` });
      } else if (curve.columns.length === 2) {
        series.push({ stroke: `${stroke}50`, width: 1, points: { show: false } });
      }
    });
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    return {
      width: this.width(),
      height: HEIGHT,
      series,
      bands,
      legend: { show: false },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? number(tick) : "")) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : number(tick))) },
      ],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        points: { show: false },
        bind: { dblclick: () => () => this.group.zoom(null) },
      },
      hooks: { setSelect: [(plot) => this.take(plot)], setCursor: [(plot) => this.say(plot.cursor.idx)] },
    };
  }

  /** Zooms to what was selected. */
  take(plot) {
    const { left, width } = plot.select;
    if (width < 3) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.group.zoom(range);
  }

  /** The steps that are shown. */
  range() {
    if (this.group.range) return this.group.range;
    const ends = this.curves.filter((c) => c.step.length).map((c) => [c.step[0], c.step[c.step.length - 1]]);
    const [first, last] = [Math.min(...ends.map((e) => e[0])), Math.max(...ends.map((e) => e[1]))];
    if (!ends.length) return [0, 1];
    return first === last ? [first - 1, last + 1] : [first, last];
  }

  rescale() {
    if (!this.plot) return;
    const [min, max] = this.range();
    this.plot.setScale("x", { min, max });
  }

  /** The step under a place of the screen. */
  stepAt(clientX) {
    const over = this.plot.over.getBoundingClientRect();
    return this.plot.posToVal(clientX - over.left, "x");
  }

  say(index) {
    const at = index == null ? null : this.plot?.data[0][index];
    const texts = this.curves.map((curve) => {
      const point = pointAt(curve, at ?? Infinity);
      return point ? `${this.curves.length > 1 ? `${curve.label} ` : ""}${point.value == null ? "not finite" : number(point.value)}` : "";
    });
    this.readout.textContent = (at == null ? "" : `step ${number(at)}: `) + texts.filter(Boolean).join("  ·  ");
  }

  close() {
    this.resizes.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}
