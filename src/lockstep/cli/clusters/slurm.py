"""`lockstep slurm`, and the batch job of a run or of each config of a sweep, with its options."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.comm.mpi import without_hierarchy
from lockstep.config import Count, Positive, Section, TrainConfig, load, override
from lockstep.config.files import read_text, replacing
from lockstep.engine.checkpoint.origin import items, settled
from lockstep.errors import LaunchError, file_errors
from lockstep.launching.api import Session
from lockstep.launching.host.processes import THREAD_VARIABLES
from lockstep.launching.job.commands import SILENCE_S, mpirun_command
from lockstep.launching.slurm import Resources
from lockstep.launching.slurm.script import (
    FIRST_COMMENT,
    POINT,
    RENDEZVOUS,
    RUN_DIR,
    BatchJob,
    Given,
    checked,
    script,
    split_setup,
)
from lockstep.launching.targets import absolute, configured, is_script
from lockstep.observe.reading.listing import read_config

DOCTOR = "doctor"
"""The target that tests communication instead of training."""


def deliver(batch: BatchJob, path: Path, submit: bool) -> None:
    """Write a job's script, and submit it to SLURM if asked to.

    Raises:
        LaunchError: it has a text that no script may have, cannot be written, or is refused.
    """
    write_script(path, script(batch), FIRST_COMMENT)
    print(f"wrote {path}", flush=True)
    if submit:
        print(f"submitted job {_submit(path)}", flush=True)


def _submit(path: Path) -> str:
    """Submit a script; returns the number of the job."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            f"there is no sbatch here; install SLURM's client (`apt-get install slurm-client`), or "
            f"run `sbatch {path}` on a machine of the cluster: the script is written"
        )
    done = subprocess.run([sbatch, "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(
            f"sbatch refuses {path}: {done.stderr.strip() or f'exit code {done.returncode}'}; "
            "the script is written"
        )
    return done.stdout.strip().partition(";")[0]


def slurm(
    target: str,
    overrides: Sequence[str],
    job: JobFile,
    run_dir: Path | None,
    output: Path | None,
    submit: bool,
) -> None:
    """Write a job script that trains a target (or runs `doctor`), and submit it if asked to.

    Args:
        target: recipe, file or script to train, or `doctor`.
        overrides: `key=value` items for the config, and options for sbatch.
        job: options of the job.
        run_dir: path of the run directory; named after the job's number if None.
        output: path of the script to write; named after the target if None.
        submit: whether to submit the script to SLURM.

    Raises:
        LockstepError: something given does not work, and nothing was written; or there is no
            sbatch, or it refused the script, which was written.
    """
    options = [item for item in overrides if item.startswith("-")]
    overrides = [*job.overrides, *(item for item in overrides if not item.startswith("-"))]
    is_doctor = target == DOCTOR
    where = target if is_doctor else absolute(target)
    threads, silence_s = 1, SILENCE_S
    if not is_doctor:
        overrides = with_threads(overrides, job.cpus_per_task, run_dir)
        config = config_of(where, overrides, run_dir)
        threads, silence_s = config.threads, config.hang_timeout_s
        # The exact weights of another run that the job starts from, so that later changes of that
        # run do not matter. Patterns are given already: by the overrides, the task or the script.
        weights = items(config.weights_from)
        overrides += [item for item in weights if not item.startswith("weights_from.only=")]
    if is_doctor and overrides:
        raise LaunchError(f"{overrides[0]!r}: the doctor has no config")
    if is_doctor and job.replace:
        raise LaunchError(f"--replace {job.replace}: the doctor replaces no ranks")
    cpus = threads if job.cpus_per_task is None else job.cpus_per_task
    resources = resources_of(job, cpus, threads)
    name = where.rpartition(":")[2] if ".py:" in where else Path(where).stem
    name = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    path = (output or Path(f"{name}.sbatch")).absolute()
    if is_doctor and job.agents:
        raise LaunchError("--agents: the doctor needs none")
    batch = batch_job(name, where, overrides, threads, resources, job, run_dir, path, silence_s)
    deliver(with_options(batch, job, options), path, submit)


class JobFile(Section):
    """A job's options in a YAML file; those on the command line come first."""

    nodes: Positive = 1
    ntasks_per_node: Positive = 1
    cpus_per_task: Positive | None = None
    time: str | None = None
    """In quotes: YAML takes 4:00:00 for a number."""
    partition: str | None = None
    account: str | None = None
    signal_before: Positive = 120
    replace: Count = 0
    agents: bool = False
    """Ranks are started by an agent on each node, and go on in place when a node is lost."""
    overrides: tuple[str, ...] = ()
    """`key=value` items for the config, before those on the command line."""
    sbatch: tuple[str, ...] = ()
    """Further options for sbatch, such as `--gpus-per-task=1`, beside those behind `--`."""
    setup: str | None = None
    """A file with lines for the top of the script, such as `module load`, or a site's name."""


def job_file(path: Path | None, given: Mapping[str, Any]) -> JobFile:
    """The options of a job: those given, else a file's, else the defaults.

    Args:
        path: path of a YAML file with options, if there is one.
        given: options of the command line by name; None for those that are not given.

    Raises:
        ConfigError: the file cannot be read or an option does not fit.
        LaunchError: there is no time limit.
    """
    job = JobFile() if path is None else load(JobFile, path)
    chosen = {name: value for name, value in given.items() if value is not None}
    if (cpus := chosen.get("cpus_per_task")) is not None:
        # The file's threads belong to its own cores: with fewer cores, the default applies.
        fitting = (item for item in job.overrides if _threads(item) <= cpus)
        chosen["overrides"] = tuple(fitting)
    job = job.model_copy(update=chosen)
    if job.time is None:
        raise LaunchError(
            "--time: is missing; give the job's time limit, such as --time 1:30:00, or `time:` in "
            "the file of --job"
        )
    return job


def _threads(item: str) -> int:
    """The number of threads that a `key=value` item sets; 0 if it sets none."""
    key, _, value = item.partition("=")
    return int(value) if key == "threads" and value.isdecimal() else 0


def array(
    name: str,
    target: str,
    points: Sequence[tuple[Path, Sequence[str]]],
    job: JobFile,
    options: Sequence[str],
    folder: Path,
    at_once: int | None,
) -> BatchJob:
    """A job array that trains each of some configs in a run directory of its own.

    Args:
        name: name of the job.
        target: recipe, `file.py:Task` or script, with an absolute path.
        points: run directory of each task, and its `key=value` items.
        job: options of the job.
        options: further options for sbatch.
        folder: folder of SLURM's own log of each task.
        at_once: greatest number of tasks that run at a time; None for all.

    Raises:
        LaunchError: something does not fit, or the target is a script.
    """
    if is_script(target):
        raise LaunchError(
            f"{target}: is a script; a sweep on SLURM needs its Task, {target}:NAME, for its keys"
        )
    threads = max(config_of(target, words, path).threads for path, words in points)
    cpus = threads if job.cpus_per_task is None else job.cpus_per_task
    resources = resources_of(job, cpus, threads)
    batch = batch_job(name, target, (POINT,), threads, resources, job, None, folder / "x")
    batch = replace(
        batch,
        points=points,
        at_once=at_once,
        title=f"{target}, {len(points)} configs",
        log=folder / "slurm-%A_%a.log",
    )
    return with_options(batch, job, options)


def batch_job(
    name: str,
    target: str,
    overrides: Sequence[str],
    threads: int,
    resources: Resources,
    job: JobFile,
    run_dir: Path | None,
    path: Path,
    silence_s: float = SILENCE_S,
) -> BatchJob:
    """The job that trains a target, or runs the doctor.

    Args:
        name: name of the job.
        target: recipe, `file.py:Task`, script or `DOCTOR`, with an absolute path.
        overrides: `key=value` items for the config.
        threads: threads of each rank.
        resources: resources of the job.
        job: options of the job: how many lost ranks are replaced, and what starts them.
        run_dir: path of the run directory; named after the job's number if None.
        path: path of the script, beside which SLURM's own log is.
        silence_s: seconds after which a node that does not answer is lost; 0 for mpirun's own.
    """
    num_ranks = resources.num_ranks
    env = dict.fromkeys(THREAD_VARIABLES, str(threads))
    # Open MPI gives its ranks a terminal of their own: in a log, progress bars are noise.
    env |= {"PYTHONUNBUFFERED": "1", "TERM": "dumb"} | without_hierarchy(os.environ)
    if os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    if is_script(target):
        env |= Session(RUN_DIR, True, tuple(overrides), True, target).to_env()
        train, ranks = [target], [sys.executable, target]
    else:
        train = ["train", target, "--run-dir", RUN_DIR, "--resume", *overrides]
        ranks = [sys.executable, "-m", "lockstep", *train]
    command: Sequence[str]
    if job.agents:
        command = _agents(resources, job.replace, train)
    else:
        # SLURM knows how many cores the nodes have.
        command = mpirun_command(
            num_ranks, ranks, cores=num_ranks, replacements=job.replace,
            one_host=resources.nodes == 1, silence_s=silence_s,
        ).argv  # fmt: skip
    if target == DOCTOR:
        command = (sys.executable, "-m", "lockstep", DOCTOR, "--ranks", str(num_ranks))
    return BatchJob(
        name=name,
        resources=resources,
        command=command,
        title=shlex.join([target, *overrides]),
        trains=target != DOCTOR,
        outlives_nodes=job.agents,
        env=env,
        threads=threads,
        run_dir=run_dir.absolute() if run_dir else None,
        work_dir=Path.cwd(),
        log=path.with_name(f"{path.stem.replace('%', '%%')}-%j.log"),
    )


def _agents(resources: Resources, replacements: int, train: Sequence[str]) -> list[str]:
    """The command that starts an agent on each node, all of which survive the loss of one.

    Raises:
        LaunchError: there is only one node.
    """
    nodes, ranks = resources.nodes, resources.tasks_per_node
    if nodes < 2:
        raise LaunchError("--agents: is for several nodes; add --nodes")
    return [
        "srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", f"--ntasks={nodes}",
        "--ntasks-per-node=1", f"--cpus-per-task={ranks * resources.cpus_per_task}",
        *(sys.executable, "-m", "lockstep", "agent", "--rendezvous", RENDEZVOUS),
        *("--hosts", str(nodes), "-n", str(ranks), "--replace", str(replacements)),
        *("--", *train),
    ]  # fmt: skip


def resources_of(job: JobFile, cpus: int, threads: int) -> Resources:
    """The resources that a job requests.

    Raises:
        LaunchError: they are not possible, or ranks would have more threads than cores.
    """
    assert job.time is not None
    if threads > cpus > 0:
        raise LaunchError(f"--cpus-per-task {cpus}: is less than threads={threads} of the config")
    return Resources(
        job.nodes, job.ntasks_per_node, cpus, job.time, job.partition, job.account,
        job.signal_before,
    )  # fmt: skip


def with_options(batch: BatchJob, job: JobFile, options: Sequence[str]) -> BatchJob:
    """A job with further options for sbatch, and with its site's lines.

    Options of the command line come before those of the job file, and these before the site's.

    Args:
        batch: the job.
        job: options of the job.
        options: options for sbatch of the command line.

    Raises:
        LaunchError: an option does not fit, or the file with the lines is not there.
    """
    site: list[Given] = []
    setup = ""
    if job.setup is not None:
        path = _setup_file(job.setup)
        try:
            text = read_text(path, follow_links=True)
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"--setup {path}: cannot be read: {error}") from None
        site, setup = split_setup(text, str(path))
    of_file = [Given(option, "sbatch of the job file") for option in job.sbatch]
    own = [Given(option) for option in options]
    lines = checked(site, of_file, own, is_sweep=bool(batch.points))
    return replace(batch, options=lines, setup=setup)


def _setup_file(name: str) -> Path:
    """The file that `--setup` means: a path, or a site's name in the user's folder for these."""
    if "/" in name or "." in name:
        return Path(name)
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = base / "lockstep" / "sites" / f"{name}.sh"
    if not path.is_file() and Path(name).is_file():
        return Path(name)
    return path


def with_threads(overrides: Sequence[str], cpus: int | None, run_dir: Path | None) -> list[str]:
    """Items that set `threads`, if none does: to the run's own number, or to the cores of a rank.

    The bits depend on it, so the script sets it, and a resumed run keeps it.
    """
    if cpus is None or cpus < 1 or any(item.partition("=")[0] == "threads" for item in overrides):
        return list(overrides)
    threads: Any = read_config(run_dir).get("threads") if run_dir is not None else None
    if not isinstance(threads, int):
        threads = cpus
    return [*overrides, f"threads={threads}"]


def config_of(target: str, overrides: Sequence[str], run_dir: Path | None) -> TrainConfig:
    """The config of a job; of a script's, only the keys that a job script depends on."""
    if not is_script(target):
        return configured(target, overrides, run_dir=run_dir)[1]
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key:
            raise LaunchError(f"{item!r} is not of the form key=value")
    # A script's own config is known only when it runs, and then sets its number of threads.
    known = [o for o in overrides if o.startswith("threads=")]
    if any(o.startswith("weights_from.path=") for o in overrides):
        known += [o for o in overrides if o.startswith("weights_from.")]
    return settled(override(TrainConfig(), known), run_dir)


def write_script(path: Path, text: str, mark: str) -> None:
    """Write a file for a cluster, in place of an earlier one of the same command only.

    Args:
        path: path of the file.
        text: its text.
        mark: what it begins with: which command writes it.

    Raises:
        LaunchError: something else is there, or it cannot be written.
    """
    with file_errors(LaunchError, path, advice="choose another --output"):
        if path.exists() and mark not in path.read_text(errors="replace")[:200]:
            raise LaunchError(
                f"{path}: is there already, and was not written by this command; choose another "
                "--output"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
