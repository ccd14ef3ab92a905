"""What simple models reach beside a trained one: found by `lockstep eval`, shown by a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import TrainConfig
from lockstep.config.files import read_bytes, replacing
from lockstep.config.parsing import parse_json
from lockstep.errors import RunDirectoryError, file_errors
from lockstep.observe.storing.jsonl import dumps

MODEL = "the model"
LIMIT = " (limit)"
_FILE = "baselines_{}.json"
_MAX_BYTES = 1 << 20


class Beside(NamedTuple):
    """A trained model beside simple ones, on one split.

    Attributes:
        split: name of the split.
        step: step of the checkpoint.
        by: metric that says which is better.
        mode: whether less ("min") or more ("max") of it is better.
        rows: metrics by the name of each model, the trained one last.
    """

    split: str
    step: int
    by: str
    mode: str
    rows: dict[str, dict[str, float]]

    @property
    def better(self) -> dict[str, float]:
        """Simple models that are better than the trained one, the best first."""
        sign = 1 if self.mode == "min" else -1
        own = self.rows[MODEL].get(self.by, math.nan)
        # A model without a number is beaten by whatever has one.
        beats = {
            name: value
            for name, value in self._rivals.items()
            if math.isnan(own) or sign * value < sign * own
        }
        return dict(sorted(beats.items(), key=lambda item: sign * item[1]))

    @property
    def _rivals(self) -> dict[str, float]:
        return {
            name: row[self.by]
            for name, row in self.rows.items()
            if name != MODEL
            and not name.endswith(LIMIT)
            and not math.isnan(row.get(self.by, math.nan))
        }

    @property
    def verdict(self) -> str:
        """Who is best, in a sentence."""
        if not self._rivals:
            return f"not compared: no simple model has a {self.by}"
        own = f"{self.rows[MODEL].get(self.by, math.nan):.4g}"
        if not self.better:
            return f"no simple model has a better {self.by} than the model ({own})"
        named = ", ".join(f"{name} ({value:.4g})" for name, value in self.better.items())
        return f"better {self.by} than the model ({own}): {named}"


def beside_baselines(
    found: Mapping[str, Mapping[str, float]],
    metrics: Mapping[str, float],
    split: str,
    step: int,
    config: TrainConfig,
) -> Beside:
    """Put a trained model beside simple ones.

    Args:
        found: metrics of simple models by name, and perhaps of the trained one.
        metrics: those of the trained one, else.
        split: name of the split that all are measured on.
        step: step of the checkpoint.
        config: says by which metric models are compared: `watch`, or the loss if that is none of
            theirs.
    """
    rows = {name: dict(row) for name, row in found.items() if name != MODEL}
    has_watched = any(config.watch in row for row in rows.values())
    rows[MODEL] = dict(found.get(MODEL, metrics))
    is_shared = has_watched and config.watch in rows[MODEL]
    by, mode = (config.watch, config.watch_mode) if is_shared else ("loss", "min")
    return Beside(split, step, by, mode, rows)


def table(beside: Beside) -> list[str]:
    """Lines of each model and its metrics, and the verdict."""
    header, *rows = cells(beside)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        f"{row[0]:{widths[0]}}  " + "  ".join(map(str.rjust, row[1:], widths[1:]))
        for row in (header, *rows)
    ]
    return [*map(str.rstrip, lines), beside.verdict]


def cells(beside: Beside) -> list[list[str]]:
    """A row of titles, and a row of each model; only metrics that simple models have, too."""
    simple = [row for name, row in beside.rows.items() if name != MODEL]
    names = list(dict.fromkeys(name for row in simple for name in row))
    rows = [
        [name, *(f"{row[n]:.6g}" if n in row else "" for n in names)]
        for name, row in beside.rows.items()
    ]
    return [[f"{beside.split}, step {beside.step}", *names], *rows]


def keep(beside: Beside, run_dir: Path) -> None:
    """Write it into a run directory, in the place of what was found on that split before.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    path = run_dir / _FILE.format(beside.split)
    with file_errors(RunDirectoryError, str(path)), replacing(path) as file:
        file.write(dumps(beside._asdict()))


def kept(run_dir: Path) -> list[Beside]:
    """What `keep` has written, of all splits; damaged files are left out."""
    found = []
    for path in sorted(run_dir.glob(_FILE.format("*"))):
        try:
            found.append(_parsed(parse_json(read_bytes(path, _MAX_BYTES))))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _parsed(row: Any) -> Beside:
    rows = {
        str(name): {str(n): float(v) for n, v in metrics.items() if math.isfinite(float(v))}
        for name, metrics in row["rows"].items()
    }
    rows[MODEL]  # must be there
    return Beside(str(row["split"]), int(row["step"]), str(row["by"]), str(row["mode"]), rows)
