"""How soon and how smoothly the monitor's page shows a large run; TensorBoard's server beside it.

Writes `docs/benchmarks/monitor_page.md`; `--metrics`, `--rows` and `--runs` make it smaller, and
then it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from playwright.sync_api import Browser, Page, sync_playwright

from page import Section, command, publish
from run import DOCS, machine

PACKAGES = ("lockstep-train", "orjson", "starlette", "uvicorn", "tensorboard", "playwright")
METRICS, ROWS, RUNS = 1_000, 100_000, 100
PAINT_S, FRAMES, MEMORY = 2.0, 30.0, 1 << 30
CHROMIUM = "/usr/bin/chromium"
_PATIENCE_S = 600
_SERVER = """
import sys
from pathlib import Path
from lockstep.observe.monitor.watch import Watch
from lockstep.observe.monitor.web import serve
tell = lambda url: print(url, flush=True)
serve(Watch([Path(sys.argv[1])]), "127.0.0.1", 0, None, tell, 1.0, print)
"""
_TIMES = {"compute_s": 1.0, "communication_s": 0.2, "data_s": 0.1, "checkpoint_s": 0.0}
_MOVE = """
async ({kind, seconds}) => {
  const chart = document.querySelector(".chart"), over = chart.querySelector(".u-over");
  const box = over.getBoundingClientRect();
  const at = (x) => ({clientX: x, clientY: box.top + 50, shiftKey: kind === "pan", button: 0,
                      ctrlKey: kind === "zoom", bubbles: true, cancelable: true});
  const middle = box.left + box.width / 2;
  if (kind === "pan") over.dispatchEvent(new PointerEvent("pointerdown", at(middle)));
  const start = performance.now(), frames = [];
  await new Promise((done) => {
    const frame = (now) => {
      frames.push(now);
      const turn = Math.sin((now - start) / 300);
      if (now - start > 1000 * seconds) return done();
      if (kind === "pan") dispatchEvent(new PointerEvent("pointermove", at(middle + 150 * turn)));
      else over.dispatchEvent(new WheelEvent("wheel", {...at(middle), deltaY: 60 * turn}));
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
  dispatchEvent(new PointerEvent("pointerup", at(middle)));
  const gaps = frames.slice(1).map((time, i) => time - frames[i]).sort((a, b) => a - b);
  return {frames: 1000 * gaps.length / (frames[frames.length - 1] - frames[0]),
          slowest: gaps[Math.floor(0.99 * gaps.length)]};
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", type=int, default=METRICS)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--tensorboard-rows", type=int, help="rows of TensorBoard's files; 0: none")
    parser.add_argument("--output", type=Path, help="folder for the page and its numbers")
    args = parser.parse_args()
    facts = machine(PACKAGES) | {"command": command("monitor_page")}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        sections = [
            large_run(browser, Path(folder) / "large", args.metrics, args.rows),
            many_runs(browser, Path(folder) / "many", args.runs),
        ]
        rows = args.rows // 100 if args.tensorboard_rows is None else args.tensorboard_rows
        if rows:
            sections.append(tensorboard(Path(folder) / "tensorboard", args.metrics, rows))
        facts["Chromium"] = browser.version
        browser.close()
    is_whole = (args.metrics, args.rows, args.runs) == (METRICS, ROWS, RUNS)
    folder = args.output or (DOCS if is_whole else None)
    publish(folder, "monitor_page", "Benchmarks of the monitor's page", facts, sections)


def large_run(browser: Browser, folder: Path, metrics: int, rows: int) -> Section:
    """One run with many metrics and many rows."""
    size = make_run(folder / "run", metrics, rows)
    found: dict[str, Any] = {"bytes": size}
    with _server(folder) as (process, url), _page(browser) as shown:
        began = time.perf_counter()
        shown.goto(url + "#/run/" + _number(url))
        shown.wait_for_selector(".chart canvas")
        found["paint_s"] = time.perf_counter() - began
        found["sampled"] = shown.text_content("#sampled")
        found["pan while it reads"] = shown.evaluate(_MOVE, {"kind": "pan", "seconds": 3})
        _until(shown, "!document.querySelector('#reading').textContent.includes('Reading')")
        found["read_s"] = time.perf_counter() - began
        for kind in ("pan", "zoom"):
            found[kind] = shown.evaluate(_MOVE, {"kind": kind, "seconds": 5})
        found["charts"] = shown.locator(".chart canvas").count()
        found["peak_bytes"] = _peak(process.pid)
    slowest = min(found[kind]["frames"] for kind in ("pan", "zoom"))
    section = Section(
        f"A run of {metrics:,} metrics and {rows:,} rows",
        f"Its events.jsonl has {size / 1e9:.2f} GB, none of it in memory before. From asking "
        f"for the page to the first curve, with a server that has just begun; then moving through "
        f"{found['charts']} charts, drawn by software.",
        ["", "found"],
        [
            ["first curve", f"{found['paint_s']:.2f} s"],
            ["all rows are read after", f"{found['read_s']:.1f} s"],
            *(
                [f"{kind}: frames/s (99 % take less than)",
                 f"{found[kind]['frames']:.0f} ({found[kind]['slowest']:.0f} ms)"]
                for kind in ("pan while it reads", "pan", "zoom")
            ),
            ["the server's greatest memory", f"{found['peak_bytes'] / 2**20:.0f} MiB"],
        ],
        raw=found,
    )  # fmt: skip
    paint, peak = found["paint_s"], found["peak_bytes"]
    section.at_most("first curve ≤ 2 s", f"{paint:.2f} s", paint <= PAINT_S)
    section.at_most("at least 30 frames/s", f"{slowest:.0f}", slowest >= FRAMES)
    section.at_most("memory < 1 GiB", f"{peak / 2**20:.0f} MiB", peak < MEMORY)
    return section


def many_runs(browser: Browser, folder: Path, runs: int) -> Section:
    """A list of many runs."""
    for number in range(runs):
        make_run(folder / f"run{number:04d}", 3, 200)
    with _server(folder) as (_, url), _page(browser) as shown:
        began = time.perf_counter()
        shown.goto(url)
        _until(shown, f"document.querySelectorAll('tr[data-run]').length === {runs}")
        paint = time.perf_counter() - began
        began = time.perf_counter()
        shown.fill("#filter", "name~run00, train/loss<100")
        wanted = sum(f"run{number:04d}".startswith("run00") for number in range(runs))
        _until(shown, f"document.querySelectorAll('tr[data-run]').length === {wanted}")
        answer = time.perf_counter() - began
    rows = [["all are listed", f"{paint:.2f} s"], ["a condition is met", f"{answer:.2f} s"]]
    raw = {"paint_s": paint, "filter_s": answer}
    return Section(f"A list of {runs} runs", "Each with 200 rows.", ["", "found"], rows, raw=raw)


def tensorboard(folder: Path, metrics: int, rows: int) -> Section:
    """The same values in TensorBoard's files: until its server knows all tags."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder.mkdir()
    writer = EventFileWriter(str(folder))
    for step, values in enumerate(_values(metrics, rows), 1):
        cells = zip(_names(metrics), values.tolist(), strict=True)
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in cells])
        writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=summary))
    writer.close()
    size = sum(file.stat().st_size for file in folder.iterdir())
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "6123"]
    began = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            seconds = _known_to_tensorboard(metrics, rows) - began
        finally:
            child.terminate()
    return Section(
        f"TensorBoard's server on {rows:,} rows",
        f"The same {metrics:,} metrics in its own files ({size / 1e6:.0f} MB), but only "
        f"{rows:,} rows: from its start to an answer with the last step. It keeps 1,000 points of "
        "a curve, chosen at random.",
        ["", "found"],
        [["the last step is known", f"{seconds:.1f} s"]],
        raw={"known_s": seconds, "bytes": size},
    )  # fmt: skip


def _known_to_tensorboard(metrics: int, rows: int) -> float:
    tag = _names(metrics)[-1]
    url = f"http://127.0.0.1:6123/data/plugin/scalars/scalars?run=.&tag={tag}"
    deadline = time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < deadline:
        time.sleep(0.1)
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                points = json.loads(answer.read())
        except (OSError, ValueError):
            continue
        if points and points[-1][1] == rows:
            return time.perf_counter()
    sys.exit(f"TensorBoard: not done after {_PATIENCE_S} s")


def make_run(folder: Path, metrics: int, rows: int) -> int:
    """Write the events of a run; returns their size in bytes."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"task": "large"}')
    plan = {
        "event": "RunStarted", "step": 0, "task": "large", "run_dir": "", "config_hash": "",
        "total_steps": rows, "steps_per_epoch": 0, "num_samples": 0, "num_parameters": 1,
        "world_size": 4, "transport": "mpi", "launcher": "mpi", "device": "cpu", "threads": 1,
        "num_microbatches": 4, "batch_size": 4,
    }  # fmt: skip
    ranks = [{"rank": rank, **_TIMES} for rank in range(4)]
    fixed = {
        "event": "StepDone", "num_steps": 1, "epoch": 0, "lr": 0.1, "grad_norm": 1.0, "samples": 4,
        "loss_scale": 1.0, "seconds": 1.0, "ranks": ranks,
    }  # fmt: skip
    names = _names(metrics)
    with (folder / "events.jsonl").open("wb") as file:
        file.write(orjson.dumps({"time": 1.7e9, **plan}) + b"\n")
        for step, values in enumerate(_values(metrics, rows), 1):
            cells = dict(zip(names, values.tolist(), strict=True))
            row = {"time": 1.7e9 + step, "step": step, "loss": cells[names[0]], "metrics": cells}
            file.write(orjson.dumps(fixed | row) + b"\n")
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return (folder / "events.jsonl").stat().st_size


def _names(metrics: int) -> list[str]:
    return [f"layer{number // 10}/m{number % 10}" for number in range(metrics)]


def _values(metrics: int, rows: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for step in range(rows):
        noise = 0.1 * generator.standard_normal(metrics)
        yield np.round(np.exp(-3.0 * step / rows) + noise, 4)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    argv = [sys.executable, "-c", _SERVER, str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            yield process, url
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def _page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.on("pageerror", lambda error: sys.exit(f"the page failed: {error}"))
    try:
        yield opened
    finally:
        context.close()


def _number(url: str) -> str:
    with urllib.request.urlopen(url + "api/runs", timeout=60) as answer:
        return str(json.loads(answer.read())["runs"][0]["id"])


def _until(shown: Page, expression: str) -> None:
    deadline = time.perf_counter() + _PATIENCE_S
    while not shown.evaluate(expression):
        if time.perf_counter() > deadline:
            sys.exit(f"not true after {_PATIENCE_S} s: {expression}")
        shown.wait_for_timeout(20)


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
