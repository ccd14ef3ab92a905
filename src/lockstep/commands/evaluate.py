"""`lockstep eval`: the metrics of a checkpoint on a split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import load, override_data
from lockstep.engine.assembly import evaluations
from lockstep.engine.checkpoint.choice import find_snapshot
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.evaluation.splits import evaluated_splits
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, DataError
from lockstep.front import TIMEOUT_S, on_device
from lockstep.launchers.rank.environment import detect
from lockstep.launchers.rank.join import open_transport
from lockstep.launchers.rank.threads import num_threads
from lockstep.loading import restored
from lockstep.recipes.abilities import Reports
from lockstep.targets import make_task, task_class, trusted_target


def evaluate(
    run_dir: Path,
    split: str,
    which: str,
    report: Path | None = None,
    overrides: Sequence[str] = (),
) -> tuple[dict[str, float], list[str]]:
    """Loss and metrics of a run's checkpoint; shared out over the ranks if there are several.

    Args:
        run_dir: path of the run directory.
        split: name of the split: `train`, or one that the task names.
        which: checkpoint to evaluate: `best`, `latest`, or a step's number.
        report: path of a folder in which the task's first rank writes its report, if one is wanted.
        overrides: `key=value` items for the config, to look at other data than the run's.

    Returns:
        The metrics, and lines for people: metrics of more than one number, that the data are
        others, and what the report has.

    Raises:
        LockstepError: there is no such run, checkpoint or split, or the overrides are of another
            model.
    """
    directory = RunDirectory(run_dir)
    kind = task_class(trusted_target(directory))
    config = override_data(load(kind.Config, run_dir / "config.yaml"), overrides)
    environment = detect(os.environ)
    with num_threads(config.threads, environment), on_device(config, environment) as device:
        task = make_task(kind, config)
        splits_there = ("train", *evaluated_splits(task))
        if split not in splits_there:
            raise ConfigError(f"--split {split}: must be one of {', '.join(splits_there)}")
        if report is not None and not isinstance(task, Reports):
            raise ConfigError(f"--report {report}: {task.name} has no report beyond its metrics")
        snapshot = find_snapshot(directory.checkpoints, which)
        transport = open_transport(environment, device, TIMEOUT_S)
        try:
            model = restored(task, config, snapshot, device, str(directory.checkpoints))
            splits = evaluations(task, config, device, (split,))
            if split not in splits:
                raise DataError(f"--split {split}: the task has no such dataset")
            scores = splits[split].run(transport, model, Compute(task, model, config, device))
            more = [f"{name:16} {value}" for name, value in scores.arrays.items()]
            more += [f"warning: {remark}" for remark in task.data_remarks()]
            more += _on_other_data(task, snapshot)
            if isinstance(task, Reports) and report is not None and transport.rank == 0:
                more += task.report(model.eval(), split, made(report, "--report"), run_dir)
            return scores.metrics, more
        finally:
            transport.close()


def _on_other_data(task: Task, snapshot: Snapshot) -> list[str]:
    """A warning if a checkpoint was trained on other data."""
    known = snapshot.meta["sampler"].get("task_digest")
    here = None if known is None else task.data_digest()
    if here == known:
        return []
    return [
        "warning: the data are not those that the run was trained on "
        f"(SHA-256 {str(here)[:12]}…, not {str(known)[:12]}…)"
    ]


def lines(
    run_dir: Path,
    split: str,
    which: str,
    report: Path | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """The lines that `lockstep eval` prints; none on ranks other than the first."""
    metrics, more = evaluate(run_dir, split, which, report, overrides)
    if detect(os.environ).rank:
        return []
    return [*(f"{name:16} {value:.6g}" for name, value in metrics.items()), *more]


def made(folder: Path, option: str) -> Path:
    """A folder to write to, made if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder}: cannot be made: {error.strerror}") from error
    return folder
