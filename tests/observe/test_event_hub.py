"""Rank 0 is lost and another rank goes on: no row is missing or there twice."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sample_events import (
    Recorder,
    evaluated,
    finished,
    full_disk,
    joined,
    run_started,
    step_done,
)

from lockstep.engine.events import (
    Event,
    Failed,
    Logged,
    RankLost,
    Recovered,
    Resumed,
    Warned,
)
from lockstep.observe import EventHub, Sinks, read_events
from lockstep.observe.storing.jsonl import EventsJsonl
from lockstep.observe.storing.metrics_csv import MetricsCsv


def desk(folder: Path) -> EventHub:
    return EventHub(
        lambda _: Sinks([EventsJsonl(folder / "events.jsonl"), MetricsCsv(folder / "metrics.csv")])
    )


def rows(folder: Path) -> list[tuple[str, int]]:
    return [(r["event"], r["step"]) for r in read_events(folder / "events.jsonl")]


def curve(folder: Path) -> list[tuple[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(r["step"], r["split"]) for r in csv.DictReader(file)]


START = [joined(0), joined(1), run_started(world_size=2)]
STORY = [*START, *(step_done(s) for s in range(1, 5)), evaluated(4, loss=0.5), step_done(5)]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("written", range(len(START) + 1, len(STORY) + 1))
def test_the_next_rank_0_writes_what_is_missing(tmp_path: Path, written: int, ahead: int) -> None:
    """Rank 0 wrote `written` rows; the other rank knows `ahead` more, and does the rest again."""
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    for event in STORY[:written]:
        first(event)
    known = min(written + ahead, len(STORY))
    for event in STORY[:known]:
        second(event)
    second.open()
    second(run_started(world_size=1, step=STORY[known - 1].step, continued=True))
    for event in STORY[known:]:
        second(event)
    second(finished(5))
    second.close()
    found = [row for row in rows(tmp_path) if row[0] not in ("Joined", "RunStarted")]
    expected = [(type(e).__name__, e.step) for e in STORY[len(START) :]]
    expected += [("Measured", 5), ("Finished", 5)]
    assert found == expected
    assert curve(tmp_path) == [
        ("1", "train"), ("2", "train"), ("3", "train"), ("4", "train"), ("4", "val"), ("5", "train")
    ]  # fmt: skip


def test_survivors_that_are_behind_do_not_write_a_step_again(tmp_path: Path) -> None:
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    for event in STORY:
        first(event)
    for event in STORY[:-1]:
        second(event)
    second.open()
    second(run_started(world_size=1, step=4, continued=True))
    second(RankLost(step=4, slot=0, rank=0))
    second(step_done(5))
    second(step_done(6))
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [1, 2, 3, 4, 5, 6]
    assert [s for s, split in curve(tmp_path) if split == "train"] == ["1", "2", "3", "4", "5", "6"]


def test_a_new_session_writes_steps_it_does_again(tmp_path: Path) -> None:
    for start in (0, 3):
        session = desk(tmp_path)
        session.open()
        session(run_started(step=start))
        for step in range(start + 1, 6):
            session(step_done(step))
        session.close()
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [1, 2, 3, 4, 5, 4, 5]
    assert [s for s, _ in curve(tmp_path)] == ["1", "2", "3", "4", "5"]


def test_rows_before_this_session_do_not_count(tmp_path: Path) -> None:
    """A run of five steps was resumed from step 2; rank 0 is lost after step 3."""
    before = desk(tmp_path)
    before.open()
    before(run_started())
    for step in range(1, 6):
        before(step_done(step))
    before.close()
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    for session in (first, second):
        session(run_started(step=2))
        session(step_done(3))
    second.open()
    second(run_started(step=3, continued=True))
    second(step_done(4))
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [1, 2, 3, 4, 5, 3, 4]


def test_warnings_are_told_apart_by_what_they_say(tmp_path: Path) -> None:
    only = desk(tmp_path)
    only.open()
    for message in ("one", "two", "one"):
        only(Warned(step=1, message=message))
    assert len(rows(tmp_path)) == 2


def logged(step: int, value: float) -> Logged:
    return Logged(step=step, name="norm", kind="scalar", value=value)


def train(hubs: list[EventHub], events: list[Event]) -> None:
    """Emit events on all ranks; before each step, all learn from rank 0 what it has stored."""
    for event in events:
        if event == step_done(event.step):
            stored = hubs[0].stored
            for hub in hubs:
                hub.keep_from(stored)
        for hub in hubs:
            hub(event)


def steps(first: int, last: int) -> list[Event]:
    return [e for s in range(first, last + 1) for e in (step_done(s), logged(s, 0.5 * s))]


@pytest.mark.parametrize("is_full_again", [False, True])
@pytest.mark.parametrize("room", [0, 100, 900, 5000])
def test_rows_that_wait_for_room_outlive_the_rank_that_has_them(
    tmp_path: Path, room: int, is_full_again: bool
) -> None:
    """The disk is full from step 4 on; rank 0 is lost after step 10, the next one after 20.

    Who then goes on has joined in between, and has all from another rank.
    """
    first, second, third = desk(tmp_path), desk(tmp_path), desk(tmp_path)
    first.open()
    train([first, second], [*START, *steps(1, 3)])
    with full_disk((tmp_path / "events.jsonl").stat().st_size + room):
        train([first, second], [*steps(4, 9), evaluated(9), *steps(10, 10)])
        third.take(second.rows())
        second.open()
        lost = [RankLost(step=10, slot=0, rank=0), joined(2, step=10)]
        train([second, third], [run_started(step=10, continued=True), *lost, *steps(11, 14)])
        if is_full_again:
            train([second, third], steps(15, 20))
    if not is_full_again:  # all is stored in time, and what the next one has not to write again
        train([second, third], steps(15, 20))
        assert len(third.rows()) < 9
    third.open()
    train([third], [run_started(step=20, continued=True), *steps(21, 22), finished(22)])
    third.close()
    found = rows(tmp_path)
    assert [s for kind, s in found if kind == "StepDone"] == [*range(1, 23)]
    assert [s for kind, s in found if kind == "Logged"] == [*range(1, 23)]
    assert found.count(("Evaluated", 9)) == found.count(("RankLost", 10)) == 1
    assert found.count(("Joined", 10)) == 1
    splits = curve(tmp_path)
    assert [s for s, split in splits if split == "train"] == [*map(str, range(1, 23))]
    assert [s for s, split in splits if split == "log"] == [*map(str, range(1, 23))]
    assert splits.count(("9", "val")) == 1


def test_a_run_that_has_gone_back_to_a_checkpoint_keeps_what_it_does_not_do_again(
    tmp_path: Path,
) -> None:
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    train([first, second], [*START, *steps(1, 3)])
    again = [run_started(step=6), *steps(7, 9)]
    with full_disk((tmp_path / "events.jsonl").stat().st_size):
        train([first, second], [*steps(4, 8), *again])
    second.open()
    train([second], [run_started(step=9, continued=True), *steps(10, 10)])
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [*range(1, 11)]


def test_an_event_that_is_stored_is_not_kept_for_long() -> None:
    hubs = [EventHub(lambda _: Sinks([])) for _ in range(2)]
    hubs[0].open()
    picture = Logged(step=1, name="map", kind="image", png=b"png")
    train(hubs, [*START, *steps(1, 500), *[picture] * 40])
    assert all(len(hub.rows()) < 50 for hub in hubs)


def test_a_checkpoint_that_ranks_went_back_to_is_told_once(tmp_path: Path) -> None:
    """Rank 0 has restored it, and is lost before the group is complete."""
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    resumed = Resumed(step=2, path="checkpoints/step_00000002")
    train([first, second], [*START, *steps(1, 3), resumed])
    second.open()
    train([second], [run_started(step=2, continued=True), run_started(step=2), *steps(3, 3)])
    assert rows(tmp_path).count(("Resumed", 2)) == 1


def test_steps_that_are_done_again_while_the_disk_is_full_are_not_taken_for_stored(
    tmp_path: Path,
) -> None:
    """The disk is full after step 9; a loss goes back to step 5; rank 0 is lost after step 9."""
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    train([first, second], [*START, *steps(1, 9)])
    with full_disk((tmp_path / "events.jsonl").stat().st_size):
        train([first, second], [step_done(10), run_started(step=5)])
        assert first.stored == 5
        train([first, second], [step_done(6), RankLost(step=6, slot=2, rank=2), *steps(7, 9)])
    second.open()
    train([second], [run_started(step=9, continued=True), *steps(10, 11)])
    assert rows(tmp_path).count(("RankLost", 6)) == 1
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [*range(1, 12)]


LOSS = [
    RankLost(step=4, slot=2, rank=2),
    Warned(step=4, message="a disk is full"),
    Recovered(step=4, world_size=2, seconds=1.0, copied=False),
]


def test_a_loss_counts_once_where_the_next_one_goes_back_to_its_step(tmp_path: Path) -> None:
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    again = [RankLost(step=5, slot=3, rank=1), run_started(step=4), *steps(5, 5)]
    train([first, second], [*START, *steps(1, 4), *LOSS, *steps(5, 5), *again])
    second.open()
    train([second], [run_started(step=5, continued=True), *steps(6, 6)])
    found = rows(tmp_path)
    assert [found.count((type(e).__name__, 4)) for e in LOSS] == [1, 1, 1]


def test_a_loss_of_an_earlier_session_hides_none_of_this_one(tmp_path: Path) -> None:
    for _ in range(2):
        first, second = desk(tmp_path), desk(tmp_path)
        first.open()
        train([first, second], [joined(0, step=4), joined(1, step=4), run_started(step=4)])
        second.open()
        train([second], [run_started(step=4, continued=True), *LOSS, *steps(5, 5)])
        second.close()
    found = rows(tmp_path)
    assert [found.count((type(e).__name__, 4)) for e in LOSS] == [2, 2, 2]


@pytest.mark.parametrize("then", ["goes on", "says nothing", "fails", "ends"])
@pytest.mark.parametrize("joins", [False, True])
def test_rows_that_wait_come_before_a_step_that_is_committed_after_the_loss(
    tmp_path: Path, joins: bool, then: str
) -> None:
    """The disk is full from step 4 on, rank 0 is lost in step 11, which the next one has yet to do.

    That is a rank which has been there, or one that has joined and is the first of its host.
    """
    first, second = desk(tmp_path), desk(tmp_path)
    first.open()
    train([first, second], [*START, *steps(1, 3)])
    with full_disk((tmp_path / "events.jsonl").stat().st_size):
        train([first, second], steps(4, 10))
    kept = second.rows()
    if joins:
        second = desk(tmp_path)
    second.open(shows=False)
    if joins:
        second.take(kept)
    train([second], steps(11, 11))
    second.open()  # a further loss: it is rank 0 now
    train([second], [evaluated(11)])
    assert second.stored == -1
    if then == "goes on":
        train([second], [run_started(step=11, continued=True)])
    elif then == "says nothing":
        train([second], [Recovered(step=11, world_size=1, seconds=1.0, copied=False)])
    elif then == "fails":
        train([second], [Failed(step=11, error="RankFailure", message="no checkpoint")])
    second.close()
    found = rows(tmp_path)
    assert [s for kind, s in found if kind == "StepDone"] == [*range(1, 12)]
    assert found.count(("Evaluated", 11)) == found.count(("RunStarted", 11)) == 1
    assert found.count(("Failed", 11)) == (then == "fails")
    splits = curve(tmp_path)
    assert [s for s, split in splits if split == "train"] == [*map(str, range(1, 12))]
    assert splits.count(("11", "val")) == 1


def test_what_can_never_be_stored_is_not_kept_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.observe._MOST_KEPT", 400)
    recorder = Recorder()
    first = EventHub(lambda _: Sinks([EventsJsonl(tmp_path / "events.jsonl"), recorder]))
    second, third = desk(tmp_path), desk(tmp_path)
    first.open()
    train([first, second], [*START, *steps(1, 3)])
    (tmp_path / "events.jsonl").unlink()
    train([first, second], steps(4, 250))
    third.take(second.rows())
    train([first, second, third], steps(251, 500))
    told = [e for e in recorder.events if isinstance(e, Warned)]
    assert ["too many events" in e.message for e in told] == [False, True]  # the file is gone; this
    # A step has its report, which counts for its two ranks too, and a scalar.
    assert [len(hub.rows()) for hub in (first, second, third)] == [201, 201, 201]
    third.open()
    train([third], [run_started(step=500, continued=True), *steps(501, 501)])
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [*range(401, 502)]


@pytest.mark.parametrize("becomes_first", [False, True])
def test_a_host_whose_own_disk_was_full_has_all_rows(tmp_path: Path, becomes_first: bool) -> None:
    """Rank 0, which is lost, had stored what this host had no room for."""
    (tmp_path / "other").mkdir()
    first, own = desk(tmp_path / "other"), desk(tmp_path)
    first.open()
    own.open(shows=False)
    train([first, own], [*START, *steps(1, 3)])
    with full_disk((tmp_path / "events.jsonl").stat().st_size + 20):
        for event in steps(4, 8):
            own.keep_from(event.step)
            own(event)
        if becomes_first:
            own.open()
    train([own], [run_started(step=8, continued=True), *steps(8, 10)])
    own.close()
    assert [s for kind, s in rows(tmp_path) if kind == "StepDone"] == [*range(1, 11)]
