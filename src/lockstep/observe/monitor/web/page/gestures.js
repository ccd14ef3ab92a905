// Moving through a chart with pointer, wheel and keys.

const STEP = 0.2;

/** Makes an element pan and zoom the range of steps of a group. */
export function attach(element, chart, group) {
  const current = () => chart()?.range();

  const move = (part) => {
    const range = current();
    if (range) group.zoom(range.map((end) => end + part * (range[1] - range[0])));
  };
  const scale = (factor, around) => {
    const range = current();
    if (!range) return;
    const middle = around ?? (range[0] + range[1]) / 2;
    group.zoom(range.map((end) => middle + (end - middle) * factor));
  };

  element.addEventListener("keydown", (event) => {
    const keys = {
      ArrowLeft: () => move(-STEP), ArrowRight: () => move(STEP), "+": () => scale(0.5),
      "=": () => scale(0.5), "-": () => scale(2), 0: () => group.zoom(null), Escape: () => group.zoom(null),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });

  // Without a key, a wheel goes on scrolling the page.
  element.addEventListener("wheel", (event) => {
    const shown = chart();
    if (!shown?.plot || !(event.ctrlKey || event.shiftKey)) return;
    event.preventDefault();
    if (event.shiftKey) move((event.deltaX || event.deltaY) / 1000);
    else scale(Math.exp(event.deltaY / 500), shown.stepAt(event.clientX));
  }, { passive: false });

  element.addEventListener("pointerdown", (event) => {
    const shown = chart();
    const isPan = event.shiftKey || event.button === 1 || group.isPanning;
    if (!shown?.plot || !isPan || !event.target.closest(".u-over")) return;
    event.preventDefault();
    const [range, from] = [shown.range(), event.clientX];
    const width = shown.plot.over.clientWidth;
    const drag = (moved) => {
      const part = (from - moved.clientX) / width;
      group.zoom(range.map((end) => end + part * (range[1] - range[0])));
    };
    const end = () => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", end);
      removeEventListener("pointercancel", end);
    };
    addEventListener("pointermove", drag);
    addEventListener("pointerup", end);
    addEventListener("pointercancel", end);
  });

  // uPlot begins its selection at the mouse event, which comes after the pointer's.
  element.addEventListener("mousedown", (event) => {
    if (event.shiftKey || event.button === 1 || group.isPanning) event.stopPropagation();
  }, { capture: true });
}
