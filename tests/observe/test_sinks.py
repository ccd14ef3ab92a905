from __future__ import annotations

import csv
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sample_events import (
    Recorder,
    evaluated,
    finished,
    full_disk,
    run_started,
    step_done,
)

from lockstep.config.files import replacing
from lockstep.engine.events import Event, Warned
from lockstep.errors import RunDirectoryError
from lockstep.observe import Sinks, open_sinks, read_events
from lockstep.observe.sink import Sink
from lockstep.observe.storing.files import AppendFile
from lockstep.observe.storing.jsonl import EventsJsonl
from lockstep.observe.storing.metrics_csv import MetricsCsv


class Failing(Sink):
    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, event: Event) -> None:
        self.calls += 1
        raise self.error

    def close(self) -> None:
        raise self.error


def test_events_reach_all_sinks_in_order() -> None:
    first, second = Recorder(), Recorder()
    events = [run_started(), step_done(1), finished()]
    with Sinks([first, second]) as sinks:
        for event in events:
            sinks(event)
    assert first.events == second.events == events
    assert first.closed
    assert second.closed


def test_a_full_disk_warns_once_and_the_sink_keeps_getting_events() -> None:
    failing = Failing(OSError(errno.ENOSPC, "No space left on device", "events.jsonl"))
    before, after = Recorder(), Recorder()
    sinks = Sinks([before, failing, after])
    for step in (1, 2, 3):
        sinks(step_done(step))
    assert failing.calls == 3
    for recorder in (before, after):
        warnings = [event for event in recorder.events if isinstance(event, Warned)]
        assert [event.step for event in warnings] == [1]
        assert warnings[0].message.startswith("events.jsonl: No space left on device; training")
        assert sum(not isinstance(event, Warned) for event in recorder.events) == 3


def test_what_is_lost_at_closing_is_a_warning_for_the_sinks_still_open() -> None:
    last = Recorder()
    sinks = Sinks([Failing(OSError(errno.ENOSPC, "No space left on device", "a.csv")), last])
    sinks.close()
    assert last.events == [
        Warned(step=0, message="a.csv: No space left on device; its end is missing")
    ]
    assert last.closed


def test_two_failing_sinks_do_not_warn_each_other_for_ever() -> None:
    recorder = Recorder()
    sinks = Sinks([Failing(OSError(28, "full", "a")), Failing(OSError(28, "full", "b")), recorder])
    sinks(step_done(1))
    sinks(step_done(2))
    warnings = [event.message[0] for event in recorder.events if isinstance(event, Warned)]
    assert sorted(warnings) == ["a", "b"]


def test_a_bug_in_a_sink_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        Sinks([Failing(ZeroDivisionError())])(step_done(1))


@pytest.mark.parametrize("room", [0, 1, 100, 700])
def test_no_row_is_lost_torn_or_doubled_when_a_disk_is_full_for_a_while(
    tmp_path: Path, room: int
) -> None:
    recorder = Recorder()
    jsonl, table = tmp_path / "events.jsonl", tmp_path / "metrics.csv"
    sinks = Sinks([EventsJsonl(jsonl), MetricsCsv(table), recorder])
    sinks(step_done(1))
    with full_disk(table.stat().st_size + room):
        for step in range(2, 12):
            sinks(step_done(step, metrics={"accuracy": 0.5, "late": 1.0}))
    assert any(isinstance(event, Warned) for event in recorder.events)
    sinks(step_done(12))
    sinks.close()
    steps = [row["step"] for row in read_events(jsonl) if row["event"] == "StepDone"]
    assert steps == list(range(1, 13))
    lines = table.read_text(encoding="utf-8").splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step", *map(str, range(1, 13))]
    assert lines[0].endswith(",accuracy,late")


def test_a_deleted_file_is_noticed(tmp_path: Path) -> None:
    recorder = Recorder()
    sinks = Sinks([EventsJsonl(tmp_path / "events.jsonl"), recorder])
    (tmp_path / "events.jsonl").unlink()
    sinks(step_done(1))
    assert [type(event) for event in recorder.events] == [Warned, type(step_done(1))]
    assert "deleted" in recorder.events[0].message  # type: ignore[attr-defined]


def test_rows_that_never_found_room_are_reported_at_closing(tmp_path: Path) -> None:
    recorder = Recorder()
    sinks = Sinks([EventsJsonl(tmp_path / "events.jsonl"), recorder])
    with full_disk(10):
        sinks(step_done(1))
        sinks.close()
    messages = [event.message for event in recorder.events if isinstance(event, Warned)]
    assert len(messages) == 2
    assert messages[1].endswith("its end is missing")


def test_what_waits_for_room_is_bounded_and_what_is_left_out_is_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the log and the curves, whose file must also get a new column, four rows wait at most."""
    recorder, log = Recorder(), EventsJsonl(tmp_path / "events.jsonl")
    sinks = Sinks([log, MetricsCsv(tmp_path / "metrics.csv"), recorder])
    sinks(step_done(100))
    size = (tmp_path / "events.jsonl").stat().st_size
    monkeypatch.setattr("lockstep.observe.storing.files.MOST_WAITING", 4 * size + 100)
    monkeypatch.setattr("lockstep.observe.storing.metrics_csv._MOST_WAITING", 60)
    with full_disk(10):
        for step in range(101, 901):
            sinks(step_done(step, metrics={"new": 1.0}))
        assert not recorder.warned("lacks")
    for step in range(901, 904):
        sinks(step_done(step))
    sinks.close()
    rows = read_events(tmp_path / "events.jsonl")
    logged = [row["step"] for row in rows if row["event"] == "StepDone"]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        curve = [int(row["step"]) for row in csv.DictReader(file)]
    for name, steps in (("events.jsonl", logged), ("metrics.csv", curve)):
        missing = 804 - len(steps)
        assert missing > 700
        assert steps == [*range(100, 901 - missing), 901, 902, 903]
        told = [said for said in recorder.warned("lacks") if name in said]
        assert [f"lacks {missing} rows" in said for said in told] == [True]
        assert told[0] in [row.get("message") for row in rows]


def test_a_torn_last_line_is_cut_at_opening_and_all_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    whole = b"x" * 200_000 + b"\nwhole\n"
    path.write_bytes(whole + b"t" * 200_000)
    file = AppendFile(path)
    file.append(b"new\n")
    file.close()
    assert path.read_bytes() == whole + b"new\n"


def test_a_failed_replacement_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def replace_badly() -> None:
        with replacing(path) as file:
            file.write("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_badly()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_open_sinks_writes_a_whole_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "läufe" / "実験 1"
    with open_sinks(run_dir, tensorboard=False, console=True) as sinks:
        for event in (run_started(run_dir=str(run_dir)), step_done(1), evaluated(1), finished(1)):
            sinks(event)
    assert sorted(os.listdir(run_dir)) == ["events.jsonl", "metrics.csv", "result.json"]
    assert str(run_dir) in capsys.readouterr().out


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    def session(resumed_step: int, last_step: int) -> None:
        with open_sinks(tmp_path, tensorboard=False, console=False) as sinks:
            sinks(run_started(step=resumed_step))
            for step in range(resumed_step + 1, last_step + 1):
                sinks(step_done(step))

    session(0, 5)
    session(3, 6)
    history = read_events(tmp_path / "events.jsonl")
    steps = [row["step"] for row in history if row["event"] == "StepDone"]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]


@contextmanager
def without_rights(directory: Path) -> Iterator[None]:
    """A directory that is read-only, for root too."""
    directory.chmod(0o500)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        directory.chmod(0o700)


@pytest.mark.parametrize("name", ["taken", "taken/below", "read-only/new"])
def test_an_unusable_run_directory_is_one_clear_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "read-only").mkdir()
    run_dir = tmp_path / name
    with without_rights(tmp_path / "read-only"), pytest.raises(RunDirectoryError) as caught:
        open_sinks(run_dir, tensorboard=False, console=False)
    assert str(run_dir / "result.json") in str(caught.value)
    assert "choose another run directory" in str(caught.value)


def test_when_the_last_file_fails_those_opened_before_are_closed(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,age\nann,7\n")
    open_files = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RunDirectoryError, match=r"metrics.csv: line 1: has no column"):
        open_sinks(tmp_path, tensorboard=False, console=False)
    assert set(os.listdir("/proc/self/fd")) == open_files
