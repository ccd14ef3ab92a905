from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_events import evaluated, finished, joined, run_started, step_done

from lockstep.engine.events import Event, Logged, Resumed
from lockstep.errors import RunDirectoryError
from lockstep.observe import event_from_row, read_events
from lockstep.observe.storing.jsonl import EventsJsonl, dumps, end_of_events, follow_events, row_of


def kinds() -> list[type[Event]]:
    return [kind for kind in Event.__subclasses__() if kind.__module__ == Event.__module__]


def events() -> st.SearchStrategy[Event]:
    arrays = st.dictionaries(st.text(), st.recursive(st.floats() | st.integers(), st.lists))
    logged = st.builds(Logged, kind=st.just("x"), value=arrays, text=st.just(""), png=st.just(b""))
    said = st.builds(Logged, kind=st.just("text"), value=st.none(), png=st.just(b""))
    return st.one_of(
        logged,
        said,
        *(
            st.builds(kind, arrays=arrays)
            if "arrays" in {field.name for field in fields(kind)}
            else st.from_type(kind)
            for kind in kinds()
            if kind is not Logged
        ),
    )


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN equal to NaN."""
    return repr(one) == repr(other)


@given(events())
def test_every_event_survives_the_way_through_strict_json(event: Event) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = dumps(row_of(event, 12.5))
    assert "\n" not in text
    row = json.loads(text, parse_constant=refuse)
    assert list(row)[:2] == ["event", "time"]
    assert row["time"] == 12.5
    assert same(event_from_row(row), event)


def test_a_step_row_holds_the_derived_values_and_names_non_finite_ones() -> None:
    event = step_done(3, loss=math.nan, metrics={"up": math.inf, "down": -math.inf})
    row = json.loads(dumps(row_of(event, 1.0)))
    assert row["samples_per_s"] == event.samples_per_s == 128.0
    assert row["compute_efficiency"] == event.compute_efficiency
    assert row["loss"] == "NaN"
    assert row["metrics"] == {"up": "Infinity", "down": "-Infinity"}
    assert row["ranks"][1]["compute_s"] == 1.6
    assert list(row)[2] == "step"


@pytest.mark.parametrize(
    "row",
    [
        {"event": "Unheard", "step": 1},
        {"event": "Warned", "step": 1},
        {"event": "Warned", "step": "one", "message": "m"},
        {},
    ],
)
def test_a_row_of_another_version_is_one_clear_error(row: dict[str, Any]) -> None:
    with pytest.raises(RunDirectoryError, match="event"):
        event_from_row(row)


def test_new_fields_are_passed_over_and_missing_ones_take_their_default() -> None:
    row = {"event": "Resumed", "time": 1.0, "step": 4, "path": "p", "future": [1]}
    assert event_from_row(row) == Resumed(step=4, path="p", skipped=())


def test_an_event_defined_elsewhere_is_known() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Noticed(Event):
        pairs: dict[int, float] | None = None

    event = Noticed(step=1, pairs={3: 0.5})
    assert event_from_row(json.loads(dumps(row_of(event, 0.0)))) == event


def test_rows_are_there_at_once_and_a_later_session_appends(tmp_path: Path) -> None:
    path = tmp_path / "日誌" / "events.jsonl"
    for step in (1, 2):
        sink = EventsJsonl(path, clock=lambda: 1234.5)
        sink(step_done(step))
        assert [row["step"] for row in read_events(path)] == list(range(1, step + 1))
        sink.close()
        sink.close()
    assert read_events(path)[0]["time"] == 1234.5


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_session(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = dumps(row_of(finished(), 0.0)) + "\n"
    path.write_text(whole + whole[:40])
    assert len(read_events(path)) == 1
    assert end_of_events(path) == len(whole)
    sink = EventsJsonl(path)
    sink(step_done(1))
    sink.close()
    assert [row["event"] for row in read_events(path)] == ["Finished", "StepDone"]


@pytest.mark.parametrize(
    "damage",
    ["{not json}\n", "[1]\n", "\xff\n", "{}\n", '{"event": 3, "step": 1}\n', "[" * 100_000 + "\n"],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "Finished", "step": 1}\n' + damage.encode("latin-1"))
    with pytest.raises(RunDirectoryError, match=r"events\.jsonl: line 2"):
        read_events(path)


def test_a_missing_file_is_an_error_to_read_and_empty_to_follow(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    with pytest.raises(RunDirectoryError, match=r"none\.jsonl"):
        read_events(path)
    assert end_of_events(path) == 0
    assert list(follow_events(path, stop=lambda: True)) == []


def test_following_yields_rows_while_they_are_written(tmp_path: Path) -> None:
    path, written = tmp_path / "events.jsonl", threading.Event()
    follower = follow_events(path, written.is_set, poll_s=0.001)
    got: list[Event] = []
    first = threading.Event()

    def consume() -> None:
        for row in follower:
            got.append(event_from_row(row))
            first.set()

    consumer = threading.Thread(target=consume)
    consumer.start()
    sink = EventsJsonl(path)
    sent: list[Event] = [run_started(), joined(0), step_done(1), evaluated(1), finished()]
    sink(sent[0])
    assert first.wait(5), "a row is yielded before the writer has ended"
    for event in sent[1:]:
        sink(event)
    written.set()
    consumer.join(5)
    assert got == sent


def test_rows_written_just_before_the_stop_are_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventsJsonl(path)

    def stop() -> bool:
        sink(step_done(7))
        return True

    assert [row["step"] for row in follow_events(path, stop)] == [7]


def test_following_skips_earlier_sessions_and_outlives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventsJsonl(path)
    sink(step_done(1))
    sink.close()
    start = end_of_events(path)

    def sessions() -> Iterator[bool]:
        with path.open("a") as file:
            file.write('{"event": "torn by a kill')
        yield False
        sink = EventsJsonl(path)
        sink(step_done(2))
        sink.close()
        yield True

    states = sessions()
    rows = follow_events(path, lambda: next(states), start=start, poll_s=0)
    assert [row["step"] for row in rows] == [2]


def test_a_file_that_replaces_another_is_followed_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        EventsJsonl(path)(step_done(step))

    def sessions() -> Iterator[bool]:
        yield False
        path.rename(tmp_path / "moved.jsonl")
        EventsJsonl(path)(step_done(3))
        yield True

    states = sessions()
    first, _ = path.read_bytes().splitlines(keepends=True)  # times take more digits or fewer
    rows = follow_events(path, lambda: next(states), start=len(first), poll_s=0)
    assert [row["step"] for row in rows] == [2, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metrics", 3),
        ("metrics", []),
        ("ranks", "ab"),
        ("ranks", [3]),
        ("loss", None),
        ("step", "x"),
    ],
)
def test_a_field_of_another_type_is_a_clear_message(field: str, value: object) -> None:
    row = json.loads(dumps(row_of(step_done(1), 0.0))) | {field: value}
    with pytest.raises(RunDirectoryError, match="event StepDone: field missing or wrong"):
        event_from_row(row)
