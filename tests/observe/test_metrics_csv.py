from __future__ import annotations

import csv
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_events import checkpointed, evaluated, full_disk, rank_times, run_started, step_done

from lockstep.engine.events import Evaluated, Event
from lockstep.errors import RunDirectoryError
from lockstep.observe.sink import RowsLeftOut
from lockstep.observe.storing.metrics_csv import COLUMNS, MetricsCsv


def write(path: Path, events: list[Event], resumed_step: int = 0) -> None:
    """One session."""
    sink = MetricsCsv(path)
    sink(run_started(step=resumed_step))
    for event in events:
        sink(event)
    sink.close()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_and_an_evaluation_are_a_row_each(tmp_path: Path) -> None:
    path = tmp_path / "kurven-µ" / "metrics.csv"
    write(path, [step_done(10), checkpointed(10), evaluated(10)])
    train, val = rows(path)
    assert tuple(train) == (*COLUMNS, "accuracy")
    assert (train["step"], train["epoch"], train["split"]) == ("10", "1", "train")
    assert float(train["loss"]) == 1 / 3
    assert float(train["accuracy"]) == 0.1 + 0.2
    assert float(train["samples_per_s"]) == 128.0
    assert float(train["compute_s"]) == 0.6 + 1.6
    assert float(train["communication_s"]) == 0.5
    assert float(train["compute_efficiency"]) == pytest.approx(2.2 / 2.95)
    assert (val["step"], val["epoch"], val["split"]) == ("10", "0", "val")
    assert (val["loss"], val["accuracy"], val["lr"]) == ("0.25", "0.9", "")


def test_an_evaluation_is_of_the_epoch_of_the_step_before_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, [evaluated(step) for step in (0, 1, 25, 26)])
    assert [row["epoch"] for row in rows(path)] == ["0", "0", "0", "1"]


def test_the_header_grows_and_earlier_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(
        path,
        [
            step_done(1, metrics={}),
            step_done(2, metrics={"b": 2.0}),
            evaluated(2, **{"a, b": 3.0}),
            step_done(3, metrics={"b": 4.0}),
        ],
    )
    table = rows(path)
    assert tuple(table[0])[len(COLUMNS) :] == ("b", "a, b")
    assert [row["b"] for row in table] == ["", "2.0", "", "4.0"]
    assert [row["a, b"] for row in table] == ["", "", "3.0", ""]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_metrics_with_the_name_of_a_column_do_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, [step_done(1, metrics={"loss": 9.0, "lr": 8.0}), evaluated(1, loss=7.0, step=6.0)])
    train, val = rows(path)
    assert (train["loss"], train["metric_loss"], train["metric_lr"]) == (repr(1 / 3), "9.0", "8.0")
    assert (val["loss"], val["step"], val["metric_step"]) == ("7.0", "1", "6.0")


def test_work_redone_after_a_fault_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, [step_done(1), evaluated(1), step_done(2)])
    write(path, [evaluated(1), evaluated(1, "test"), step_done(2), step_done(2)], resumed_step=1)
    assert [(row["step"], row["split"], row["epoch"]) for row in rows(path)] == [
        ("1", "train", "1"),
        ("1", "val", "0"),
        ("1", "test", "0"),
        ("2", "train", "1"),
    ]


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Steps with evaluations between; metrics come and go; any float, any name."""
    names = st.text(min_size=1, max_size=3)
    metrics = st.dictionaries(names, st.floats(), max_size=2)
    events: list[Event] = []
    for step in range(1, draw(st.integers(1, 6)) + 1):
        events.append(step_done(step, loss=draw(st.floats()), metrics=draw(metrics)))
        if draw(st.booleans()):
            events.append(Evaluated(step=step, split="val", metrics=draw(metrics), seconds=1.0))
    return events


@settings(max_examples=25, deadline=None)
@given(histories(), st.integers(0, 7), st.integers(0, 200))
def test_an_interrupted_file_ends_equal_to_an_uninterrupted_one(
    history: list[Event], resumed_step: int, torn: int
) -> None:
    """Killed anywhere after `resumed_step`, in the middle of a row too, then resumed."""
    with tempfile.TemporaryDirectory() as directory:
        whole, broken = Path(directory, "whole.csv"), Path(directory, "broken.csv")
        write(whole, history)
        write(broken, [event for event in history if event.step <= resumed_step])
        kept = broken.read_bytes()
        write(broken, [event for event in history if event.step > resumed_step], resumed_step)
        later = broken.read_bytes()
        if later.startswith(kept):  # else the header has grown since
            broken.write_bytes(later[: len(kept) + torn])
        # from >=: an evaluation at the checkpoint's own step may be done again
        write(broken, [event for event in history if event.step >= resumed_step], resumed_step)
        assert sort_columns(rows(broken)) == sort_columns(rows(whole))


def sort_columns(table: list[dict[str, str]]) -> list[list[tuple[str, str]]]:
    """Rows without empty cells, whatever the order of columns."""
    return [sorted((name, cell) for name, cell in row.items() if cell) for row in table]


@given(st.lists(st.floats(), max_size=20))
@settings(max_examples=10, deadline=None)
def test_numbers_are_read_back_to_the_bit(values: list[float]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "metrics.csv")
        write(path, [step_done(step, loss=value) for step, value in enumerate(values)])
        read = [float(row["loss"]) for row in rows(path)]
    assert [value.hex() for value in read] == [value.hex() for value in values]


def test_rows_are_removed_all_at_once_and_none_is_written_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, [step_done(step) for step in range(1, 20)])
    before = path.read_bytes()
    sink = MetricsCsv(path)
    with full_disk(len(before) // 2):
        for event in (run_started(step=15), step_done(16, loss=5.0), step_done(19, loss=6.0)):
            with pytest.raises(OSError, match="File too large"):
                sink(event)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["metrics.csv"]
    sink.close()
    table = [(row["step"], float(row["loss"])) for row in rows(path)]
    assert table == [*((str(step), 1 / 3) for step in range(1, 16)), ("16", 5.0), ("19", 6.0)]


def test_closing_writes_all_that_waits_behind_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsv(path)
    sink(step_done(1))
    monkeypatch.setattr("lockstep.observe.storing.files.MOST_WAITING", 150)
    late = {"late": 1.0}
    with full_disk(path.stat().st_size):
        for event in (*map(step_done, (2, 3)), *(step_done(n, metrics=late) for n in (4, 5))):
            with pytest.raises(OSError, match="File too large"):
                sink(event)
    with pytest.raises(RowsLeftOut, match="lacks 1 row, for"):
        sink.close()
    assert [row["step"] for row in rows(path)] == ["1", "2", "4", "5"]


def test_rows_that_wait_for_room_are_removed_as_well(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsv(path)
    with full_disk(path.stat().st_size + 10):
        for step in (1, 2, 3):
            with pytest.raises(OSError, match="File too large"):
                sink(step_done(step, metrics={"late": float(step)}))
    sink.truncate_after(1)
    sink(step_done(2, loss=5.0))
    sink.close()
    assert [(row["step"], row["loss"]) for row in rows(path)] == [("1", repr(1 / 3)), ("2", "5.0")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name,age\nann,7\n", "line 1: has no column 'step'"),
        (b"step,loss\n1,7\n", "line 1: has no column 'split'"),
        (b"step,split,loss,loss\n1,val,7,7\n", "line 1: has the column 'loss' twice"),
        (b"step,split\nx,7\n", "line 2: has no step"),
        (b"step,split\n-5,val\n", "line 2: has no step"),
        (b"step,split\n" + b"9" * 5000 + b",val\n", "line 2: has no step"),
        (b"step,split\n1\n", "line 2: does not have a cell for each column"),
        (b"step,split\n1,2,3\n", "line 2: does not have a cell for each column"),
        (b"step,split\n1,\xff\n", "is damaged"),
    ],
)
def test_a_file_that_is_none_of_ours_is_left_alone(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=message):
        MetricsCsv(path)
    assert path.read_bytes() == content


def test_ranks_are_summed_whatever_their_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, [step_done(1, ranks=()), step_done(2, ranks=tuple(map(rank_times, range(5))))])
    assert [float(row["data_s"]) for row in rows(path)] == [0.0, 0.625]
