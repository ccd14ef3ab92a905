"""The text of a SLURM job script that trains, stops in time, and goes on after a requeue.

Only text is made here: nothing is looked up, started or written, so it can be tested anywhere.
"""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from lockstep.config.parsing import shown
from lockstep.errors import LaunchError
from lockstep.launching.slurm import Resources

_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.+))?", re.ASCII | re.DOTALL)
_DIRECTIVE = "#SBATCH"

_OWN = {
    "job-name": "the target's name", "nodes": "--nodes", "ntasks": "--ntasks-per-node",
    "ntasks-per-node": "--ntasks-per-node", "cpus-per-task": "--cpus-per-task", "time": "--time",
    "partition": "--partition", "account": "--account", "signal": "--signal-before",
    "output": "--output, beside which the log is", "chdir": "the working directory",
}  # fmt: skip
"""Options of sbatch that lockstep sets, and where users set them."""

_NEVER = {
    "open-mode": "a requeued job goes on in the same log",
    "requeue": "the script requeues its job", "no-requeue": "the script requeues its job",
    "wrap": "there is a script", "parsable": "it is no option of a job script",
    "test-only": "it is no option of a job script", "wait": "it is no option of a job script",
}  # fmt: skip
"""Options that the script cannot work with, and the reasons."""


class Given(NamedTuple):
    """An option for sbatch."""

    text: str
    where: str = ""
    """The file that it comes from, and the line; empty for the command line."""

    def error(self, message: str) -> LaunchError:
        """An error that says where the option comes from."""
        return LaunchError(f"{self.where}: {message}" if self.where else message)


def checked(*sources: Sequence[Given], is_sweep: bool = False) -> tuple[str, ...]:
    """Options of sbatch as lines of a job script.

    Args:
        sources: options such as `--gpus-per-task=1` and `--exclusive`, by source; a later source
            may give an option another value.
        is_sweep: whether the job is an array whose tasks are the points of a sweep.

    Raises:
        LaunchError: one is no long option, has a control character, comes twice in a source, or is
            set by lockstep.
    """
    lines: dict[str, str] = {}
    for source in sources:
        lines |= _lines(source, is_sweep)
    return tuple(lines.values())


def _lines(source: Sequence[Given], is_sweep: bool) -> dict[str, str]:
    """The lines of one source, by the options' names."""
    lines: dict[str, str] = {}
    for given in source:
        option = given.text
        match = _OPTION.fullmatch(option)
        if match is None:
            raise given.error(
                f"{shown(option)}: options for sbatch are written --name=value or --name, such as "
                "--gpus-per-task=1"
            )
        name, value = match["name"], match["value"]
        if not option.isprintable():
            raise given.error(f"{option!r}: has a line break or another control character")
        _refuse_own(name, given, is_sweep)
        if name in lines:
            raise given.error(f"--{name}: comes twice among the options for sbatch")
        lines[name] = f"--{name}" + ("" if value is None else f"={shlex.quote(value)}")
    return lines


def _refuse_own(name: str, given: Given, is_sweep: bool) -> None:
    """Refuse what lockstep sets, also if it is abbreviated, as sbatch would take it."""
    if is_sweep and "array".startswith(name):
        raise given.error(f"--{name}: is set by lockstep sweep: use --jobs for how many at a time")
    for own, means in _OWN.items():
        if own.startswith(name):
            raise given.error(f"{shown(given.text)}: is set by lockstep slurm: use {means}")
    for never, reason in _NEVER.items():
        if never.startswith(name):
            raise given.error(f"{shown(given.text)}: cannot be passed through: {reason}")


def split_setup(text: str, where: str) -> tuple[list[Given], str]:
    """The options for sbatch in a site's lines, and the other lines.

    SLURM reads `#SBATCH` lines only above the first command, where lockstep puts them.

    Raises:
        LaunchError: the text has a control character, or an `#SBATCH` line cannot be read.
    """
    options: list[Given] = []
    others: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{where}, line {number}"
        if not line.replace("\t", " ").isprintable():
            raise LaunchError(f"{place}: has a control character")
        if not line.startswith(_DIRECTIVE):
            others.append(line)
            continue
        try:
            words = shlex.split(line.removeprefix(_DIRECTIVE), comments=True)
        except ValueError as error:
            raise LaunchError(f"{place}: cannot be read: {error}") from None
        options += [Given(word, place) for word in words]
    return options, "\n".join(others).strip("\n")


FIRST_COMMENT = "# Written by `lockstep slurm`"
"""The beginning of the second line of every script: a file without it is the user's own."""

POINT = "${point[@]}"
"""Stands for the words of a job array's task in the command."""

RUN_DIR = "${run_dir}"
"""Stands for the job's run directory in a rank's arguments and environment variables."""

RENDEZVOUS = "${rendezvous}"
"""Stands for the address at which the agents of a job meet: that of its first node."""

# Not by MASTER_ADDR: sbatch hands on the shell's, and each node would be a coordinator of its own.
# Where names of nodes do not resolve, LOCKSTEP_RENDEZVOUS has another address.
_ADDRESS = '"${LOCKSTEP_RENDEZVOUS:-$SLURMD_NODENAME:$((15000 + ${SLURM_JOB_ID:-0} % 15000))}"'

_WIDTH = 96


@dataclass(frozen=True)
class BatchJob:
    """A job that trains.

    Attributes:
        name: name of the job.
        resources: resources that it requests.
        command: command that starts the ranks; `RUN_DIR` in it stands for the run directory.
        env: environment variables of the ranks; `RUN_DIR` in them stands for the run directory.
        threads: number of threads of each rank.
        run_dir: absolute path of the run directory; None puts it below `work_dir`, named after the
            job and its number.
        work_dir: absolute path of the folder to run in.
        log: absolute path of the job's log, with SLURM's `%j` for the job's number.
        title: description of what is trained, for the log.
        trains: whether the command trains: such a job stops in time and is requeued.
        options: further options for sbatch, as they stand in a script.
        setup: lines of the user's that come before all others, such as `module load`.
        points: of a job array, the run directory of each task and the words that `POINT` stands
            for; the tasks count from 0. Empty for a job that is no array by itself.
        outlives_nodes: whether the job goes on when one of its nodes is lost.
        at_once: greatest number of an array's tasks that run at a time; None for all.
    """

    name: str
    resources: Resources
    command: Sequence[str]
    env: Mapping[str, str]
    threads: int
    run_dir: Path | None
    work_dir: Path
    log: Path
    title: str = ""
    trains: bool = True
    options: Sequence[str] = ()
    setup: str = ""
    points: Sequence[tuple[Path, Sequence[str]]] = ()
    at_once: int | None = None
    outlives_nodes: bool = False


def script(job: BatchJob) -> str:
    """The job script.

    Raises:
        LaunchError: a text in it has a line break or another control character.
    """
    paths = map(str, (job.run_dir, job.work_dir, job.log))
    words = [word for path, words in job.points for word in (str(path), *words)]
    for text in (job.name, job.title, *paths, *job.command, *job.env.values(), *words):
        _printable(text)
    ranks = job.resources.num_ranks
    parts = [
        "#!/bin/bash",
        f"{FIRST_COMMENT}: {job.name} on {ranks} rank{'s'[: ranks > 1]}. Submit it with sbatch.",
        *_directives(job),
        "",
        *([job.setup, "", *_AS_USUAL, ""] if job.setup else []),
        *_setting(job),
        "",
        _filled(
            "banner.sh.in",
            ranks=ranks,
            threads=job.threads,
            tasks=job.resources.tasks_per_node,
            cpus=job.resources.cpus_per_task,
            title=shlex.quote(job.title),
        ),
    ]
    command = _wrapped(job.command)
    if not job.trains:
        return "\n".join([*parts, f"{command} </dev/null", ""])
    patience = job.resources.patience_s
    return "\n".join([*parts, _filled("training.sh.in", command=command, patience=patience)])


_AS_USUAL = (
    "# As bash is by default: the lines below expect commands that fail and unset variables.",
    "set +o errexit +o nounset +o pipefail +o noclobber",
    "trap - ERR DEBUG RETURN",
    "unset IFS",
)
"""Lines that undo the shell options of a site's lines, such as `set -euo pipefail`."""


def _directives(job: BatchJob) -> list[str]:
    asked = job.resources
    options = {
        "job-name": job.name,
        "nodes": str(asked.nodes),
        "ntasks-per-node": str(asked.tasks_per_node),
        "cpus-per-task": str(asked.cpus_per_task),
        "time": asked.time,
        "partition": asked.partition,
        "account": asked.account,
        # B: only this shell gets it, and passes it on; SLURM would tell its own steps only, which
        # are mpirun's daemons and not the ranks.
        "signal": f"B:USR1@{asked.signal_before_s}" if job.trains else None,
        "open-mode": "append",
        "chdir": str(job.work_dir),
        "output": str(job.log),
    }
    lines = [f"#SBATCH --{name}={shlex.quote(v)}" for name, v in options.items() if v is not None]
    if job.outlives_nodes:
        lines.append("#SBATCH --no-kill")
    lines.append(f"#SBATCH --{'' if job.trains else 'no-'}requeue")
    if job.points:
        limit = "" if job.at_once is None else f"%{job.at_once}"
        lines.append(f"#SBATCH --array=0-{len(job.points) - 1}{limit}")
    return [*lines, *(f"#SBATCH {option}" for option in job.options)]


def _setting(job: BatchJob) -> list[str]:
    """The lines that set the run directory and the environment variables."""
    if job.run_dir is None:
        base, suffix = job.work_dir / "runs" / job.name, '-"$job"'
    else:
        base, suffix = job.run_dir, '"${SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}"'
    lines = [
        "# A requeued job keeps its number, and so its run directory; an array's task has its own.",
        "job=${SLURM_JOB_ID:-local}",
        'if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then',
        "    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        "fi",
        *(_points(job) if job.points else [f"run_dir={shlex.quote(str(base))}{suffix}"]),
        *_OWN_LOG,
        "",
        "# Sums depend on the number of threads, so it belongs to the config (threads=…).",
    ]
    for name, value in job.env.items():
        before, separator, after = value.partition(json.dumps(RUN_DIR))
        text = _quoted(value)
        if separator:
            # The suffix consists of harmless characters: what is JSON before it is JSON after it.
            text = f"{shlex.quote(before + json.dumps(str(base))[:-1])}{suffix}"
            text += shlex.quote('"' + after)
        lines.append(f"export {name}={text}")
    return lines


_OWN_LOG = (
    'if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then',
    "    # Opened to append: what is written by an earlier start that has not ended yet is kept.",
    '    echo "log: $run_dir.log"',
    '    mkdir -p "$(dirname "$run_dir")" && exec >>"$run_dir.log" 2>&1',
    "fi",
)
"""Lines by which a task of an array writes its log beside its run directory."""


def _points(job: BatchJob) -> list[str]:
    """Lines with the config and run directory of each task of an array."""
    lines = ["case ${SLURM_ARRAY_TASK_ID:-none} in"]
    for number, (path, words) in enumerate(job.points):
        lines.append(f"{number}) run_dir={shlex.quote(str(path))}")
        lines.append(f"    point=({' '.join(map(shlex.quote, words))}) ;;")
    return [*lines, '*) echo "this is a job array: submit it with sbatch"; exit 2 ;;', "esac"]


class _Template(string.Template):
    """Text with `@{name}` in it, since shells have a use for `$`."""

    delimiter = "@"


def _filled(name: str, **values: object) -> str:
    """A template of this folder, with these values."""
    text = resources.files(__package__).joinpath(name).read_text()
    return _Template(text).substitute(values)


def _wrapped(words: Sequence[str]) -> str:
    """A command on lines of a readable length."""
    lines = [""]
    for word in map(_quoted, words):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _quoted(word: str) -> str:
    placeholders = {RUN_DIR: '"$run_dir"', POINT: '"${point[@]}"', RENDEZVOUS: _ADDRESS}
    return placeholders.get(word) or shlex.quote(word)


def _printable(text: str) -> None:
    if not text.isprintable():
        raise LaunchError(f"{text!r}: has a line break or another character no job script may have")
