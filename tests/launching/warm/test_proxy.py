"""A process that is forked in the place of an interpreter is as that would be, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.launching.host.processes import MARK, kill_marked, marked, variable
from lockstep.launching.job.commands import rank_environment
from lockstep.launching.warm.proxy import PROXY, SERVER, through_proxy
from lockstep.launching.warm.starting import spawned

LOOK = """
import gc, json, os, random, resource, signal, sys, threading, torch
import lockstep, multiprocessing, numpy
main = sys.modules["__main__"]
ignored = [s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN]
environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_WARM_")}
streams = [sys.stdin, sys.stdout, sys.stderr]
open_files = []
for fd in range(64):
    try:
        open_files.append((fd, os.get_inheritable(fd)))
    except OSError:
        pass
json.dump({
    "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(),
    "file": main.__file__, "name": __name__, "main": main.__dict__ is globals(),
    "names": sorted(k for k in vars(main) if k.startswith("__")),
    "package": (__spec__, __package__, __cached__, type(__loader__).__name__),
    "flags": sys.flags, "environment": environment, "c": os.popen("env | grep SHOWN").read(),
    "ignored": sorted(ignored), "blocked": sorted(signal.pthread_sigmask(0, [])),
    "umask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cores": sorted(os.sched_getaffinity(0)), "fds": open_files,
    "threads": [torch.get_num_threads(), threading.active_count()],
    "gc": gc.get_threshold(),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode]
                for s in streams],
    "warm": "LOCKSTEP_WARM_SERVER" in os.environ, "stdin": sys.stdin.read(),
    "hook": sys.excepthook.__name__,
}, sys.stdout)
open("draws", "a").write(f"{random.random()} {numpy.random.rand()} {torch.rand(()).item()}\\n")
"""
PREPARED = 'umask 027; ulimit -Sn 300; trap "" HUP; exec "$@"'

ENVIRONMENT = rank_environment(1)
"""As it is before pytest names the test in it."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawned(ENVIRONMENT, ("torch",)) as name:
        yield name


@pytest.fixture
def start(server: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a script, in a forked process or, cold, in an interpreter."""
    begun: list[subprocess.Popen[str]] = []

    def call(
        code: str, *arguments: str, cold: bool = False, name: str = server, **env: str
    ) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(code)
        argv = through_proxy([sys.executable, str(script), *arguments], "" if cold else name)
        process = subprocess.Popen(
            ["sh", "-c", PREPARED, "sh", *argv], cwd=tmp_path, env=ENVIRONMENT | env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        begun.append(process)
        return process

    yield call
    for process in begun:
        process.kill()
        process.communicate()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"heard\\n"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_nothing_differs_from_a_start_of_its_own(start: Start, tmp_path: Path) -> None:
    seen = []
    for cold in (True, False, False):
        process = start(LOOK, "an", "argument ä", cold=cold, LOCKSTEP_SHOWN="1")
        out, err = process.communicate("typed\n")
        assert process.returncode == 0, err
        seen.append(json.loads(out))
        assert seen[-1].pop("warm") is not cold
    assert seen[1] == seen[0]
    assert seen[0]["umask"] == 0o027
    assert seen[0]["stdin"] == "typed\n"
    draws = (tmp_path / "draws").read_text().split()
    assert len(set(draws)) == 9  # of three generators, three times


def test_a_server_that_encodes_names_otherwise_forks_nothing(tmp_path: Path) -> None:
    """A proxy reads no variables of Python, and a path that it sends may be none there."""
    ascii_only = ENVIRONMENT | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = tmp_path / "ä"
    folder.mkdir()
    with spawned(ascii_only, ()) as name:
        argv = through_proxy([sys.executable, "-c", "print('ran')"], name)
        ended = subprocess.run(
            argv, cwd=folder, env=ascii_only, capture_output=True, text=True, timeout=60
        )
    assert (ended.stdout, ended.stderr) == ("ran\n", "")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('the end')",
        "def fail():\n    raise ValueError('wrong')\nfail()",
        "1 +",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import lockstep\nraise KeyboardInterrupt",
        "import signal, sys; sys.excepthook = sys.__excepthook__; raise KeyboardInterrupt",
        "left = open('left', 'w'); left.write('written')",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import atexit; atexit.register(print, 'bye')",
        "import ctypes; ctypes.CDLL(None).puts(b'from C')",
    ],
)
def test_both_end_alike(start: Start, tmp_path: Path, code: str) -> None:
    ends = []
    for cold in (True, False):
        process = start(code, cold=cold)
        ends.append((*process.communicate(), process.returncode))
        left = tmp_path / "left"
        assert not left.exists() or left.read_text() == "written"
        left.unlink(missing_ok=True)
    assert ends[1] == ends[0]


def test_signals_go_through(start: Start) -> None:
    process = start(WAIT)
    assert process.stdout
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "heard\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 5


def test_neither_outlives_the_other(start: Start) -> None:
    process = start(WAIT)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.kill()
    assert is_gone(pid)
    process = start(WAIT)
    assert process.stdout
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_a_launch_finds_and_ends_both(start: Start) -> None:
    mark = f"test-{os.getpid()}"
    process = start(WAIT, **{MARK: mark})
    assert process.stdout
    pid = int(process.stdout.readline())
    assert set(marked(mark)) == {process.pid, pid}
    assert variable(pid, PROXY) == str(process.pid)
    shown = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert shown[1].endswith(b"script.py")
    kill_marked(mark)
    assert is_gone(pid)


def test_where_no_server_is_or_fits_the_program_starts_by_itself(start: Start) -> None:
    code = f"import os; print(os.environ.get({SERVER!r}, 'alone'))"
    assert start(code, name="lockstep-of-nobody").communicate()[0] == "alone\n"
    assert start(code, OMP_NUM_THREADS="2").communicate()[0] == "alone\n"
    assert start(code, PYTHONHASHSEED="3").communicate()[0] == "alone\n"
    # mpirun adds the folder of its libraries; a server that mpi4py has loaded none for lacks it.
    for folder, warm in (("/opt/openmpi/lib", False), (f"{sys.prefix}/lib", True)):
        own = {"OMPI_LIBDIR_LOC": folder, "LD_LIBRARY_PATH": folder}
        assert start(code, **own).communicate()[0].startswith("lockstep-") == warm
    assert start(code).communicate()[0].startswith("lockstep-")


def test_what_is_pickled_by_its_place_in_main_is_found(start: Start) -> None:
    code = (
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    assert start(code).communicate() == ("[2, 4]\n", "")


def test_processes_end_with_the_server(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WAIT]
    with spawned(ENVIRONMENT, ()) as name:
        process = subprocess.Popen(
            through_proxy(argv, name), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        pid = int(process.stdout.readline())
    assert process.wait(10) == -signal.SIGKILL
    assert is_gone(pid)
    process.stdout.close()
    alone = subprocess.run(
        through_proxy([sys.executable, "-c", "print(1)"], name), capture_output=True, check=True
    )
    assert alone.stdout == b"1\n"
