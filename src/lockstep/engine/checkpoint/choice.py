"""Which checkpoint of a run is meant: its best, its latest, or that of a step."""

from __future__ import annotations

from pathlib import Path

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.snapshot.resumable import check_meta
from lockstep.errors import CheckpointError
from lockstep.parsing import parse_int, shown

_MOST_STEPS = 8
"""Steps that a message names."""


def find_snapshot(root: Path, which: str) -> Snapshot:
    """The checkpoint that a name means.

    Args:
        root: path of the folder of a run's checkpoints.
        which: name of a checkpoint: `best`, `latest`, or a step's number.

    Raises:
        CheckpointError: there is none, or what it says of its progress cannot be.
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
    """The steps of which there are checkpoints, for people; the last ones where there are many."""
    steps = [str(listing.step_of(folder)) for folder in listing.folders(root)]
    if not steps:
        return "there is none of any step"
    more = f", and {len(steps) - _MOST_STEPS} earlier ones" if len(steps) > _MOST_STEPS else ""
    return f"choose one of {', '.join(reversed(steps[:_MOST_STEPS]))}{more}"
