"""Starting real ranks."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from lockstep.cli.main import main
from lockstep.launching.host.processes import usable_cores
from lockstep.launching.job.commands import (
    local_command,
    mpirun_command,
    rank_environment,
    torchrun_command,
)

from .warm import warm_server

TASKS = Path(__file__).parent / "distributed" / "tasks.py"


# How long an example takes says nothing on a loaded machine.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")

WARM = {}
"""Environment variables with which interpreters start in a forked process."""
_SHARED = pytest.StashKey()
"""These variables, in the process that starts workers of pytest-xdist."""

_STARTERS = ("accelerator", "campaigns", "cli", "comm", "distributed", "lab", "launching", "slurm")
"""Folders of tests that start ranks or watch the time: at most two of them at once."""

_PATIENT = {"local", "torchrun"}
"""Launchers whose ranks sleep while they wait, by what tests are parametrized with."""

_STARTING, _ONE_PROCESS = {"lockstep", "ranks"}, "here"
"""Fixtures by which tests start ranks, in any folder, and by which they start none."""


def pytest_configure():
    """Have signals do what tests expect: a shell ignores one for `make test &`, nohup another."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()  # while modules and tests come, which all stay (`pytest_runtestloop`)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let a worker of pytest-xdist use the one warm server of all workers."""
    if _SHARED not in node.config.stash:
        stack = contextlib.ExitStack()
        node.config.add_cleanup(stack.close)
        node.config.stash[_SHARED] = stack.enter_context(warm_server())
    node.workerinput["warm"] = node.config.stash[_SHARED]


@pytest.hookimpl(tryfirst=True)  # before the tests run
def pytest_runtestloop():
    """Look for garbage from now on, but not among modules and tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """Put tests that start ranks into two groups, each of which one worker of pytest-xdist runs.

    Ranks wait for each other longer the more of them share the cores. But much of a start is
    waiting, so that one such group alone would leave cores idle.
    """
    queues = {}  # of files, each by itself
    for item in items:
        folders = item.path.relative_to(Path(__file__).parent).parts
        starts = (
            folders[0] in _STARTERS
            and folders[1] != "api"
            and _ONE_PROCESS not in item.fixturenames
        )
        starts |= not _STARTING.isdisjoint(item.fixturenames)
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        starts &= _PATIENT.isdisjoint(v for v in values if isinstance(v, str))
        starts &= item.get_closest_marker("no_ranks") is None
        group = item.path.name
        if starts:
            group = f"ranks {queues.setdefault(item.path, len(queues) % 2)}"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Workers share the cores with ranks, and small models lose time with two threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _warm_interpreters(pytestconfig):
    shared = getattr(pytestconfig, "workerinput", {}).get("warm")
    with contextlib.nullcontext(shared) if shared else warm_server() as variables:
        WARM.update(variables)
        yield
    WARM.clear()


def environment(cold=False, **env):
    """The environment to start commands in.

    Args:
        cold: whether interpreters import everything themselves, as a user's do.
        env: more variables.
    """
    clean = rank_environment(1)
    clean.pop("LOCKSTEP_SESSION", None)
    warm = {} if cold else dict(WARM)
    if warm and "PYTHONPATH" in env:
        warm["PYTHONPATH"] += os.pathsep + env.pop("PYTHONPATH")
    # Tests share the cores: ranks that wait must not keep others from working.
    return {**clean, "OMPI_MCA_mpi_yield_when_idle": "1", "COLUMNS": "200", **env, **warm}


def run(argv, cwd, timeout=240, cold=False, **env):
    """Run a command; its exit code and output."""
    return subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env=environment(cold, **env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def generators_of_threads():
    """Has nobody look at the global generators: ranks that are threads seed them for each other."""
    from lockstep.engine.optimizer import flat_optimizer
    from lockstep.engine.trial import trial

    with pytest.MonkeyPatch.context() as patch:
        for module in (trial, flat_optimizer):
            patch.setattr(module, "global_state", lambda: None)
        yield


@pytest.fixture
def lockstep(tmp_path):
    """Runs the `lockstep` command in an empty folder."""

    def call(*arguments, **options):
        return run([sys.executable, "-m", "lockstep", *arguments], tmp_path, **options)

    return call


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Runs the `lockstep` command in this process, in an empty folder."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        monkeypatch.delenv("LOCKSTEP_SESSION", raising=False)
        for name, value in WARM.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, out, err)

    return call


@pytest.fixture
def ranks(tmp_path):
    """Runs a script on some ranks under a launcher."""

    def call(launcher, num_ranks, script, *arguments, **options):
        argv = [sys.executable, str(script), *map(str, arguments)]
        if launcher == "mpi":
            argv = mpirun_command(num_ranks, argv, cores=usable_cores()).argv
        elif launcher == "local":
            argv = local_command(num_ranks, argv).argv
        elif launcher == "torchrun":
            argv = torchrun_command(num_ranks, argv).argv
        return run(argv, tmp_path, **options)

    return call


def slow(*values):
    """A case of `pytest.mark.parametrize` for the slow tests only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def result(run_dir):
    """A run's result.json."""
    return json.loads((Path(run_dir) / "result.json").read_text())


def target(name="Everything"):
    """A target of the tests' own tasks."""
    return f"{TASKS}:{name}"
