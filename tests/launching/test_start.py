"""What the launcher makes of ranks that leave no last event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.launching.api import Session
from lockstep.launching.job.commands import python_command
from lockstep.launching.job.ending import Ended, how_ended
from lockstep.launching.job.run import Outcome
from lockstep.launching.start import start

JOINED = """
import json, os, shutil, signal, sys
run_dir = json.loads(os.environ["LOCKSTEP_SESSION"])["run_dir"]
events = open(run_dir + "/events.jsonl", "a")

def emit(**row):
    print(json.dumps(row), file=events, flush=True)

emit(event="Joined", host="", pid=0, step=0)
with open(run_dir + "/starts", "a") as file:
    file.write("x")
"""
COMPLETED = 'emit(event="Finished", step=3, exit_code=0, reason="all steps done")\n'
RESULT = """
import time
time.sleep(0.05)
with open(run_dir + "/result.json", "w") as file:
    result = {"status": "completed", "reason": "all steps done", "exit_code": 0, "step": 3}
    result |= {"params_sha256": "0" * 64, "metrics": {}, "world_size": 1, "wall_s": 1.0}
    result |= {"error": None, "checkpoint": ""}
    json.dump(result, file)
"""


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launching.start._MOST_DELAY_S", 0.0)


def started(folder: Path, code: str, **options: Any) -> Ended:
    run_dir = folder / "run"
    run_dir.mkdir()
    command = python_command([sys.executable, "-c", JOINED + code])
    return start(command, Session(str(run_dir)), 1, on_row=lambda row: None, **options)


def num_starts(folder: Path) -> int:
    return len((folder / "run" / "starts").read_text())


def test_ranks_that_say_why_they_end_are_not_started_again(tmp_path: Path) -> None:
    """The disk that is full may hold the events."""
    ended = started(tmp_path, "sys.stderr.write('error: r: the disk is full\\n'); sys.exit(2)")
    assert ended == Ended(2, "r: the disk is full")
    assert num_starts(tmp_path) == 1


def test_their_exit_code_is_enough(tmp_path: Path) -> None:
    ended = started(tmp_path, "sys.exit(2)")
    assert (ended.exit_code, ended.again) == (2, "")
    assert "ended with code 2" in ended.message
    assert num_starts(tmp_path) == 1


def test_survivors_that_are_too_few_to_start_are_started_again(tmp_path: Path) -> None:
    code = "sys.stderr.write('error: a rank was lost while ranks started\\n'); sys.exit(75)"
    ended = started(tmp_path, code, restarts=1)
    assert (ended.exit_code, bool(ended.again)) == (75, True)
    assert num_starts(tmp_path) == 2


def test_killed_ranks_are_started_again_whatever_they_have_said(tmp_path: Path) -> None:
    kill = "sys.stderr.write('error: no\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    ended = started(tmp_path, kill, restarts=1)
    assert ended.again == "all ranks have died"
    assert num_starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("end", "code", "starts"),
    [
        ("sys.exit(14)", 2, 2),  # of `MPI_Init`, where no other process can be reached
        ("sys.stderr.write('[x:1] *** Process received signal ***\\n')", 1, 2),
        ("sys.stderr.write('[x:1] *** An error occurred in MPI_Init_thread\\n')", 1, 2),
        ("sys.stderr.write('error: a rank has died before all had met\\n'); sys.exit(75)", 75, 2),
        ("sys.stderr.write('error: no\\n'); sys.exit(14)", 14, 1),
        ("sys.exit(1)", 1, 1),
        ("sys.exit(2)", 2, 1),
    ],
)
def test_ranks_over_mpi_of_which_one_was_killed_before_all_had_met(
    tmp_path: Path, end: str, code: int, starts: int
) -> None:
    (tmp_path / "run").mkdir()
    count = f"import sys; open({str(tmp_path / 'starts')!r}, 'a').write('x'); "
    command = replace(python_command([sys.executable, "-c", count + end]), launcher="mpi")
    ended = start(command, Session(str(tmp_path / "run")), 1, on_row=lambda row: None, restarts=1)
    assert ended.exit_code == code
    assert bool(ended.again) == (starts == 2)
    assert len((tmp_path / "starts").read_text()) == starts


@pytest.mark.parametrize("events", [COMPLETED, RESULT, RESULT + COMPLETED])
def test_a_deleted_log_harms_nobody(tmp_path: Path, events: str) -> None:
    assert started(tmp_path, "os.unlink(run_dir + '/ranks.log')\n" + events) == Ended(0)


def test_deleted_events_harm_nobody(tmp_path: Path) -> None:
    assert started(tmp_path, "os.unlink(run_dir + '/events.jsonl')\n" + RESULT) == Ended(0)


def test_a_run_directory_may_be_moved(tmp_path: Path) -> None:
    move = "import time; time.sleep(0.5); shutil.move(run_dir, run_dir + '2')\n"
    assert started(tmp_path, move + COMPLETED) == Ended(0)


def test_a_result_of_an_earlier_session_is_none(tmp_path: Path) -> None:
    old = RESULT + "os.utime(run_dir + '/result.json', (1, 1)); sys.exit(9)\n"
    assert started(tmp_path, old, restarts=0).exit_code == 9


def test_a_script_that_never_trains(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("class Task: pass\nclass Mine(Task): pass\n")
    session = Session(str(tmp_path / "run"), target=str(script))
    command = python_command([sys.executable, str(script)])
    ended = start(command, session, 1, on_row=lambda row: None)
    assert ended.exit_code == 2
    assert f"{script}: ended without calling lockstep.main" in ended.message
    assert f"{script}:Mine" in ended.message


def test_ranks_that_were_ended_at_once_can_be_resumed_as_it_says(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    body = JOINED + "os.kill(os.getppid(), signal.SIGINT)\nos.kill(os.getppid(), signal.SIGINT)\n"
    body += "import time\ntime.sleep(60)\n"
    ended = start(
        python_command([sys.executable, "-c", body]),
        Session(str(run_dir), target="digits"),
        1,
        on_row=lambda row: None,
    )
    assert ended.exit_code == 130
    assert ended.message.splitlines() == [
        "ended before a checkpoint was written; steps since the newest one are lost",
        f"go on with lockstep resume '{run_dir}'",
    ]


def test_another_jobs_result_is_not_that_of_ranks_that_are_refused(tmp_path: Path) -> None:
    refused = "sys.stderr.write('error: r: another job is training in it\\n'); sys.exit(2)"
    ended = started(tmp_path, RESULT + refused)
    assert ended == Ended(2, "r: another job is training in it")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root's rights")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_too_full_for_what_ranks_say(small_disk: Path) -> None:
    code = """
with open(run_dir + "/filler", "wb", buffering=0) as file:
    while file.write(bytes(4096)) == 4096:
        pass
"""
    full = f"try:{code.replace(chr(10), chr(10) + '    ')}\nexcept OSError:\n    sys.exit(2)"
    ended = started(small_disk, full)
    assert ended.exit_code == 2
    assert ended.message == (
        "the ranks ended with code 2 before they had a result; no space is left for "
        f"{small_disk}/run/ranks.log, where they would have said why; free some"
    )


def test_ranks_over_mpi_that_were_all_killed_while_they_started_are_started_again(
    tmp_path: Path,
) -> None:
    """mpirun leaves with code 0 then, and says nothing."""
    silent = Outcome(0, "", None, tmp_path / "ranks.log", None, met=False)
    ended = how_ended(silent, Session(str(tmp_path), target="digits"), time.time(), "mpi")
    assert ended.again == "a rank ended before all had started"
    script = Session(str(tmp_path), target=__file__)
    assert not how_ended(silent, script, time.time(), "mpi").again
    codes = {213: 2, 14: 2, 137: 137, 75: 75}  # the first two are MPI's own
    for code, shown in codes.items():
        outcome = Outcome(code, "", None, tmp_path / "ranks.log", None, met=False)
        ended = how_ended(outcome, Session(str(tmp_path)), time.time(), "mpi")
        assert (ended.exit_code, ended.again) == (shown, "a rank ended before all had started")


def test_a_scripts_own_exit_code_counts_where_it_is_no_lost_ranks(tmp_path: Path) -> None:
    row = {"event": "Finished", "exit_code": 0, "reason": "all steps done"}
    outcome = Outcome(3, "not good enough", row, tmp_path / "ranks.log", None, met=True)
    ends = {}
    for launcher in ("python", "local", "mpi"):
        for target in (__file__, "digits"):
            session = Session(str(tmp_path), target=target)
            ends[launcher, target] = how_ended(outcome, session, time.time(), launcher).exit_code
    assert {key for key, code in ends.items() if code} == {
        ("python", __file__),
        ("local", __file__),
    }
    assert {*ends.values()} == {0, 3}


def test_a_message_of_a_rank_ends_where_others_or_torchrun_write(tmp_path: Path) -> None:
    for other in ("error: b.txt: is missing", "E0131 12:00:00.000000 33 api.py:1] failed"):
        said = f"error: a.txt: is missing\nand more\n{other}\n"
        outcome = Outcome(1, said, None, tmp_path / "ranks.log", None, met=False)
        ended = how_ended(outcome, Session(str(tmp_path)), time.time(), "torchrun")
        assert ended == Ended(2, "a.txt: is missing\nand more")


@pytest.mark.parametrize("name", ["run-rescued", "run-rescued-2"])
def test_the_directory_that_a_run_was_rescued_in_also_shows_why_it_has_ended(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "run-rescued").mkdir()  # that of an earlier loss, or its own
    rescued = tmp_path / name
    rescued.mkdir(exist_ok=True)
    result = {"status": "failed", "reason": "run: was moved", "exit_code": 2, "step": 3}
    result |= {"params_sha256": None, "metrics": {}, "world_size": 2, "wall_s": 1.0}
    result |= {"error": "RunDirectoryError", "checkpoint": ""}
    (rescued / "result.json").write_text(json.dumps(result))
    killed = Outcome(2, "[vm] PRTE ERROR", None, tmp_path / "ranks.log", None, met=True)
    since = time.time()
    ended = how_ended(killed, Session(str(tmp_path / "run")), since - 60, "mpi")
    assert ended == Ended(2, "run: was moved")
    old = how_ended(killed, Session(str(tmp_path / "run")), since + 60, "mpi")
    assert "was moved" not in old.message
