"""Files of what was logged: complete where rank 0 is lost, cut where a run goes back."""

from __future__ import annotations

import csv
import importlib
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_events import (
    Recorder,
    checkpointed,
    evaluated,
    finished,
    full_disk,
    run_started,
    step_done,
)

from lockstep.engine.events import Event, Logged, Warned
from lockstep.engine.log import Logbook, log
from lockstep.errors import RunDirectoryError
from lockstep.observe import EventHub, Sinks, event_from_row, read_events
from lockstep.observe.storing.files import Pictures
from lockstep.observe.storing.jsonl import EventsJsonl
from lockstep.observe.storing.metrics_csv import MetricsCsv
from lockstep.observe.trackers.tracker_sink import TensorBoard


def events_of(step: int, **values: Any) -> list[Event]:
    found: list[Event] = []
    with Logbook(found.append).opened(step):
        for name, value in values.items():
            log(name, value)
    return found


def picture(seed: int) -> np.ndarray:
    return np.full((4, 4, 3), seed, np.uint8)


def hub(folder: Path) -> EventHub:
    return EventHub(
        lambda _: Sinks(
            [
                Pictures(folder),
                EventsJsonl(folder / "events.jsonl"),
                MetricsCsv(folder / "metrics.csv"),
            ]
        )
    )


def story(step: int, width: int) -> list[Event]:
    """A step whose scalars are more than any bound on rows that are remembered."""
    values: dict[str, Any] = {f"n{number}": step + number / 8 for number in range(width)}
    return [
        *events_of(step, **values, bad=float("nan"), text=f"step {step}", hist=np.ones(3)),
        *events_of(step, image=picture(step)),
        step_done(step),
    ]


def rows(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (r["event"], r["step"], r.get("name"), str(r.get("value", r.get("text"))))
        for r in read_events(folder / "events.jsonl")
        if r["event"] != "RunStarted"
    ]


def curves(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*.png")}


@pytest.mark.parametrize("width", [3, 400])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_the_next_rank_0_writes_what_is_missing_and_nothing_twice(
    tmp_path: Path, width: int, behind: int, part: float
) -> None:
    """Rank 0 dies in the middle of step 3; the other rank has done step 3, or not."""
    whole, split = tmp_path / "whole", tmp_path / "split"
    steps = {step: story(step, width) for step in range(1, 6)}
    only = hub(whole)
    only.open()
    for event in [run_started(), *(e for events in steps.values() for e in events), finished(5)]:
        only(event)
    only.close()

    first, second = hub(split), hub(split)
    first.open()
    newest = steps[3][: int(part * len(steps[3]))]
    for event in [run_started(), *steps[1], *steps[2], *newest]:
        first(event)
    known = [*steps[1], *steps[2]] if behind else [*steps[1], *steps[2], *steps[3]]
    for event in [run_started(), *known]:
        second(event)
    second.open()
    second(run_started(step=2 if behind else 3, continued=True))
    for step in range(3 if behind else 4, 6):
        for event in steps[step]:
            second(event)
    second(finished(5))
    second.close()
    assert rows(split) == rows(whole)
    assert curves(split) == curves(whole)
    assert files(split) == files(whole)


def test_rows_are_events_again_without_their_pictures(tmp_path: Path) -> None:
    sink = EventsJsonl(tmp_path / "events.jsonl")
    written = [*events_of(3, a=0.5, b="NaN", c=np.arange(9.0)), *events_of(3, d=picture(1))]
    for event in written:
        sink(event)
    sink.close()
    text = (tmp_path / "events.jsonl").read_text()
    assert "png" not in text.replace(".png", "")
    read = [event_from_row(row) for row in read_events(tmp_path / "events.jsonl")]
    for before, after in zip(written, read, strict=True):
        assert isinstance(before, Logged)
        assert isinstance(after, Logged)
        assert (after.name, after.kind, after.value, after.text) == (
            before.name, before.kind, before.value, before.text,
        )  # fmt: skip


def test_a_row_with_the_content_of_a_picture_is_refused() -> None:
    row = {"event": "Logged", "step": 1, "name": "x", "kind": "image", "png": "no bytes"}
    with pytest.raises(RunDirectoryError, match="png: a row must not hold a picture"):
        event_from_row(row)


def test_a_name_that_is_logged_twice_in_a_step_has_its_last_value(tmp_path: Path) -> None:
    only = hub(tmp_path)
    only.open()
    for event in (run_started(), *events_of(1, a=1.0), *events_of(1, a=2.0), step_done(2)):
        only(event)
    only.close()
    assert [row["a"] for row in curves(tmp_path)] == ["2.0", ""]


BACK: list[Event] = [
    *events_of(5, a=1.0), *events_of(5, b=7.0), step_done(5), *events_of(5, a=2.0),
    *events_of(5, a=2.0), evaluated(5), *events_of(5, a=1.0),
]  # fmt: skip
"""A name that comes back to its first value, with rows of other splits in between."""


def logged(folder: Path, name: str) -> list[str]:
    """The cells of a name in the rows of the split `log`."""
    return [row[name] for row in curves(folder) if row["split"] == "log" and row.get(name)]


@pytest.mark.parametrize("num_written", range(1, len(BACK) + 2))
def test_a_name_that_gets_a_value_back_has_it_in_all_files(
    tmp_path: Path, num_written: int
) -> None:
    """Also where rank 0 dies in between, and the next one writes what is missing."""
    first, second = hub(tmp_path), hub(tmp_path)
    first.open()
    for event in [run_started(), *BACK][:num_written]:
        first(event)
    for event in (run_started(), *BACK):
        second(event)
    second.open()
    for event in (run_started(step=5, continued=True), finished(5)):
        second(event)
    second.close()
    values = [(r["name"], r["value"]) for r in read_events(tmp_path / "events.jsonl")
              if r["event"] == "Logged"]  # fmt: skip
    assert values == [("a", 1.0), ("b", 7.0), ("a", 2.0), ("a", 1.0)]
    assert (logged(tmp_path, "a"), logged(tmp_path, "b")) == (["1.0", "2.0", "1.0"], ["7.0"])


def test_a_value_that_a_later_session_logs_again_is_the_last(tmp_path: Path) -> None:
    """`on_start` logs at the step that the run goes on from, of which the file has rows."""
    for values in ((1.0, 2.0), (1.0, 1.0), (2.0,)):
        session = MetricsCsv(tmp_path / "metrics.csv")
        session(run_started(step=2))
        for value in values:
            for event in (*events_of(2, a=value), checkpointed(2)):
                session(event)
        session.close()
    assert logged(tmp_path, "a") == ["1.0", "2.0", "1.0", "2.0"]


@given(
    st.lists(st.sampled_from([*"aabb", "all", "old", "new"]).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from([1.0, 2.0, 3.0]))), max_size=12),
    st.integers(0, 12),
)  # fmt: skip
def test_whenever_rank_0_is_lost_the_last_value_of_each_name_counts(
    story: list[tuple[str, float]], num_written: int
) -> None:
    """Also where rows end elsewhere, since only one of the processes is told something."""
    ends: dict[str, list[Event]] = {
        "all": [evaluated(5)], "old": [checkpointed(5)], "new": [Warned(step=5, message="m")]
    }  # fmt: skip
    events = list(chain(*(ends.get(n) or events_of(5, **{n: value}) for n, value in story)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.csv"
        first = MetricsCsv(path)
        for event in (run_started(), *events[:num_written]):
            if event not in ends["new"]:
                first(event)
        second = MetricsCsv(path)
        for event in (run_started(step=5, continued=True), *events, finished(5)):
            if event not in ends["old"]:
                second(event)
        second.close()
        last = {name: str(value) for name, value in story if name in ("a", "b")}
        assert {name: logged(Path(folder), name)[-1] for name in last} == last


def test_what_a_checkpoint_holds_is_in_the_file_although_the_run_is_killed(tmp_path: Path) -> None:
    """Killed in step 3: nothing is closed, and what is logged at step 2 does not come again."""
    first = MetricsCsv(tmp_path / "metrics.csv")
    after_step, after_evaluation = events_of(2, a=1.0), events_of(2, b=2.0)
    saved = [*after_step, step_done(2), evaluated(2), *after_evaluation, checkpointed(2)]
    for event in (run_started(), *saved):
        first(event)
    second = MetricsCsv(tmp_path / "metrics.csv")
    # `on_end` of a hook logs at the newest step too, and may log a name again.
    at_end = events_of(3, d=5.0, a=6.0)
    for event in (run_started(step=2), *events_of(3, a=3.0), step_done(3), *at_end, finished(3)):
        second(event)
    second.close()
    table = [(r["step"], r["a"], r["b"], r["d"]) for r in curves(tmp_path) if r["split"] == "log"]
    assert table == [
        ("2", "1.0", "", ""), ("2", "", "2.0", ""), ("3", "3.0", "", ""), ("3", "6.0", "", "5.0"),
    ]  # fmt: skip


def test_what_is_logged_late_is_not_written_twice_by_the_next_rank_0(tmp_path: Path) -> None:
    """It knows of no checkpoint, which is an event of rank 0 alone."""
    known = [*events_of(2, a=1.0), step_done(2), evaluated(2), *events_of(2, b=2.0)]
    first, second = hub(tmp_path), hub(tmp_path)
    first.open()
    for event in (run_started(), *known, checkpointed(2)):
        first(event)
    for event in (run_started(), *known, *events_of(2, c=3.0)):
        second(event)
    second.open()
    for event in (run_started(step=2, continued=True), finished(2)):
        second(event)
    second.close()
    table = [(r["a"], r["b"], r["c"]) for r in curves(tmp_path) if r["split"] == "log"]
    assert table == [("1.0", "", ""), ("", "2.0", ""), ("", "", "3.0")]


def test_pictures_of_later_steps_are_removed_where_a_run_goes_back(tmp_path: Path) -> None:
    sink = Pictures(tmp_path)
    for step in (1, 2, 3):
        (event,) = events_of(step, image=picture(step))
        sink(event)
    (tmp_path / "logged" / "image" / "notes.txt").write_text("mine")
    sink(run_started(step=3, continued=True))
    assert len(files(tmp_path)) == 3
    sink(run_started(step=1))
    assert [*files(tmp_path)] == ["00000001.png"]
    assert (tmp_path / "logged" / "image" / "notes.txt").exists()


def test_a_picture_that_a_full_disk_refuses_comes_when_there_is_room(tmp_path: Path) -> None:
    recorder = Recorder()
    sinks = Sinks([Pictures(tmp_path), recorder])
    with full_disk(20):
        for step in range(1, 21):
            sinks(*events_of(step, image=picture(step)))
    assert sum(isinstance(event, Warned) for event in recorder.events) == 1
    sinks(step_done(21))
    sinks.close()
    assert sorted(files(tmp_path)) == [f"{step:08}.png" for step in range(5, 21)]


def test_tensorboard_has_each_kind(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink(run_started())
    values = np.array([0.0, 1.0, 1.0, np.inf])
    image = events_of(4, d=picture(9))
    for event in (*events_of(4, a=0.5, b="some text", c=values), *image):
        sink(event)
    sink.close()
    reader: Any = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("log/a")] == [(4, 0.5)]
    (told,) = reader.Tensors("log/b/text_summary")
    assert told.tensor_proto.string_val[0] == b"some text"
    (counted,) = (e.histogram_value for e in reader.Histograms("log/c"))
    assert (counted.min, counted.max, counted.num) == (0.0, 1.0, 3.0)
    assert sum(counted.bucket) == 3
    (shown,) = reader.Images("log/d")
    assert (shown.width, shown.height) == (4, 4)
    assert isinstance(image[0], Logged)
    assert shown.encoded_image_string == image[0].png
