"""Which checkpoints of a run are kept, and deleting the others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.errors import CheckpointError


def prune(root: Path, keep: int, keep_every_s: float = 0.0) -> None:
    """Delete old checkpoints, and what killed processes left of theirs.

    The `keep` newest, the best, those kept for good, and what is not a checkpoint stay.

    Args:
        root: folder of all checkpoints.
        keep: number of the newest ones to keep, at least 1.
        keep_every_s: least time in seconds between two older ones that are kept for good, of which
            the oldest is the first; 0 keeps none.
    """
    listing.bring_back(root)
    old = listing.folders(root)[keep:]
    stay = [
        listing.read_hint(root, "best"),
        *(_apart(old, keep_every_s) if keep_every_s else ()),
    ]
    for folder in (*(f for f in old if f not in stay), *root.glob(".step_*")):
        shutil.rmtree(folder, ignore_errors=True)


def _apart(folders: Sequence[Path], gap_s: float) -> list[Path]:
    """The oldest of some checkpoints (newest first), and each that is `gap_s` after the last kept.

    Found out anew each time from the times in the manifests: so it does not matter which rank or
    which sitting has written what, nor that a process was killed while it deleted.
    """
    kept: list[Path] = []
    kept_at = -float("inf")
    for folder in reversed(folders):
        saved_at = _saved_at(folder)
        if saved_at is not None and saved_at >= kept_at + gap_s:
            kept.append(folder)
            kept_at = saved_at
    return kept


def _saved_at(folder: Path) -> float | None:
    """When a checkpoint was written, in Unix seconds; None if it is damaged."""
    try:
        saved_at: Any = checkpoint.read_manifest(folder).get("saved_at")
    except CheckpointError:
        return None
    if isinstance(saved_at, (int, float)):
        return float(saved_at)
    with suppress(OSError):  # earlier versions did not write it down
        return folder.stat().st_mtime
    return None
