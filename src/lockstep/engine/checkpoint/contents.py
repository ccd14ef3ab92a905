"""What Lockstep writes into a run directory, and so may remove."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ENTRIES = (
    "checkpoints", "config.yaml", "events.jsonl", "flight", "logged", "metrics.csv", "profile",
    "ranks.log", "report.html", "report.md", "report_figures", "result.json", "run.json", "sketch",
    "tags.json", "tensorboard", "trackers", "view", ".lock",
)  # fmt: skip
"""Names of files and folders."""

PATTERNS = ("hang_of_slot_*.json", "quantum_epoch*.npz")
"""Patterns of further ones."""


def own_entries(run_dir: Path) -> Iterator[Path]:
    """What Lockstep may have written there; not all of it need be there."""
    yield from (run_dir / name for name in ENTRIES)
    for pattern in PATTERNS:
        yield from run_dir.glob(pattern)
