"""Starting a warm server: where there can be one, and which processes may be forked from it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.launching.host.parent_watch import PR_SET_PDEATHSIG, bound_to_parent
from lockstep.launching.host.processes import THREAD_VARIABLES
from lockstep.launching.job.commands import is_one_host, rank_environment
from lockstep.launching.systems import load_recipe
from lockstep.launching.warm import Forked, is_command, is_wanted
from lockstep.launching.warm.proxy import surroundings
from lockstep.launching.warm.rank import can_be_shown
from lockstep.launching.warm.server import Fits, Server, listener

_PLACES = ("LOCKSTEP_", "OMPI_", "OPAL_", "PMIX_", "PRTE_")
"""Prefixes of the variables that hold the places of ranks."""
_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")
"""Variables that shells and launchers set for every program, and that no library reads."""
_LIBRARIES = "LD_LIBRARY_PATH"
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
_THREAD_ENDS_S = 1.0

_MODULES = ("lockstep.cli.main", "lockstep.cli.start.train")
"""Modules that ranks import first."""
_LAUNCHERS = ("python", "local", "mpi")


def fork_server(launcher: str, target: str) -> AbstractContextManager[str]:
    """A server for the ranks of a command, forked from it before it imports a user's code.

    Args:
        launcher: name of the launcher that will start ranks.
        target: recipe, file or script that they will train.

    Yields:
        Its name; empty where each rank starts an interpreter of its own.
    """
    if not _is_possible(launcher):
        return nullcontext("")
    if ".py" not in target:
        load_recipe(target)
    return forked(rank_environment(threads=1))


def new_server(launcher: str, threads: int) -> AbstractContextManager[str]:
    """A server for the ranks of a program, in a process of its own that imports none of its code.

    Args:
        launcher: name of the launcher that will start ranks.
        threads: number of threads of each rank.

    Yields:
        Its name; empty where each rank starts an interpreter of its own.
    """
    if threads != 1 or not _is_possible(launcher):
        return nullcontext("")
    return spawned(rank_environment(threads), _MODULES)


def _is_possible(launcher: str) -> bool:
    if launcher not in _LAUNCHERS or not is_wanted(os.environ) or not can_serve(os.environ):
        return False
    return launcher != "mpi" or is_one_host(os.environ)


def can_serve(environment: Mapping[str, str]) -> bool:
    """Whether ranks on this host can be forked from a server.

    Not in a batch job, which places each rank itself; and not where there are GPUs: a process
    cannot use them if it was forked from one that has initialised them.
    """
    return (
        sys.platform == "linux"
        and "SLURM_JOB_ID" not in environment
        and not any(map(os.path.exists, _GPU_FILES))
        and can_be_shown()
    )


@contextlib.contextmanager
def forked(environment: Mapping[str, str]) -> Iterator[str]:
    """A server forked from this process, the `lockstep` command, as long as the context lasts.

    Args:
        environment: variables that ranks will have.

    Yields:
        Its name; empty if there is none.

    Raises:
        Forked: in each process that the server forks.
    """
    if not _is_whole(environment):
        yield ""
        return
    name = _new_name()
    try:
        line = listener(name)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        parent, pid = os.getpid(), os.fork()
    except OSError:
        pid = -1
    if pid < 0:
        yield ""
        return
    if pid == 0:
        _be_forked(line, name, parent, fitting(environment))
    line.close()
    try:
        yield name
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def spawned(environment: Mapping[str, str], modules: Sequence[str]) -> Iterator[str]:
    """A server in an interpreter of its own, as long as the context lasts.

    Proxies wait for it until it has imported everything.

    Args:
        environment: variables that ranks will have.
        modules: modules to import in the server first.

    Yields:
        Its name; empty if there is none.
    """
    name = _new_name()
    try:
        with listener(name) as line:
            child = subprocess.Popen(
                bound_to_parent(
                    [sys.executable, "-m", __name__, name, str(line.fileno()), *modules]
                ),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(line.fileno(),),
                start_new_session=True,
            )
    except OSError:
        child = None
    if child is None:
        yield ""
        return
    try:
        yield name
    finally:
        child.kill()
        child.wait()


def _is_whole(environment: Mapping[str, str]) -> bool:
    """Whether a fork of this process equals a new interpreter with the same imports.

    It must be the command, without options of the interpreter, and have one thread, since a fork
    copies no others. Libraries must have been loaded with the variables that ranks will have.
    """
    if not is_command() or sys.gettrace() or sys.getprofile():
        return False
    for thread in threading.enumerate():
        if thread is not threading.current_thread():  # a spinner's, which is about to end
            thread.join(_THREAD_ENDS_S)
    if _num_threads() > 1:
        return False
    return all(os.environ.get(name) == environment.get(name) for name in THREAD_VARIABLES)


def _be_forked(line: socket.socket, name: str, parent: int, fits: Fits) -> None:
    """Be a server that is a fork of the command.

    Raises:
        Forked: in each process that it forks.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()  # the terminal's signals are for the command
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        _leave_files(line.fileno())
        _serve(line, name, fits)
    except Forked:
        raise
    except BaseException:
        os._exit(1)


def _leave_files(kept: int) -> None:
    """Close all open files but one: a reader of the command's output must see its end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd in (0, 1, 2):
            os.dup2(nothing, fd)
        elif fd != kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _serve(line: socket.socket, name: str, fits: Fits, modules: Sequence[str] = ()) -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this program; each rank has its own
    for module in modules:
        importlib.import_module(module)
    if _num_threads() > 1:  # a library has started one, and a fork copies no threads
        sys.exit(1)
    Server(line, name, fits).serve()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _new_name() -> str:
    return f"lockstep-{os.urandom(16).hex()}"


def fitting(environment: Mapping[str, str]) -> Fits:
    """The test whether a fork of this process equals a start of its own, for each order.

    Args:
        environment: variables that all processes must have, apart from those of a rank's place.
            They must be those that this process had at its own start: libraries read theirs when
            they are loaded.
    """
    here, executable = surroundings(), sys.executable
    known = _of_no_place(environment)

    def fits(order: dict[str, Any]) -> bool:
        program, *arguments = order["argv"]
        return (
            program == executable
            and is_simple(arguments)
            and order["surroundings"] == here
            and _of_no_place(order["environment"]) == known
        )

    return fits


def is_simple(arguments: list[str]) -> bool:
    """Whether the arguments are a module, code or a file, without options of the interpreter."""
    if arguments[:1] in (["-m"], ["-c"]):
        return len(arguments) > 1
    return bool(arguments) and arguments[0].endswith(".py") and os.path.isfile(arguments[0])


def _of_no_place(environment: Mapping[str, str]) -> dict[str, str]:
    kept_variables = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_PLACES) and name not in _SHELL
    }
    # mpirun puts the folder of its own libraries in front, where it may not be needed.
    own = environment.get("OMPI_LIBDIR_LOC", "")
    folders = dict.fromkeys(filter(None, kept_variables.pop(_LIBRARIES, "").split(os.pathsep)))
    if own.startswith((sys.prefix, "/usr/lib")):  # which mpi4py and the linker search anyway
        folders.pop(own, None)
    return kept_variables | {_LIBRARIES: os.pathsep.join(folders)}


def _main(name: str, fd: str, *modules: str) -> None:
    from lockstep.comm.host import collect_seldom
    from lockstep.launching.warm.rank import run

    collect_seldom()
    fits = fitting(dict(os.environ))
    try:
        _serve(socket.socket(fileno=int(fd)), name, fits, modules)
    except Forked as rank:
        forked_here = rank.with_traceback(None)
    run(forked_here)


if __name__ == "__main__":
    _main(*sys.argv[1:])
