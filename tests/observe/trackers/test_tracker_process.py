"""What a tracker is fed with, and what becomes of its errors: with trackers made for the test."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.observe.sample_events import (
    Recorder,
    checkpointed,
    evaluated,
    finished,
    run_started,
    step_done,
)

from lockstep.engine.events import Event, Failed, Warned
from lockstep.engine.log import Logbook, log
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.observe import Sinks, open_sinks
from lockstep.observe.trackers.process import Opening, Tracker, Work, serve
from lockstep.observe.trackers.tracker_sink import TrackerSink

COPIES = "import sys; f = open(sys.argv[2] + '/got', 'ab', 0); list(map(f.write, sys.stdin.buffer))"
REPORTS = 'import sys; print(\'{"problem": "no room"}\', flush=True); list(sys.stdin)'
DIES = "import sys; sys.stdin.readline(); sys.exit(3)"
SLEEPS = "import time; time.sleep(60)"


def sink(folder: Path, script: str = COPIES, **keys: Any) -> TrackerSink:
    command = [sys.executable, "-I", "-S", "-c", script]
    return TrackerSink("mlflow", folder, {"lr": 0.1}, command=command, **keys)


def got(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "trackers" / "mlflow" / "got").read_text().splitlines()
    return [json.loads(line) for line in lines]


def logged(step: int, **values: Any) -> list[Event]:
    found: list[Event] = []
    with Logbook(found.append).opened(step):
        for name, value in values.items():
            log(name, value)
    return found


def test_a_tracker_gets_what_is_logged_with_the_values_of_the_next_event(tmp_path: Path) -> None:
    tracker = sink(tmp_path)
    image = np.zeros((2, 2, 3), np.uint8)
    events = [
        run_started(), *logged(1, a=0.5), step_done(1, loss=2.0), evaluated(1, "val", loss=3.0),
        *logged(2, a=0.25, b="text", c=image), finished(2),
    ]  # fmt: skip
    for event in events:
        tracker(event)
    tracker.close()
    tracker.close()
    opened, first, scores, picture, second, end = got(tmp_path)
    assert opened == {
        "do": "open", "task": "digits", "run_dir": str(tmp_path), "params": {"lr": 0.1},
    }  # fmt: skip
    assert (first["do"], first["step"]) == ("metrics", 1)
    assert first["values"].items() >= {"log/a": 0.5, "train/loss": 2.0}.items()
    assert scores == {"do": "metrics", "step": 1, "values": {"val/loss": 3.0}}
    path = str(tmp_path / "logged" / "c" / "00000002.png")
    assert picture == {"do": "picture", "step": 2, "name": "c", "path": path}
    assert second == {"do": "metrics", "step": 2, "values": {"log/a": 0.25}}
    assert end == {"do": "end", "status": "completed"}


def test_all_of_a_step_has_been_handed_over_before_the_next_one_begins(tmp_path: Path) -> None:
    tracker = sink(tmp_path)
    late = logged(2, late=1.0)
    for event in (*logged(2, a=0.5), step_done(2), evaluated(2, loss=3.0), *late, checkpointed(2)):
        tracker(event)
    end = time.monotonic() + 20
    names: set[str] = set()
    while not names >= {"log/a", "train/loss", "val/loss", "log/late"}:
        assert time.monotonic() < end, names
        if (tmp_path / "trackers" / "mlflow" / "got").exists():
            names = {name for row in got(tmp_path) for name in row["values"]}
    tracker.close()


def test_a_run_that_fails_is_said_to_have_failed(tmp_path: Path) -> None:
    tracker = sink(tmp_path)
    for event in (run_started(), Failed(step=0, error="E", message="m")):
        tracker(event)
    tracker.close()
    assert got(tmp_path)[-1] == {"do": "end", "status": "failed"}


def warnings(recorder: Recorder) -> list[str]:
    return [event.message for event in recorder.events if isinstance(event, Warned)]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (REPORTS, "tracker mlflow: no room (see"),
        (DIES, "tracker mlflow: its process"),
        ("print('garbage', flush=True)", "tracker mlflow: "),
    ],
)
def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, script: str, message: str) -> None:
    recorder = Recorder()
    sinks = Sinks([sink(tmp_path, script), recorder])
    for step in range(20):
        sinks(step_done(step))
        time.sleep(0.01)
    sinks(finished(20))
    sinks.close()
    assert len(warnings(recorder)) == 1
    assert message in warnings(recorder)[0]
    assert len(recorder.events) == 22


def test_a_tracker_that_hangs_delays_the_end_by_its_bound_only(tmp_path: Path) -> None:
    recorder = Recorder()
    sinks = Sinks([sink(tmp_path, SLEEPS, end_s=0.5), recorder])
    began = time.monotonic()
    for step in range(11_000):  # more than may wait, and than a pipe holds
        sinks(step_done(step, metrics={"x" * 500: 1.0}))
    fed = time.monotonic()
    sinks.close()
    assert time.monotonic() - fed < 10
    assert fed - began < 30
    assert len(warnings(recorder)) == 1
    assert "is slower than training" in warnings(recorder)[0]


def test_one_that_is_not_installed_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("mlflow", "wandb", "trackio"):
        with pytest.raises(ConfigError, match=rf'pip install "lockstep-train\[{name}\]"'):
            open_sinks(tmp_path, tensorboard=False, console=False, trackers=[name])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("")
    with pytest.raises(RunDirectoryError, match="mlflow: cannot be opened"):
        sink(tmp_path)


class Kept(Tracker):
    """Keeps what it gets; fails where it is told to."""

    def __init__(self, opening: Opening, calls: list[Any], evil: str) -> None:
        self.calls, self.evil = calls, evil
        if evil == "open":
            raise RuntimeError("no network")
        self.run_id = opening.run_id or "made"
        calls.append(("open", opening.run_id))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.evil == "metrics":
            raise KeyError("x")
        self.calls.append((step, dict(values)))

    def picture(self, step: int, name: str, path: Path) -> None:
        if self.evil == "picture":
            sys.exit(2)
        self.calls.append((step, name, path.name))

    def end(self, status: str) -> None:
        if self.evil == "end":
            raise OSError("full")
        self.calls.append(status)


def served(
    folder: Path, steps: range, evil: str = "", torn: bytes | None = None
) -> tuple[list[Any], list[str]]:
    """What a tracker got, and what was reported; `torn` comes in the place of the end's message."""
    calls: list[Any] = []
    problems: list[str] = []
    messages: list[dict[str, Any]] = [
        {"do": "open", "task": "t", "run_dir": str(folder), "params": {}},
        *({"do": "metrics", "step": step, "values": {"a": step}} for step in steps),
        *({"do": "picture", "step": s, "name": "p", "path": f"{s}.png"} for s in steps),
        {"do": "end", "status": "completed"},
    ]
    lines = [json.dumps(message).encode() + b"\n" for message in messages]
    if torn is not None:
        lines[-1:] = [torn]
    serve(lines, Work(lambda o: Kept(o, calls, evil), folder), problems.append)
    return calls, problems


def test_a_resumed_run_is_the_same_run_and_gets_what_is_new(tmp_path: Path) -> None:
    first, problems = served(tmp_path, range(1, 4))
    assert first == [
        ("open", ""), *((s, {"a": s}) for s in (1, 2, 3)),
        *((s, "p", f"{s}.png") for s in (1, 2, 3)), "completed",
    ]  # fmt: skip
    second, more = served(tmp_path, range(2, 6))
    assert second == [
        ("open", "made"), *((s, {"a": s}) for s in (4, 5)),
        *((s, "p", f"{s}.png") for s in (4, 5)), "completed",
    ]  # fmt: skip
    assert problems == more == []


def test_a_resumed_run_gets_what_of_the_newest_step_is_missing_and_nothing_twice(
    tmp_path: Path,
) -> None:
    """Killed in the middle of step 2, which the resumed run does again, then goes on with 3."""
    metrics = [("train/loss", 1.0), ("val/loss", 2.0), ("log/p", 3.0)]
    messages: list[dict[str, Any]] = [
        {"do": "open", "task": "t", "run_dir": str(tmp_path), "params": {}},
        {"do": "picture", "step": 2, "name": "p", "path": "2.png"},
        *({"do": "metrics", "step": 2, "values": {name: value}} for name, value in metrics),
        {"do": "metrics", "step": 3, "values": {"train/loss": 4.0}},
    ]
    wanted = [(2, "p", "2.png"), *((2, dict([pair])) for pair in metrics), (3, {"train/loss": 4.0})]
    for num_before in range(1, len(messages) + 1):
        folder = tmp_path / str(num_before)
        folder.mkdir()
        calls: list[Any] = []
        make = partial(Kept, calls=calls, evil="")
        for part in (messages[:num_before], messages):
            lines = [json.dumps(message).encode() + b"\n" for message in part]
            serve(lines, Work(make, folder), calls.append)
        assert [call for call in calls if call != "" and call[0] != "open"] == wanted


@pytest.mark.parametrize("torn", [b'{"do": "metr', b'{"do": "metrics", "step": 9, "values": {}}'])
def test_a_message_that_a_killed_rank_has_not_finished_is_dropped_and_the_run_is_completed(
    tmp_path: Path, torn: bytes
) -> None:
    calls, problems = served(tmp_path, range(1, 4), torn=torn)
    assert calls[-2:] == [(3, "p", "3.png"), ""]
    assert problems == []
    assert json.loads((tmp_path / "state.json").read_text())["newest"] == 3


@pytest.mark.parametrize(
    ("evil", "problem"),
    [
        ("open", "RuntimeError: no network"), ("metrics", "KeyError: 'x'"),
        ("picture", "SystemExit: 2"), ("end", "OSError: full"),
    ],
)  # fmt: skip
def test_errors_of_a_library_are_reported_once_and_the_rest_goes_on(
    tmp_path: Path, evil: str, problem: str
) -> None:
    calls, problems = served(tmp_path, range(1, 5), evil)
    assert problems == [problem]
    if evil != "open":
        assert len(calls) == {"metrics": 6, "picture": 6, "end": 9}[evil]


def test_a_damaged_state_is_a_problem_and_no_second_run(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    calls, problems = served(tmp_path, range(1, 3))
    assert calls == []
    assert len(problems) == 1
