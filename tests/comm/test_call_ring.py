"""The newest calls of a transport stay in memory, and what is read of them is what was called."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.call_records import CallLog, parse_calls, read_calls
from lockstep.comm.calls import (
    HEADER,
    HEADER_BYTES,
    KINDS,
    NUM_BYTES,
    NUM_RECORDS,
    CallRing,
    measure_of,
)
from lockstep.comm.transport import GroupBroken, LocalTransport, collective
from lockstep.errors import DataError

ALL_GATHER, BARRIER = KINDS.index("all_gather"), KINDS.index("barrier")
SEND, RECEIVE = KINDS.index("send"), KINDS.index("receive")
NOTHING = (0, 0, -1)


def filled(num_calls: int) -> CallRing:
    """A ring with so many all-gathers, the n-th of n bytes."""
    ring = CallRing()
    group = ring.start(1, 3)
    for number in range(1, num_calls + 1):
        ring.end(ring.begin(group, ALL_GATHER, (number, 3 * number, -1)), is_done=True)
    return ring


@given(num_calls=st.integers(0, 3 * NUM_RECORDS))
@settings(max_examples=20)
def test_the_newest_calls_are_there_in_order_however_many_there_were(num_calls: int) -> None:
    log = parse_calls(filled(num_calls).copy())
    first = max(1, num_calls - NUM_RECORDS + 1)
    assert [c.number for c in log.calls] == list(range(first, num_calls + 1))
    assert all(c.kind == "all_gather" and c.taken == 3 * c.given == 3 * c.number for c in log.calls)
    assert all(c.is_done and c.begun_ns <= c.ended_ns for c in log.calls)
    assert (log.rank, log.size, log.stuck) == (1, 3, None)


def test_what_was_called_before_the_memory_became_a_file_is_in_the_file() -> None:
    ring = filled(5)
    before = ring.copy()
    assert os.pread(ring.fd, NUM_BYTES, 0) == before
    ring.note_step(7)
    group = ring.start(0, 2)
    ring.begin(group, BARRIER, NOTHING)
    log = parse_calls(os.pread(ring.fd, NUM_BYTES, 0))
    assert (log.rank, log.size, log.step, len(log.calls)) == (0, 2, 7, 1)
    assert log.stuck == log.calls[0]
    assert log.calls[0].number == 1


def test_messages_are_counted_by_rank_and_direction_and_collectives_by_group() -> None:
    ring = CallRing()
    group = ring.start(0, 4)
    inner = ring.subgroup([0, 2])
    numbers = []
    for place, kind, peer in (
        (group, SEND, 1), (group, SEND, 2), (group, RECEIVE, 1), (group, SEND, 1),
        (group, BARRIER, -1), (inner, BARRIER, -1), (inner, SEND, 1), (group, BARRIER, -1),
    ):  # fmt: skip
        ring.begin(place, kind, (8, 8, peer))
        numbers.append(parse_calls(ring.copy()).calls[-1].number)
    assert numbers == [1, 1, 1, 2, 1, 1, 1, 2]
    assert [call.group for call in parse_calls(ring.copy()).calls] == [0] * 5 + [1, 1, 0]


def test_ranks_of_subgroups_are_kept_as_far_as_there_is_room() -> None:
    ring = CallRing()
    ring.start(3, 10_000)
    scattered = random.Random(1).sample(range(1, 10_000), 500)
    groups = [[3], [*range(1, 10_000, 2)], sorted(scattered), [0, 1, 3], sorted(scattered)]
    for ranks in groups:
        ring.subgroup(ranks)
    log = parse_calls(ring.copy())
    known = [None if log.ranks(n) is None else list(log.ranks(n) or ()) for n in range(1, 6)]
    assert known == [*groups[:4], None]
    assert log.ranks(0) == range(10_000)


class Failing(LocalTransport):
    failures = (RuntimeError,)

    @collective
    def barrier(self) -> None:
        raise RuntimeError("gone")

    @collective
    def all_gather(self, own, out, counts) -> None:  # type: ignore[no-untyped-def]
        super().all_gather(own, out, counts)

    def is_damaged(self) -> bool:
        return True


def test_a_call_that_fails_is_told_from_one_that_ends() -> None:
    transport = Failing()
    transport.call_group = transport.call_ring.start(0, 1)
    transport.gather_json({"a": 1})
    assert not transport.call_ring.has_failed
    with pytest.raises(GroupBroken):
        transport.barrier()
    log = parse_calls(transport.call_ring.copy())
    assert transport.call_ring.has_failed
    assert [(c.kind, c.is_done, c.taken) for c in log.calls] == [
        ("all_gather", True, 8), ("all_gather", True, 8), ("barrier", False, 0),
    ]  # fmt: skip
    assert log.stuck is not None
    assert (log.stuck.kind, log.stuck.has_failed) == ("barrier", True)


class Told:
    """Remembers what an observer is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def wait(self) -> None:
        self.said.append("wait")

    def go(self) -> None:
        self.said.append("go")


def test_a_call_with_wrong_arguments_leaves_nobody_waiting_and_no_record() -> None:
    transport = Failing()
    transport.call_group = transport.call_ring.start(0, 1)
    transport.observer = told = Told()
    with pytest.raises(AttributeError):
        transport.all_gather(None, None, [0])
    assert told.said == []
    assert not parse_calls(transport.call_ring.copy()).calls
    transport.gather_json(1)
    assert told.said == ["wait", "go"] * 2


def test_bytes_are_those_of_the_tensors_also_by_keyword() -> None:
    four, eight = torch.zeros(4), torch.zeros(8, dtype=torch.int64)
    assert measure_of("all_gather")(four, eight, counts=[4]) == (16, 64, -1)
    assert measure_of("all_to_all")(eight, [2, 1], [0, 2], four, [3, 1]) == (24, 16, -1)
    assert measure_of("broadcast")(tensor=four, root=1) == (16, 16, -1)
    assert measure_of("send")(four, to=2) == (16, 0, 2)
    assert measure_of("receive")(four, 3) == (0, 16, 3)
    assert measure_of("subgroup")([[0], [1]]) == NOTHING


def damaged(changes: dict[int, int], text: bytes | None = None) -> bytes:
    data = bytearray(filled(3).copy())
    for word, value in changes.items():
        data[8 * word : 8 * word + 8] = value.to_bytes(8, "little", signed=True)
    if text is not None:
        data[8 * 6 : 8 * 7] = len(text).to_bytes(8, "little")
        data[HEADER.size : HEADER.size + len(text)] = text
    return bytes(data)


FIRST = HEADER_BYTES // 8


REFUSED = (
    ({0: 0}, "magic=0"), ({2: 3}, "rank=3"), ({3: 1 << 40}, "size="), ({4: -1}, "step=-1"),
    ({6: 1 << 40}, "bytes of text="), ({FIRST: 2}, "call 2 stands at 0"), ({FIRST: -1}, "call -1"),
    ({FIRST + 1: 255}, "kind=255"), ({FIRST + 1: -256}, "group=-1"), ({FIRST + 2: -5}, "number=-5"),
    ({FIRST + 3: -5}, "bytes=-5"), ({FIRST + 5: -2}, "peer=-2"), ({FIRST + 6: 0}, "begun=0"),
)  # fmt: skip
GROUPS = (
    "{}", "[[2,1]]", "[[]]", "[[0,3]]", '[{"range":[0,9,1]}]', '[{"range":[0,2,0]}]',
    '[{"range":[0,true,1]}]', '[{"range":[2,0,1]}]', '[{"ranks":[0]}]', "[7]",
)  # fmt: skip


@pytest.mark.parametrize(("changes", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_a_damaged_record_is_refused_by_its_field(
    tmp_path: Path, changes: dict[int, int], field: str
) -> None:
    path = tmp_path / "slot_1.calls"
    path.write_bytes(damaged(changes))
    with pytest.raises(DataError, match="is no record of calls, or is damaged") as refused:
        read_calls(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert field in str(refused.value)


@pytest.mark.parametrize("text", GROUPS)
def test_subgroups_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="subgroups: "):
        parse_calls(damaged({}, text.encode()))


def test_a_record_of_another_length_is_refused() -> None:
    for data in (b"", damaged({})[:-1], damaged({}) + b"x"):
        with pytest.raises(ValueError, match=f"{len(data)} bytes"):
            parse_calls(data)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_calls(path)


@given(st.lists(st.tuples(st.integers(0, NUM_BYTES - 1), st.integers(0, 255)), max_size=12))
def test_whatever_is_damaged_it_is_refused_or_read(changes: list[tuple[int, int]]) -> None:
    data = bytearray(filled(3).copy())
    for place, value in changes:
        data[place] = value
    try:
        log = parse_calls(bytes(data))
    except ValueError:
        return
    assert isinstance(log, CallLog)
