"""Reading what `lockstep.comm.calls` has recorded; the file may be damaged or hostile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.calls import (
    FIRST_MESSAGE,
    HEADER,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    NUM_BYTES,
    NUM_RECORDS,
    RECORD,
)
from lockstep.config.files import read_bytes
from lockstep.config.parsing import parse_json, shown
from lockstep.errors import DataError, file_errors

_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Call:
    """A call of a transport.

    Attributes:
        kind: name of the method.
        group: 0 for all ranks, else the number of a subgroup.
        number: of the call in its group, from 1; of a message, among those to the same rank, or
            from it. 0 for the end of a message.
        given: bytes that this rank gives to each other one, or in an all-to-all to all of them.
        taken: bytes that it has afterwards.
        peer: the other rank of a message, in the group; -1 for a collective.
        begun_ns: when it began, in nanoseconds of Unix time.
        ended_ns: when it ended or failed; 0 if it has not.
        has_failed: whether it has ended by an exception.
    """

    kind: str
    group: int
    number: int
    given: int
    taken: int
    peer: int
    begun_ns: int
    ended_ns: int
    has_failed: bool

    @property
    def is_message(self) -> bool:
        """Whether only two ranks take part."""
        return KINDS.index(self.kind) >= FIRST_MESSAGE

    @property
    def is_done(self) -> bool:
        """Whether it has ended as it should."""
        return self.ended_ns > 0 and not self.has_failed


@dataclass(frozen=True)
class CallLog:
    """The newest calls of a rank, of its present group and the subgroups of that.

    Attributes:
        rank: rank of the process.
        size: number of ranks.
        step: committed steps.
        subgroups: ranks of the first, second, … subgroup; None where they are not known.
        calls: the calls in order.
    """

    rank: int
    size: int
    step: int
    subgroups: Sequence[Sequence[int] | None]
    calls: Sequence[Call]

    def ranks(self, group: int) -> Sequence[int] | None:
        """The ranks of a group; None if they are not known."""
        if group == 0:
            return range(self.size)
        return self.subgroups[group - 1] if group <= len(self.subgroups) else None

    @property
    def stuck(self) -> Call | None:
        """The call that has failed or has not ended; the first one, since later ones follow it."""
        return next((call for call in self.calls if not call.is_done), None)

    @property
    def until_stuck(self) -> Sequence[Call]:
        """The calls up to `stuck`; those after it are what a rank does about a loss."""
        stuck = self.stuck
        return self.calls if stuck is None else self.calls[: self.calls.index(stuck) + 1]


def read_calls(path: Path) -> CallLog:
    """The calls in a file.

    Raises:
        DataError: it cannot be read, or cannot have been written by Lockstep.
    """
    with file_errors(DataError, path, "read"):
        data = read_bytes(path, NUM_BYTES)
    try:
        return parse_calls(data)
    except ValueError as error:
        raise DataError(f"{path}: is no record of calls, or is damaged: {error}") from None


def parse_calls(data: bytes) -> CallLog:
    """The calls in the memory of a `CallRing`.

    Raises:
        ValueError: it cannot be one; the message has the field.
    """
    if len(data) != NUM_BYTES:
        raise ValueError(f"{len(data)} bytes, not {NUM_BYTES}")
    magic, start, rank, size, step, _, num_text, _ = HEADER.unpack_from(data)
    _check("magic", magic, MAGIC, MAGIC)
    _check("size", size, 1, _MOST_RANKS)
    _check("rank", rank, 0, size - 1)
    _check("step", step, 0, 1 << 62)
    _check("bytes of text", num_text, 0, HEADER_BYTES - HEADER.size)
    text = data[HEADER.size : HEADER.size + num_text]
    subgroups = [_ranks(one, size) for one in _list(parse_json(text))]
    numbered = sorted(_calls(data), key=lambda pair: pair[0])
    calls = [call for count, call in numbered if count > start]
    return CallLog(rank, size, step, subgroups, calls)


def _calls(data: bytes) -> Iterator[tuple[int, Call]]:
    """All calls, each with its number among those of the rank."""
    for index, record in enumerate(RECORD.iter_unpack(data[HEADER_BYTES:])):
        count, what, number, given, taken, peer, begun, ended = record
        if count == 0:
            continue
        field = f"call {count}"
        if count < 0 or (count - 1) % NUM_RECORDS != index:
            raise ValueError(f"{field} stands at {index}")
        _check(f"{field}: kind", what & 255, 0, len(KINDS) - 1)
        _check(f"{field}: group", what >> 8, 0, _MOST_RANKS)
        for name, value in (("number", number), ("bytes", given), ("bytes", taken)):
            _check(f"{field}: {name}", value, 0, 1 << 62)
        _check(f"{field}: peer", peer, -1, _MOST_RANKS)
        _check(f"{field}: begun", begun, 1, 1 << 62)
        _check(f"{field}: ended", ended, -(1 << 62), 1 << 62)
        kind = KINDS[what & 255]
        yield (
            count,
            Call(kind, what >> 8, number, given, taken, peer, begun, abs(ended), ended < 0),
        )


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"subgroups: {shown(value)}")
    return value


def _ranks(value: Any, size: int) -> Sequence[int] | None:
    """The ranks of a subgroup, as `CallRing.subgroup` has written them; a range takes no memory."""
    if value is None:
        return None
    ranks: Sequence[int] = value
    if isinstance(value, dict) and value.keys() == {"range"}:
        ends = value["range"]
        if _are_numbers(ends) and len(ends) == 3 and ends[2] > 0:
            ranks = range(*ends)
    is_known = isinstance(ranks, range) or _are_numbers(ranks)
    if not is_known or not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"subgroups: ranks {shown(value)}")
    if isinstance(ranks, list) and ranks != sorted(set(ranks)):
        raise ValueError(f"subgroups: ranks {shown(value)}")
    return ranks


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
