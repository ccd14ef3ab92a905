"""Finding a checkpoint by its name, and deleting old ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.parsing import parse_int, shown
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.snapshot.resumable import check_meta
from lockstep.errors import CheckpointError

_MOST_STEPS = 8
"""Number of steps that a message names."""


def find_snapshot(root: Path, which: str) -> Snapshot:
    """The checkpoint with a name.

    Args:
        root: path of the folder of a run's checkpoints.
        which: name of a checkpoint: `best`, `latest`, or a step's number.

    Raises:
        CheckpointError: there is none, or its progress is inconsistent.
    """
    snapshot = _read(root, which)
    check_meta(snapshot, str(root / listing.folder_name(snapshot.step)))
    return snapshot


def _read(root: Path, which: str) -> Snapshot:
    if which == "latest":
        snapshot, _, skipped = checkpoint.newest_valid(root)
        if snapshot is None:
            raise CheckpointError(
                f"{root}: holds no valid checkpoint {'; '.join(skipped)}".rstrip()
            )
        return snapshot
    if which == "best":
        folder = listing.read_hint(root, "best")
        if folder is None:
            raise CheckpointError(f"{root}: holds no best checkpoint; there was no evaluation yet")
        return checkpoint.read(folder)
    try:
        step = parse_int(which)
    except ValueError:
        raise CheckpointError(
            f"checkpoint {shown(which)[1:-1]}: must be best, latest, or a step's number"
        ) from None
    folder = root / listing.folder_name(step)
    if not folder.exists():
        raise CheckpointError(f"{root}: holds no checkpoint of step {step}; {_there(root)}")
    return checkpoint.read(folder)


def _there(root: Path) -> str:
    """The steps with checkpoints, for a message; the newest ones if there are many."""
    steps = [str(listing.step_of(folder)) for folder in listing.folders(root)]
    if not steps:
        return "there is none of any step"
    more = f", and {len(steps) - _MOST_STEPS} earlier ones" if len(steps) > _MOST_STEPS else ""
    return f"choose one of {', '.join(reversed(steps[:_MOST_STEPS]))}{more}"


def prune(root: Path, keep: int, keep_every_s: float = 0.0) -> None:
    """Delete old checkpoints, and incomplete ones of killed processes.

    The `keep` newest, the best, those kept for good, and other files stay.

    Args:
        root: folder of all checkpoints.
        keep: number of the newest ones to keep, at least 1.
        keep_every_s: least time in seconds between two older ones that are kept for good, of which
            the oldest is the first; 0 keeps none.
    """
    # First, or a checkpoint would be deleted whose writer was killed while it replaced it.
    listing.bring_back(root)
    old = listing.folders(root)[keep:]
    stay = [
        listing.read_hint(root, "best"),
        *(_apart(old, keep_every_s) if keep_every_s else ()),
    ]
    for folder in (*(f for f in old if f not in stay), *root.glob(".step_*")):
        # A folder that cannot be deleted costs space only; training goes on.
        shutil.rmtree(folder, ignore_errors=True)


def _apart(folders: Sequence[Path], gap_s: float) -> list[Path]:
    """The oldest of some checkpoints (newest first), and each that is `gap_s` after the last kept.

    Computed each time from the times in the manifests, so the result does not depend on who wrote
    them, nor on a kill during an earlier deletion.
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
    with suppress(OSError):  # earlier versions did not write it
        return folder.stat().st_mtime
    return None
