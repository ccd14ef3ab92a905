"""What a rank writes for the user itself: lines of its own, and errors if it is the first."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from lockstep.errors import LockstepError
from lockstep.launchers.rank.environment import detect


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """Write each line of standard output as soon as it is whole, and in one go, while in here.

    Ranks may share one pipe, where lines written piece by piece (as `PYTHONUNBUFFERED` does)
    would mix.
    """
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.line_buffering, stream.write_through
    stream.reconfigure(line_buffering=True, write_through=False)
    try:
        yield
    finally:
        # What cannot be written, on a full disk, fails here once more; the run goes on without it.
        with contextlib.suppress(OSError):
            if not stream.closed:
                stream.reconfigure(line_buffering=before[0], write_through=before[1])


def tell(error: LockstepError, place: str = "") -> None:
    """Print an error for the user, if this rank is the one that does and nobody has yet.

    Args:
        error: the error.
        place: what is added to the message.
    """
    if not error.is_told and _is_teller(error):
        print(f"error: {error}{place}", file=sys.stderr, flush=True)


def _is_teller(error: LockstepError) -> bool:
    """Whether this is rank 0, of the group or else of the launch; or the only one that knows."""
    if error.is_alone:
        return True
    if error.rank is not None:
        return error.rank == 0
    try:
        return detect(os.environ).rank == 0
    except LockstepError:
        return True
