from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import environment, slow

from lockstep.errors import LaunchError, LockstepError, RunDirectoryError
from lockstep.launching.api import Session
from lockstep.launching.host.processes import is_alive
from lockstep.launching.job import job
from lockstep.launching.job import run as supervise
from lockstep.launching.job.commands import (
    RankCommand,
    local_command,
    mpirun_command,
    python_command,
    rank_environment,
    torchrun_command,
)
from lockstep.launching.job.ending import how_ended
from lockstep.launching.job.run import LOG_NAME, Outcome, run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(__file__).parents[3] / "src"
DEADLINE_S = 60.0

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _ranks_find_the_package(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = request.node.get_closest_marker("cold") is not None
    for name, value in environment(cold, PYTHONPATH=str(SOURCE)).items():
        monkeypatch.setenv(name, value)


def code(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def ranks_of(kind: str, argv: list[str], ranks: int = 2, replacements: int = 0) -> RankCommand:
    if kind == "mpi":
        return mpirun_command(ranks, argv, cores=1, replacements=replacements)
    if kind == "local":
        return local_command(ranks, argv, replacements)
    return torchrun_command(ranks, argv) if kind == "torchrun" else python_command(argv)


def brief(command: RankCommand) -> RankCommand:
    """A command whose ranks have little time to meet."""
    return replace(command, start_timeout_s=3.0)


def run(
    command: RankCommand, run_dir: Path, threads: int = 1, **options: Any
) -> tuple[Outcome, list[str], list[Row]]:
    lines: list[str] = []
    rows: list[Row] = []
    outcome = run_ranks(
        command,
        rank_environment(threads),
        run_dir=run_dir,
        **{"on_row": rows.append, "on_line": lines.append, "on_notice": lines.append} | options,
    )
    return outcome, lines, rows


def gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"some of {pids} are still there"
        time.sleep(0.02)


def this_process_gets(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


class Stopper:
    """Signals this process, which is the launcher, as soon as all ranks have joined."""

    def __init__(self, ranks: int, signum: signal.Signals) -> None:
        self.joined: list[Row] = []
        self._ranks = ranks
        self._signum = signum

    def __call__(self, row: Row) -> None:
        if row["event"] == "Joined":
            self.joined.append(row)
            if len(self.joined) == self._ranks:
                this_process_gets(self._signum)

    @property
    def pids(self) -> list[int]:
        return [row["pid"] for row in self.joined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "signum"),
    [
        slow("python", 1, signal.SIGTERM),
        pytest.param("local", 2, signal.SIGINT, marks=pytest.mark.slow),
        ("mpi", 2, signal.SIGINT),
        pytest.param("torchrun", 2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.cold
def test_a_signal_stops_all_ranks_cleanly(
    tmp_path: Path, kind: str, ranks: int, signum: signal.Signals
) -> None:
    stopper = Stopper(ranks, signum)
    steps = [sys.executable, str(SCRIPTS / "steps.py"), str(tmp_path)]
    outcome, lines, _ = run(ranks_of(kind, steps, ranks), tmp_path, threads=3, on_row=stopper)
    assert (outcome.exit_code, outcome.stopped_by) == (0, signum), outcome.stderr_tail
    assert outcome.last is not None
    reason = "terminated" if signum == signal.SIGTERM else "interrupted"
    assert outcome.last["reasons"] == [reason] * ranks
    spoken = [line for line in lines if line.startswith("rank")]
    assert sorted(spoken) == sorted(
        f"rank {rank} says {n}" for n in range(3000) for rank in range(ranks)
    )
    places = [row["place"] for row in stopper.joined]
    assert [place["rank"] for place in places] == list(range(ranks))
    assert {(place["launcher"], place["world_size"]) for place in places} == {(kind, ranks)}
    assert {row["omp"] for row in stopper.joined} == {"3"}
    assert not any(map(is_alive, stopper.pids))


# Ranks that need no torch to start; they say to have joined without meeting anybody.
JOIN = """
import json, os, signal, socket, sys, time
row = {"event": "Joined", "step": 0, "rank": 0, "host": socket.gethostname(), "pid": os.getpid()}
os.write(os.open(sys.argv[1] + "/events.jsonl", os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644),
         json.dumps(row).encode() + b"\\n")
time.sleep(600)
"""
STUBBORN = (
    """
import signal
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, signal.SIG_IGN)
"""
    + JOIN
)
TELLING = (
    """
import os, signal
def tell(signum, frame):
    os.write(1, b"got %s\\n" % signal.Signals(signum).name.encode())
    os._exit(0)
for signum in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, tell)
"""
    + JOIN
)


@pytest.mark.cold
@pytest.mark.parametrize(
    "kind", ["python", "local", "mpi", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_a_preemption_notice_is_passed_on(tmp_path: Path, kind: str) -> None:
    ranks = 1 if kind == "python" else 2
    stopper = Stopper(ranks, signal.SIGUSR1)
    command = ranks_of(kind, [*code(TELLING), str(tmp_path)], ranks)
    outcome, lines, _ = run(command, tmp_path, on_row=stopper)
    assert [line for line in lines if line.startswith("got")] == ["got SIGUSR1"] * ranks
    assert "SIGUSR1: stopping at the next step boundary" in lines
    assert outcome.exit_code == 0


@pytest.mark.parametrize("kind", ["python", "local", "mpi", slow("torchrun")])
def test_a_second_ctrl_c_ends_stubborn_ranks(tmp_path: Path, kind: str) -> None:
    stopper = Stopper(1, signal.SIGINT)
    alive: list[bool] = []

    def again(notice: str) -> None:
        if "again to end the ranks at once" in notice:
            alive.append(is_alive(stopper.pids[0]))
            this_process_gets(signal.SIGINT)

    stubborn = [*code(STUBBORN), str(tmp_path)]
    command = ranks_of(kind, stubborn, ranks=1)
    outcome, _, _ = run(command, tmp_path, on_row=stopper, on_notice=again)
    assert alive == [True]
    assert outcome.exit_code != 0
    assert not is_alive(stopper.pids[0])


def test_ctrl_c_before_the_ranks_have_met_ends_them(tmp_path: Path) -> None:
    sleep = code("import time; print('up', flush=True); time.sleep(600)")
    outcome, _, _ = run(
        ranks_of("mpi", sleep, ranks=1),
        tmp_path,
        on_line=lambda line: this_process_gets(signal.SIGINT),
    )
    assert outcome.stopped_by == signal.SIGINT
    # mpirun may leave with 0 where all ranks were ended, so its own code does not count.
    session = Session(run_dir=str(tmp_path / "run"))
    assert how_ended(outcome, session, time.time(), "mpi").exit_code == 130


MET_BUT_UNREAD = """
import json, os, signal, socket, sys, time

def tell(signum, frame):
    os.write(1, b"asked to stop\\n")
    os._exit(0)

signal.signal(signal.SIGUSR2, tell)
row = {"event": "Joined", "step": 0, "rank": 0, "host": socket.gethostname(), "pid": os.getpid()}
path = sys.argv[1] + "/events.jsonl"
if {met}:
    os.write(os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644),
             json.dumps(row).encode() + b"\\n")
os.write(1, b"up\\n")
time.sleep(600)
"""


@pytest.mark.cold
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "kind", ["python", "mpi", pytest.param("torchrun", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("met", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_that_have_just_met_are_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, met: bool
) -> None:
    """Ranks may have met, and done a step, before the launcher has read that they have."""
    follow = supervise.follow_events
    monkeypatch.setattr(
        supervise, "follow_events", lambda *a, **k: follow(*a, **{"poll_s": 1.5} | k)
    )
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line == "up":
            this_process_gets(signal.SIGINT)

    rank = [*code(MET_BUT_UNREAD.replace("{met}", str(met))), str(tmp_path)]
    outcome, _, _ = run(ranks_of(kind, rank, ranks=1), tmp_path, on_line=on_line)
    assert outcome.stopped_by == signal.SIGINT
    assert ("asked to stop" in lines) == met


def test_signals_are_as_before_afterwards(tmp_path: Path) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(signum) for signum in signals]
    run(python_command(code("")), tmp_path)
    assert [signal.getsignal(signum) for signum in signals] == before


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[[str, int, list[str]], subprocess.Popen[str]]]:
    """Starts `scripts/launcher.py`, which prints every row it sees."""
    with contextlib.ExitStack() as stack:

        def start(kind: str, ranks: int, argv: list[str]) -> subprocess.Popen[str]:
            script = [sys.executable, str(SCRIPTS / "launcher.py"), kind, str(ranks)]
            process = subprocess.Popen(
                [*script, str(tmp_path), *argv],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def pids_of(launcher: subprocess.Popen[str], ranks: int) -> list[int]:
    pids: list[int] = []
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("{"):
            pids.append(json.loads(line)["pid"])
        if len(pids) == ranks:
            return pids
    pytest.fail(f"only {len(pids)} ranks joined")


@pytest.mark.parametrize("kind", ["local", "mpi", "torchrun"])
def test_no_rank_outlives_a_killed_launcher(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path, kind: str
) -> None:
    process = launcher(kind, 2, [*code(STUBBORN), str(tmp_path)])
    pids = pids_of(process, 2)
    process.kill()
    gone(pids)


def test_the_terminals_ctrl_c_reaches_the_launcher_only(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    # These ranks die of SIGINT, and not of what the launcher sends instead.
    deaf = "import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n" + JOIN
    process = launcher("python", 1, [*code(deaf), str(tmp_path)])
    pids = pids_of(process, 1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    assert "notice: SIGINT: stopping at the next step boundary" in process.stdout.readline()
    assert is_alive(pids[0])
    process.kill()
    gone(pids)


@pytest.mark.parametrize("kind", ["python", "local", "mpi", slow("torchrun")])
def test_a_crash(tmp_path: Path, kind: str) -> None:
    crash = "import sys; print('hello'); raise SystemExit('boom ' * 3)"
    outcome, lines, rows = run(ranks_of(kind, code(crash), ranks=1), tmp_path)
    assert (outcome.exit_code, outcome.last, rows) == (1, None, [])
    assert lines == ["hello"]
    assert "boom boom boom" in outcome.stderr_tail
    assert outcome.log == tmp_path / LOG_NAME
    assert "boom boom boom" in outcome.log.read_text()


def test_exit_codes_and_signals(tmp_path: Path) -> None:
    assert run(python_command(code("exit(7)")), tmp_path)[0].exit_code == 7
    kill = code("import os; os.kill(os.getpid(), 9)")
    assert run(python_command(kill), tmp_path)[0].exit_code == 128 + 9
    missing, _, _ = run(python_command(["/no/such/program"]), tmp_path)
    assert missing.exit_code == 1
    assert "/no/such/program: No such file" in missing.stderr_tail


def test_only_new_rows_and_new_errors_are_seen(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "Finished", "step": 0, "status": "stopped"}\n')
    (tmp_path / LOG_NAME).write_text("old trouble\n")
    write = (
        "import sys; sys.stderr.write('new trouble');"
        f'row = \'{{"event": "Failed", "step": 0, "error": "x"}}\';'
        f"print(row, file=open({str(events)!r}, 'a'))"
    )
    outcome, _, rows = run(python_command(code(write)), tmp_path)
    assert rows == [{"event": "Failed", "step": 0, "error": "x"}]
    assert outcome.last == rows[0]
    assert outcome.stderr_tail == "new trouble"
    assert (tmp_path / LOG_NAME).read_text() == "old trouble\nnew trouble"


@pytest.mark.cold
def test_events_of_another_launch_are_not_taken_for_its_own(tmp_path: Path) -> None:
    others = JOIN.replace("time.sleep(600)", "print('written', flush=True); time.sleep(600)")
    waits = (
        "import os, subprocess, sys, time\n"
        f"argv = [sys.executable, '-c', {others!r}, {str(tmp_path)!r}]\n"
        "env = os.environ | {'LOCKSTEP_LAUNCH': 'another'}\n"
        "other = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)\n"
        "other.stdout.readline()\n"
        "time.sleep(1.0)\n"
        "other.kill()\n"
        "sys.exit(2)"
    )
    outcome, lines, rows = run(python_command(code(waits)), tmp_path)
    assert (outcome.exit_code, outcome.met, outcome.last, rows) == (2, False, None, [])
    assert lines == ["another job is training in this run directory: waiting for its end"]


def test_long_errors_are_cut(tmp_path: Path) -> None:
    noise = "import sys; [print('line', i, file=sys.stderr) for i in range(100_000)]"
    outcome, _, _ = run(python_command(code(noise)), tmp_path)
    assert outcome.stderr_tail.endswith("line 99999")
    assert len(outcome.stderr_tail) < 10_000


def test_all_output_arrives_in_order(tmp_path: Path) -> None:
    outcome, lines, _ = run(
        python_command(code("for i in range(5000): print(i)\nprint('end', end='')")), tmp_path
    )
    assert outcome.exit_code == 0
    assert lines == [*map(str, range(5000)), "end"]


def test_output_without_an_end_of_line_comes_in_pieces(tmp_path: Path) -> None:
    size = 3_000_000
    outcome, lines, _ = run(python_command(code(f"print('ä' * {size})\nprint('end')")), tmp_path)
    assert outcome.exit_code == 0
    assert max(map(len, lines)) <= 1 << 16
    assert "".join(lines) == "ä" * size + "end"


def test_ranks_that_print_faster_than_is_shown_have_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_MOST_WAITING", 3)
    printed = tmp_path / "printed"
    text = (
        "for i in range(100):\n    print('x' * 65000, flush=True)\n"
        f"    open({str(printed)!r}, 'a').write('x')"
    )
    seen: list[int] = []

    def slowly(line: str) -> None:
        if not seen:
            time.sleep(1.0)
        seen.append(printed.stat().st_size if printed.exists() else 0)

    assert run(python_command(code(text)), tmp_path, on_line=slowly)[0].exit_code == 0
    assert len(seen) == 100
    assert seen[0] < 20


def test_callbacks_run_in_the_callers_thread(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []
    run(
        python_command(code("print(1)")),
        tmp_path,
        on_line=lambda line: threads.append(threading.current_thread()),
    )
    assert threads == [threading.current_thread()]


def test_works_outside_of_the_main_thread(tmp_path: Path) -> None:
    lines: list[str] = []
    thread = threading.Thread(
        target=lambda: lines.extend(run(python_command(code("print('in')")), tmp_path)[1])
    )
    thread.start()
    thread.join(DEADLINE_S)
    assert lines == ["in"]


def test_an_error_in_a_callback_ends_the_ranks(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail(line: str) -> None:
        pids.append(int(line))
        raise RuntimeError("no")

    sleep = code("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with pytest.raises(RuntimeError, match="no"):
        run(python_command(sleep), tmp_path, on_line=fail)
    assert not is_alive(pids[0])


def test_nothing_a_rank_started_is_left(tmp_path: Path) -> None:
    leave = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True); print(child.pid)"
    )
    outcome, lines, _ = run(python_command(code(leave)), tmp_path)
    assert outcome.exit_code == 0
    assert not is_alive(int(lines[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python", "mpi"])
def test_ranks_that_never_meet_are_ended(tmp_path: Path, kind: str) -> None:
    lines: list[str] = []
    sleep = code(
        "import os, sys, time; print(os.getpid(), flush=True);"
        "sys.stderr.write('stuck'); sys.stderr.flush(); time.sleep(600)"
    )
    with pytest.raises(LaunchError, match=r"did not all start within 3 s; see .*\nstuck"):
        run(brief(ranks_of(kind, sleep, ranks=1)), tmp_path, on_line=lines.append)
    assert not is_alive(int(lines[0]))


def test_a_rank_lost_before_all_have_met_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "GRACE_S", 1.0)
    lost = code(
        "import os, signal, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    time.sleep(0.5)  # long enough to be seen\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "from mpi4py import MPI"
    )
    with pytest.raises(LaunchError, match=r"rank 1 ended before all had started"):
        run(ranks_of("mpi", lost), tmp_path)


@pytest.mark.cold
def test_a_rank_stopped_before_all_have_met_is_named(tmp_path: Path) -> None:
    stuck = code(
        "import os, signal\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "from mpi4py import MPI"
    )
    with pytest.raises(LaunchError, match=r"within 3 s \(rank 1 stopped by a signal\)"):
        run(brief(ranks_of("mpi", stuck)), tmp_path)


LEAVES = """
import os, sys
import lockstep as ls
from lockstep.systems.digits.task import Digits

class Leaves(Digits):
    calls, scratch = 0, ("task.calls",)
    def loss(self, model, batch):
        self.calls += 1
        if self.calls > 20 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            os._exit(0)
        return super().loss(model, batch)

ls.main(Leaves(), Leaves.Config(log_every=1), run_dir=sys.argv[1])
"""


@pytest.mark.slow
def test_a_rank_that_leaves_while_others_wait_for_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    outcome, _, rows = run(ranks_of("mpi", [*code(LEAVES), str(run_dir)]), run_dir)
    assert outcome.exit_code == 0
    assert rows[-1]["event"] == "Finished"
    assert [r["slot"] for r in rows if r["event"] == "RankLost"] == [1]


STOPPED = """
import os, signal, sys
import lockstep as ls
from lockstep.systems.digits.task import Digits

ls.main(Digits(), Digits.Config(steps=3, hang_timeout_s=1), run_dir=sys.argv[1])
if os.environ["LOCKSTEP_LOCAL_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_that_is_stopped_after_its_session_keeps_nobody_waiting(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    outcome, _, rows = run(ranks_of("local", [*code(STOPPED), str(run_dir)], 2), run_dir)
    assert rows[-1]["event"] == "Finished"
    assert outcome.exit_code == 128 + signal.SIGKILL  # who knows what its script had yet to do
    assert "was stopped by a signal for 1 s" in outcome.stderr_tail


def test_an_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"ranks\.log: cannot be written.*--run-dir"):
        run(python_command(code("")), tmp_path / "file")


def test_a_program_that_the_system_does_not_start_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "bound_to_parent", lambda argv, _: [str(tmp_path)])
    with pytest.raises(LockstepError, match=r"could not be started: .*: Permission denied; make"):
        run(python_command(code("")), tmp_path)


MEETING = """
import os, signal, sys, torch
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
place = detect(os.environ)
if place.rank == 1:
    {end}
open_transport(place, torch.device("cpu"), 60.0)
"""


AGAIN = """
import os, torch
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
for number in range(3):
    transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)
    os.write(1, f"{sum(transport.gather_json(transport.rank + number))}\\n".encode())
    transport.agree()
    transport.close()
"""


@pytest.mark.parametrize("kind", ["local", "mpi", "torchrun"])
def test_ranks_meet_again_for_a_scripts_next_training(tmp_path: Path, kind: str) -> None:
    outcome, lines, _ = run(ranks_of(kind, code(AGAIN)), tmp_path)
    assert outcome.exit_code == 0, outcome.stderr_tail
    assert sorted(lines) == ["1", "1", "3", "3", "5", "5"]


LOSES = """
import os, signal, time
os.write(1, b"started\\n")
import torch
from lockstep.comm.transport import GroupBroken
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport

def opened():
    return open_transport(detect(os.environ), torch.device("cpu"), 60.0)

def lose_rank_1(transport):
    transport.barrier()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            transport.agree()
            time.sleep(0.01)
    except GroupBroken:
        transport.regroup(takes_in=True)
"""

HELD_BACK = (
    LOSES
    + """
transport = opened()
if not transport.is_joining:
    lose_rank_1(transport)
    while not transport.has_joiner:
        time.sleep(0.01)
    transport.regroup()
    os.write(1, f"held back: {transport.size}\\n".encode())
transport.regroup(takes_in=True)
os.write(1, f"taken in: {transport.size} {sum(transport.gather_json(1))}\\n".encode())
transport.agree()
transport.close()
"""
)


@pytest.mark.parametrize("kind", ["local", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_joiner_waits_until_all_are_ready_for_it(tmp_path: Path, kind: str) -> None:
    outcome, lines, _ = run(ranks_of(kind, code(HELD_BACK), replacements=1), tmp_path)
    # mpirun's own exit code does not count after a loss, and nobody here says how the run ended.
    assert kind == "mpi" or outcome.exit_code == 0, outcome.stderr_tail
    assert sorted(lines) == ["held back: 1", *["started"] * 3, *["taken in: 2 2"] * 2]


LATER = (
    LOSES
    + """
first = opened()
first.agree()
first.close()
second = opened()
lose_rank_1(second)
time.sleep(1.5)
os.write(1, f"{second.size} {second.has_joiner}\\n".encode())
second.close()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "mpi"])
def test_no_rank_is_replaced_in_a_scripts_later_trainings(tmp_path: Path, kind: str) -> None:
    outcome, lines, _ = run(ranks_of(kind, code(LATER), replacements=1), tmp_path)
    assert kind == "mpi" or outcome.exit_code == 0, outcome.stderr_tail
    assert lines == ["started", "started", "1 False"]


def test_a_rank_killed_before_all_have_met(tmp_path: Path) -> None:
    text = MEETING.format(end="os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(LaunchError, match=r"a rank ended before all had started(.|\n)*rank 1"):
        run(ranks_of("local", code(text)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("end", "expected"), [("sys.exit(2)", 2), ("sys.exit(0)", 1)])
def test_a_rank_that_ends_before_all_have_met(tmp_path: Path, end: str, expected: int) -> None:
    outcome, _, _ = run(ranks_of("local", code(MEETING.format(end=end))), tmp_path)
    assert (outcome.exit_code, outcome.met) == (expected, False)
    assert "rank 1 ended (exit code" in outcome.stderr_tail


def test_a_launcher_that_fails_by_itself_before_any_rank_is_started_again(tmp_path: Path) -> None:
    text = (
        "import pathlib, sys\n"
        f"flag = pathlib.Path({str(tmp_path / 'flag')!r})\n"
        "if not flag.exists():\n"
        "    flag.touch()\n"
        '    sys.exit("The PMIx server\'s listener thread failed to start. We cannot")\n'
        "print('started')\n"
    )
    outcome, lines, _ = run(ranks_of("python", code(text)), tmp_path)
    assert (outcome.exit_code, lines) == (0, ["started"])
