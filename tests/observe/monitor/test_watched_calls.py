"""The newest calls of ranks: read once by who looks, and never by who draws."""

import json
import threading

import pytest
from tests.observe.reading.test_diagnosis import STACK, waiting_in
from tests.observe.reading.test_histories import done
from watched_runs import START, ended, on_screen, running, shown, until

from lockstep.engine.call_history import FlightFolder
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.observe.monitor.watch import Watched


@pytest.fixture
def readers(monkeypatch):
    """The threads that have read calls."""
    found, present = [], FlightFolder.present

    def noted(folder):
        found.append(threading.current_thread())
        return present(folder)

    monkeypatch.setattr(FlightFolder, "present", noted)
    return found


def names(run):
    return [cause.name for cause in run.causes()]


def test_calls_are_read_at_a_look_and_only_if_they_are_others(tmp_path, readers):
    run = Watched(running(tmp_path / "run", *START, done(1, 3.0)))
    assert run.poll() is False
    assert readers == []
    assert "standstill" not in names(run)
    waiting_in(RunDirectory(run.path), 0, "barrier")
    num_before = len(readers)
    assert "standstill" not in names(run)
    assert run.poll() is True
    for _ in range(3):
        assert "standstill" in names(run)
        assert run.poll() is False
    assert len(readers) == num_before + 1
    RunDirectory(run.path).flight.waiting_file(0).unlink()
    assert run.poll() is True
    assert "standstill" not in names(run)


def test_what_ranks_write_after_a_run_has_failed_is_read_too(tmp_path, readers):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    ended(folder, status="failed")
    run = Watched(folder)
    assert "hang" not in names(run)
    directory = RunDirectory(folder)
    waiting_in(directory, 0, "barrier")
    assert run.poll() is True
    assert names(run)[0] == "standstill"
    directory.hang_report(0).write_text(json.dumps({"reason": STACK}))
    assert run.poll() is True
    assert "hang" in names(run)
    run.close()
    num_before = len(readers)
    waiting_in(directory, 1, "barrier")
    assert run.poll() is False
    assert len(readers) == num_before
    ended(folder)
    assert run.poll() is True
    assert not {"hang", "standstill"} & set(names(run))
    assert len(readers) == num_before


def test_the_thread_that_draws_reads_no_calls(tmp_path, readers):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    waiting_in(RunDirectory(folder), 0, "barrier")

    async def drive(app, pilot):
        await until(app, pilot, lambda: "waiting for the others" in shown(app))
        for _ in range(3):
            await pilot.press("l")

    on_screen([folder], drive)
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()
