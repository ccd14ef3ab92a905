"""Calls that were kept of a loss: the files, and what they tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.comm.call_records import Call, CallLog, parse_calls
from lockstep.comm.calls import KINDS, CallRing
from lockstep.config import TrainConfig
from lockstep.engine.call_history import (
    FlightFolder,
    difference,
    listed,
    losses,
    reached,
    unreported,
    waiting,
    waits,
)
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import Event, RankLost
from lockstep.engine.recovery.leader import Origin, Owned
from lockstep.engine.run.progress import Progress
from lockstep.engine.run.reporter import Reporter
from lockstep.errors import DataError

Made = tuple[str, int] | tuple[str, int, int]
"""A kind, bytes, and perhaps the other rank."""


def ring(
    rank: int, calls: Sequence[Made], open_call: Made | None = None, size: int = 3, step: int = 11
) -> CallRing:
    """A rank's ring: calls that have ended, and one that has not."""
    made = CallRing()
    group = made.start(rank, size)
    made.note_step(step)
    for number, call in enumerate((*calls, *([open_call] if open_call else []))):
        kind, num_bytes, *peer = call
        peers = peer or [-1]
        place = made.begin(group, KINDS.index(kind), (num_bytes, num_bytes, peers[0]))
        if number < len(calls):
            made.end(place, is_done=True)
    return made


def log(*arguments: object, **keys: object) -> CallLog:
    return parse_calls(ring(*arguments, **keys).copy())  # type: ignore[arg-type]


GATHER, BARRIER = ("all_gather", 24), ("barrier", 0)
HUNG = {
    0: log(0, [GATHER] * 4, GATHER),
    1: log(1, [GATHER] * 4),
    2: log(2, [GATHER] * 4, GATHER),
}


def test_who_hung_and_who_waited_is_said_by_call_and_number() -> None:
    assert reached(HUNG[1]) == "in step 12, after call 4 (all_gather)"
    assert waiting(HUNG, {1}) == "ranks 0 and 2 waited for it in call 5 (all_gather)"
    assert difference(HUNG) == ""


def test_a_rank_that_hangs_in_a_call_or_before_its_first() -> None:
    assert reached(log(1, [GATHER], BARRIER)) == "in step 12, in call 2 (barrier)"
    assert reached(log(1, [], step=0)) == "in step 1, before its first call"
    assert waiting({1: HUNG[1]}, {1}) == ""


def test_ranks_in_different_calls_are_listed_by_call_without_other_groups() -> None:
    logs = {**HUNG, 0: log(0, [GATHER] * 4, ("receive", 8, 2)), 7: log(0, [], GATHER, size=8)}
    assert waiting(logs, {1}) == (
        "rank 0 waited for it in message 1 from rank 2, rank 2 waited for it in call 5 (all_gather)"
    )


def test_a_subgroup_is_named_by_its_ranks() -> None:
    made = CallRing()
    made.start(2, 4)
    group = made.subgroup([0, 2])
    made.begin(group, KINDS.index("send"), (8, 0, 0))
    said = waits({2: parse_calls(made.copy())})
    assert said == [([2], "message 1 to rank 0")]
    made.begin(group, KINDS.index("barrier"), (0, 0, -1))
    assert reached(log(0, [])) == "in step 12, before its first call"
    last = parse_calls(made.copy()).calls[-1]
    assert (last.group, last.number) == (1, 1)


def test_the_first_call_that_differs_is_found() -> None:
    skipped = {
        0: log(0, [GATHER, GATHER, ("all_gather", 48)], BARRIER),
        1: log(1, [GATHER, ("all_gather", 48), BARRIER], ("agree", 0)),
        2: log(2, [GATHER, GATHER, ("all_gather", 48)], BARRIER),
    }
    assert difference(skipped) == (
        "call 2 is all_gather of 24 bytes on ranks 0 and 2, all_gather of 48 bytes on rank 1"
    )
    kinds = {0: log(0, [GATHER], BARRIER), 1: log(1, [GATHER], ("broadcast", 8))}
    assert difference(kinds) == "call 2 is barrier on rank 0, broadcast of 8 bytes on rank 1"


def failed(rank: int, *calls: str) -> CallLog:
    """A rank whose newest calls have failed, after four all-gathers."""
    made = CallRing()
    group = made.start(rank, 3)
    for kind in ("all_gather",) * 4:
        made.end(made.begin(group, KINDS.index(kind), (24, 24, -1)), is_done=True)
    for kind in calls:
        peer = 0 if kind == "receive" else -1
        made.end(made.begin(group, KINDS.index(kind), (24, 24, peer)), is_done=False)
    return parse_calls(made.copy())


def test_what_ranks_do_about_a_loss_is_no_difference() -> None:
    logs = {0: failed(0, "all_gather", "regroup"), 2: failed(2, "receive", "regroup")}
    assert [call.kind for call in logs[2].until_stuck] == ["all_gather"] * 4 + ["receive"]
    assert difference(logs) == ""
    logs[2] = failed(2, "barrier", "regroup")
    assert difference(logs) == "call 5 is all_gather of 24 bytes on rank 0, barrier on rank 2"


def test_a_message_in_a_subgroup_of_unknown_ranks_is_named_by_its_place() -> None:
    sent = Call("send", 1, 3, 8, 0, 1, 1, 0, False)
    assert waits({2: CallLog(2, 4, 11, [None], [sent])}) == [
        ([2], "message 3 to place 1 of a subgroup")
    ]
    assert waits({2: CallLog(2, 4, 11, [[0, 2]], [sent])}) == [([2], "message 3 to rank 2")]


@pytest.mark.parametrize("skip", [0, 5, 1500, 2999])
def test_a_skipped_call_is_found_wherever_the_ring_begins(skip: int) -> None:
    made: list[Made] = [("all_gather", 8 * (1 + n % 7)) for n in range(3000)]
    without = made[:skip] + made[skip + 1 :]
    logs = {0: log(0, made, BARRIER), 1: log(1, without, BARRIER)}
    assert difference(logs).startswith(f"call {max(skip + 1, 3001 - 1023):,} is ")


def test_lists_of_ranks_stay_short() -> None:
    assert [listed(r) for r in ([3], [2, 1], range(6), range(1000))] == [
        "rank 3", "ranks 1 and 2", "ranks 0, 1, 2, 3, 4 and 5", "ranks 0, 1, 2, 3, 4 and 995 more",
    ]  # fmt: skip


def write(folder: FlightFolder, waits_too: bool = False) -> None:
    for slot, open_call in ((0, GATHER), (1, None), (2, GATHER)):
        folder.keep(slot, ring(slot, [GATHER] * 4, open_call).copy())
        if waits_too:
            folder.waiting_file(slot).write_bytes(b"damaged")


def test_losses_tell_of_those_that_hung_and_nothing_of_those_that_were_killed(
    tmp_path: Path,
) -> None:
    folder = FlightFolder(tmp_path)
    write(folder)
    logs = folder.present()
    (lost,) = losses(11, {1: 1}, {1: "did nothing"}, logs)
    assert lost.reached == "in step 12, after call 4 (all_gather)"
    assert lost.waiting == "ranks 0 and 2 waited for it in call 5 (all_gather)"
    assert (lost.step, lost.slot, lost.rank, lost.reason) == (11, 1, 1, "did nothing")
    (killed,) = losses(11, {1: 1}, {1: ""}, logs)
    assert (killed.reached, killed.waiting) == ("", "")
    assert unreported(logs, {1: "did nothing", 0: ""}) == [lost]
    assert unreported(logs, {}) == []


@pytest.mark.parametrize(
    ("rank", "reason", "num_read", "said"),
    [(0, "did nothing", 1, "in step 12, after call 4 (all_gather)"), (1, "did nothing", 0, ""),
     (0, "", 0, "")],
)  # fmt: skip
def test_files_of_a_loss_are_read_by_rank_0_alone_and_only_if_one_has_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    rank: int, reason: str, num_read: int, said: str,
) -> None:  # fmt: skip
    directory, events = RunDirectory(tmp_path), list[Event]()
    write(directory.flight)
    if reason:
        directory.hang_report(1).write_text('{"reason": "did nothing"}')
    logs, reads = directory.flight.present(), []
    monkeypatch.setattr(directory.flight, "present", lambda: reads.append(1) or logs)
    transport = SimpleNamespace(size=3, rank=rank)
    runtime: Any = SimpleNamespace(transport=transport, is_first=rank == 0, emit=events.append)
    mesh = SimpleNamespace(microbatches=[range(1)] * 2)
    parts: Any = SimpleNamespace(
        compute=SimpleNamespace(metrics=()),
        placement=SimpleNamespace(mesh=mesh),
        train_step=SimpleNamespace(),
    )
    reporter = Reporter("task", TrainConfig(), runtime, parts, directory)
    reporter._slots = [0, 1, 2]
    origin = Origin(
        [0, 2], [Owned(), Owned()], [{"slot": slot, "rounding": "alike"} for slot in (0, 2)], {}
    )
    reporter.regroup(Progress(step=11), origin, False, 1.0, 11)
    (lost,) = [event for event in events if isinstance(event, RankLost)]
    assert (lost.slot, lost.reason, lost.reached) == (1, reason, said)
    assert len(reads) == num_read
    assert (tmp_path / "flight" / "0001").exists() == (rank == 0)


def test_what_is_set_aside_is_no_longer_present_and_only_the_newest_stay(tmp_path: Path) -> None:
    folder = FlightFolder(tmp_path)
    for _ in range(5):
        write(folder, waits_too=True)
        folder.set_aside([1])
        assert not folder.waiting_file(1).exists()
        assert folder.present() == {}  # what is damaged is left out
    names = sorted(path.name for path in (tmp_path / "flight").iterdir() if path.is_dir())
    assert names == ["0003", "0004", "0005"]
    with pytest.raises(DataError, match="waiting_slot_0"):
        folder.newest()
    folder.begin()
    assert sorted(folder.newest()) == [0, 1, 2]
    assert not list((tmp_path / "flight").glob("*.calls"))


def test_a_new_session_shows_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    folder = FlightFolder(tmp_path)
    folder.begin()
    assert not (tmp_path / "flight").exists()
    write(folder, waits_too=True)
    folder.begin()
    assert folder.present() == {}
    assert sorted(folder.newest()) == [0, 1, 2]


def test_survivors_of_nothing_leave_nothing(tmp_path: Path) -> None:
    folder = FlightFolder(tmp_path)
    write(folder)
    folder.forget()
    assert folder.present() == {}
    with pytest.raises(DataError, match="holds no calls"):
        folder.newest()
