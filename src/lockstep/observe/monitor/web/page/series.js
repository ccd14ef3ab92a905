// Points of curves as uPlot takes them; nothing here touches the page.

/** Two parts of a curve as one: `fine` replaces what `coarse` has of its steps. */
export function spliced(coarse, fine, first, last) {
  if (!fine || !fine.step.length) return coarse;
  const before = coarse.step.findIndex((step) => step >= first);
  const start = before < 0 ? coarse.step.length : before;
  let end = start;
  while (end < coarse.step.length && coarse.step[end] <= last) end += 1;
  const names = ["step", "value", "low", "high"];
  return Object.fromEntries(names.map((name) => {
    const [one, other] = [coarse[name] ?? coarse.value, fine[name] ?? fine.value];
    return [name, [...one.slice(0, start), ...other, ...one.slice(end)]];
  }));
}

/** Moving averages that forget over steps, not points: zooming does not change them. */
export function smoothed(steps, values, weight, span) {
  if (!weight) return values;
  const rate = -Math.log(weight) * 1000 / Math.max(1, span);
  const found = new Array(values.length);
  let mean = 0;
  let total = 0;
  let before = null;
  for (let i = 0; i < values.length; i += 1) {
    if (values[i] == null) {
      found[i] = values[i];
      continue;
    }
    const left = before == null ? 0 : Math.exp(-rate * (steps[i] - before));
    const share = before == null ? 1 : Math.max(1e-9, 1 - left);
    mean = mean * left + values[i] * share;
    total = total * left + share;
    found[i] = mean / total;
    before = steps[i];
  }
  return found;
}

/** Values that a logarithmic axis can show. */
export function positive(values) {
  return values.map((value) => (value != null && value > 0 ? value : null));
}

/** One table of several curves: their steps together, undefined where a curve has no point. */
export function aligned(curves) {
  if (curves.length === 1) return [curves[0].step, ...curves[0].columns];
  const steps = [...new Set(curves.flatMap((curve) => curve.step))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, place) => [step, place]));
  const columns = curves.flatMap((curve) => curve.columns.map((values) => {
    const column = new Array(steps.length);
    curve.step.forEach((step, i) => { column[places.get(step)] = values[i]; });
    return column;
  }));
  return [steps, ...columns];
}

/** The newest point at or before a step; null if there is none. */
export function pointAt(curve, step) {
  let low = 0;
  let high = curve.step.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.step[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low ? { step: curve.step[low - 1], value: curve.value[low - 1] } : null;
}
