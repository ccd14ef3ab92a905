"""Draws the picture of README.md, of a run that loses a rank: `make docs-run`.

Two runs of one config are trained, one of them with a rank that is killed. The picture shows which
rank computed which microbatches of each step, the loss of both runs, and their SHA-256s, all of it
from the run directories.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lockstep.engine.faults import PlannedFault, to_env

PICTURE = Path(__file__).parent / "pictures" / "run.svg"

_STEPS, _KILL = 40, PlannedFault(slot=1, step=20, moment="backward", kind="kill")
_COMMAND = ["lockstep", "train", "digits", "-n", "3", "model=cnn", f"steps={_STEPS}"]

_WIDTH, _HEIGHT = 880, 392
_LEFT, _STRIDE, _CELL = 84, 19, 9
"""Where steps begin, the width of a step and the height of a microbatch, in pixels."""
_LANES, _CURVES, _CURVE_HEIGHT = (72, 122, 172), 238, 84
"""The tops of the ranks' lanes and of the curves."""

_STYLE = """
  text { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px }
  .plain { fill: #1f2328 }
  .note { fill: #59636e } .lost { fill: #c93c37 } .cross { stroke: #c93c37; stroke-width: 3 }
  .page { fill: #ffffff } .after { fill: #f3f6fa } .rank0 { fill: #4a7ebb } .rank1 { fill: #d29a5b }
  .rank2 { fill: #5aa469 } .calm { stroke: #b5c3d6; stroke-width: 6; fill: none }
  .hit { stroke: #1f2328; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    .plain { fill: #e6edf3 } .note { fill: #9da7b3 } .page { fill: #0d1117 }
    .after { fill: #161b22 } .lost { fill: #f0716b }
    .calm { stroke: #3b4d66 } .hit { stroke: #e6edf3 }
  }
"""


def train(run_dir: Path, faults: Sequence[PlannedFault]) -> None:
    """Train one of the two runs, with a report of each step."""
    options = ["--run-dir", str(run_dir), "log_every=1", "eval_every=20", "balance_every=0"]
    environment = {**os.environ, **to_env(faults)}
    argv = [sys.executable, "-m", *_COMMAND, *options]
    subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, in order."""
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def picture(calm: Path, hit: Path) -> str:
    """The picture as SVG.

    Args:
        calm: run directory of the run without faults.
        hit: run directory of the run that lost a rank.
    """
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {_HEIGHT}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" {size}/>',
            *_microbatches(hit),
            *_curves(calm, hit),
            *_results(calm, hit),
            "</svg>\n",
        ]
    )


def _microbatches(run_dir: Path) -> Iterator[str]:
    (lost,), (regrouped,) = events(run_dir, "RankLost"), events(run_dir, "Recovered")
    before = {j["slot"]: j["microbatches"][1] - j["microbatches"][0] for j in _joined(run_dir)}
    left = [slot for slot in before if slot != lost["slot"]]
    after = dict(zip(left, regrouped["microbatches"], strict=True))
    interrupted = lost["step"] + 1  # the event has the last step that was finished
    kill_x = _x(interrupted)
    yield f'<rect class="after" x="{kill_x}" y="34" width="{_WIDTH - kill_x - 12}" height="300"/>'
    yield _text(12, 22, f"$ {' '.join(_COMMAND)}")
    for slot, top in zip(before, _LANES, strict=True):
        yield _text(12, top + 14, f"rank {slot}")
        for step in range(1, _STEPS + 1):
            count = before[slot] if step < interrupted else after.get(slot, 0)
            for cell in range(count):
                box = f'x="{_x(step)}" y="{top + cell * (_CELL + 1)}"'
                yield f'<rect class="rank{slot}" {box} width="{_STRIDE - 3}" height="{_CELL}"/>'
    x, y = kill_x + 8, _LANES[list(before).index(lost["slot"])] + 14
    yield f'<path class="cross" d="M{x - 6} {y - 6} l12 12 m-12 0 l12 -12"/>'
    yield _text(x + 16, y + 4, f"step {interrupted}: killed (SIGKILL) in its backward pass", "lost")
    took = f"{1000 * regrouped['seconds']:.1f} ms"
    yield _text(kill_x + 8, 56, f"{len(left)} ranks go on {took} after they noticed", "note")
    yield _text(_LEFT, 56, "one box: one of a step's 8 microbatches", "note")


def _joined(run_dir: Path) -> list[dict[str, Any]]:
    return sorted(events(run_dir, "Joined"), key=lambda joined: joined["slot"])


def _curves(calm: Path, hit: Path) -> Iterator[str]:
    losses = [[e["loss"] for e in events(run, "StepDone")] for run in (calm, hit)]
    highest = max(max(curve) for curve in losses)
    for name, curve in zip(("calm", "hit"), losses, strict=True):
        points = (
            f"{_x(step) + 8},{_CURVES + _CURVE_HEIGHT * (1 - loss / highest):.1f}"
            for step, loss in enumerate(curve, 1)
        )
        yield f'<polyline class="{name}" points="{" ".join(points)}"/>'
    same = sum(a == b for a, b in zip(*losses, strict=True))
    yield _text(12, _CURVES + 14, "loss")
    words = f"with the kill (thin) and without (wide): {same} of {_STEPS} losses are bit-identical"
    yield _text(_x(8), _CURVES + 14, words, "note")


def _results(calm: Path, hit: Path) -> Iterator[str]:
    for line, (run, name) in enumerate([(hit, "with the kill"), (calm, "without")]):
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        digest = result["params_sha256"]
        text = f"{name:<14} {result['status']} at step {result['step']}   SHA-256 {digest[:40]}…"
        yield _text(_LEFT, 356 + 20 * line, text)


def _x(step: int) -> int:
    return _LEFT + _STRIDE * (step - 1)


def _text(x: float, y: float, text: str, kind: str = "plain") -> str:
    place = f'x="{x:g}" y="{y:g}" xml:space="preserve"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def main() -> None:
    """Train both runs, and draw."""
    with tempfile.TemporaryDirectory() as name:
        calm, hit = Path(name) / "calm", Path(name) / "hit"
        train(calm, [])
        train(hit, [_KILL])
        PICTURE.write_text(picture(calm, hit), encoding="utf-8")


if __name__ == "__main__":
    main()
