"""How many sheets a run may have, and which names have none."""

from __future__ import annotations

from lockstep.reading.large.rows import LOGGED

_MOST_SHEETS = 256
"""Of what was logged, and as many of splits."""
_MOST_LEFT_OUT = 4096
"""Names without a sheet that are told; of more, no more is said."""


class Room:
    """Counts sheets; many of what was logged leave room for splits."""

    def __init__(self) -> None:
        self._num_logged = self._num_splits = 0
        self._left_out: set[int] = set()

    def take(self, name: str) -> bool:
        """Whether a sheet of a new name may come, which then counts."""
        if name.startswith(LOGGED):
            has_room = self._num_logged < _MOST_SHEETS
            self._num_logged += has_room
        else:
            has_room = self._num_splits < _MOST_SHEETS
            self._num_splits += has_room
        return has_room

    def problem(self, name: str) -> str:
        """What is to be told of a name that has no sheet; empty if it was told before."""
        key = hash(name)  # names may be long
        if key in self._left_out or len(self._left_out) == _MOST_LEFT_OUT:
            return ""
        self._left_out.add(key)
        return f"more than {_MOST_SHEETS} splits or scalars: {name!r} is left out"
