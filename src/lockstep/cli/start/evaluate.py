"""`lockstep eval` and `lockstep export`: metrics of a checkpoint, and models for other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lockstep.config import load, override_data
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.evaluation.batches import evaluated_splits
from lockstep.engine.evaluation.evaluation import evaluations
from lockstep.engine.passes.compute import Compute
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, DataError, RunDirectoryError
from lockstep.launching.api import TIMEOUT_S, on_device
from lockstep.launching.api.trained import SUFFIXES, restored
from lockstep.launching.api.trained import export as export_model
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.launching.rank.process import num_threads
from lockstep.launching.remote import local_copy
from lockstep.launching.systems import Applies, Compares, Exports, Reports
from lockstep.launching.targets import make_task, task_class, trusted_target
from lockstep.observe.baselines import beside_baselines, keep, table


def evaluate(
    run_dir: Path,
    split: str,
    which: str,
    report: Path | None = None,
    overrides: Sequence[str] = (),
    compares: bool = False,
) -> tuple[dict[str, float], list[str]]:
    """Loss and metrics of a run's checkpoint, computed by all ranks.

    Args:
        run_dir: path of the run directory.
        split: name of the split: `train`, or one that the task names.
        which: checkpoint to evaluate: `best`, `latest`, or a step's number.
        report: path of a folder for the task's report, if one is wanted; rank 0 writes it.
        overrides: `key=value` items for the config, to evaluate other data than the run's.
        compares: whether to measure simple models beside it, too; rank 0 does, and keeps what it
            found in the run directory for `lockstep report`.

    Returns:
        The metrics, and lines for people: metrics of more than one number, warnings about other
        data, the report's lines, and a table of simple models.

    Raises:
        LockstepError: there is no such run, checkpoint or split, or the overrides are of another
            model.
    """
    run_dir = local_copy(run_dir)
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
        if compares and overrides:
            raise ConfigError(
                f"--baselines: simple models learn what the run has learned; leave {overrides[0]} "
                "out"
            )
        if compares and not isinstance(task, Compares):
            raise ConfigError(
                f"--baselines: {task.name} names no simple models; define "
                "baselines(self, model, split) in the task"
            )
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
            if isinstance(task, Compares) and compares and transport.rank == 0:
                found = task.baselines(model.eval(), split)
                beside = beside_baselines(found, scores.metrics, split, snapshot.step, config)
                more += ["", *table(beside)]
                try:
                    keep(beside, run_dir)
                except RunDirectoryError as error:
                    more.append(f"warning: not kept for a report: {error}")
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


def lines(metrics: Mapping[str, float], more: Sequence[str]) -> list[str]:
    """What `lockstep eval` prints of what `evaluate` returns; on ranks but the first, nothing."""
    shown = [*(f"{name:16} {value:.6g}" for name, value in metrics.items()), *more]
    return [] if detect(os.environ).rank else shown


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


def export(
    run_dir: Path,
    path: Path,
    which: str,
    format: str | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Write a run's checkpoint in a format, or in its task's own formats.

    Args:
        run_dir: path of the run directory.
        path: path of the file to write, or of the folder for the task's own formats.
        which: checkpoint to export: `best`, `latest`, or a step's number.
        format: name of the format. By default, the one that the suffix of `path` says; if that
            means none, the task's own formats.
        overrides: `key=value` items for the config, with data for the exported model to predict on;
            only for a task that supports it.

    Returns:
        Lines for people.

    Raises:
        LockstepError: there is no such run or checkpoint, no format is given and its task has no
            own formats or cannot predict on the given data, the overrides change the model, or the
            path cannot be written.
    """
    run_dir = local_copy(run_dir)
    directory = RunDirectory(run_dir)
    target = trusted_target(directory)
    is_file = format is not None or path.suffix in SUFFIXES.values()
    if is_file and not overrides:
        return [export_model(run_dir, path, format=format, which=which).described]
    kind = task_class(target)
    own = load(kind.Config, run_dir / "config.yaml")
    config = override_data(own, overrides)
    # The exported model is the run's, whatever data it then predicts on.
    task = make_task(kind, own)
    applied = make_task(kind, config) if overrides else task
    if overrides and (is_file or not isinstance(applied, Applies)):
        raise ConfigError(
            f"{overrides[0]}: {f'{path}: a file' if is_file else task.name} is exported without "
            "data; leave the key out"
        )
    if not isinstance(task, Exports):
        raise ConfigError(
            f"{path}: {task.name} has no forms of its own; end it in "
            f"{', '.join(SUFFIXES.values())}, or give --format"
        )
    snapshot = find_snapshot(directory.checkpoints, which)
    if not overrides or not isinstance(applied, Applies):
        return task.export(dict(snapshot.model), made(path, "export to"))
    # The data first: they may be unusable, and then nothing must be written.
    device = torch.device("cpu")
    model = restored(applied, config, snapshot, device, str(directory.checkpoints))
    applied.data_digest()
    lines = task.export(dict(snapshot.model), made(path, "export to"))
    return [*lines, *applied.apply(model.eval(), path)]
