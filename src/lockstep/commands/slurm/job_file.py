"""The options of a job: of a YAML file, and of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import Count, Positive, Section, load
from lockstep.errors import LaunchError


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
        given: options of the command line by name; None stands for one that is not given.

    Raises:
        ConfigError: the file cannot be read or an option does not fit.
        LaunchError: there is no time limit.
    """
    job = JobFile() if path is None else load(JobFile, path)
    chosen = {name: value for name, value in given.items() if value is not None}
    if (cpus := chosen.get("cpus_per_task")) is not None:
        # The file's threads go with its own cores: with fewer, the default counts.
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
