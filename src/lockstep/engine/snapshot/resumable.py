"""Whether a verified checkpoint is consistent, also with a run of another length.

A SHA-256 detects damage. It does not detect what another program, another version or a person has
edited and signed; that is refused here, before anything of it is used.

A run may go on with another length if it is then, bit for bit, a run that was started with that
length: nothing so far may depend on where the run was to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lockstep.config import TrainConfig
from lockstep.config.parsing import as_type, shown
from lockstep.data.parts import Place
from lockstep.engine.assembly import Parts
from lockstep.engine.carry import check_named
from lockstep.engine.carry.distributed_carries import DistributedCarries
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.hook import Hook
from lockstep.engine.optimizer.optimizer_state import from_json, tensor_names, to_json
from lockstep.engine.optimizer.schedule import lr_factor
from lockstep.engine.passes.precision import LossScale, LossScaleState
from lockstep.engine.run.progress import ALL_STEPS, Progress
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import CheckpointError, ConfigError, LockstepError

_WAY_OUT = (
    "start a new run with that length, or one that goes on from these weights: "
    "`lockstep train TASK --from RUN_DIR`"
)


@dataclass(frozen=True)
class SamplerMeta:
    """The part of a manifest about the data.

    Attributes:
        num_samples: number of samples of an epoch; None for a stream of unknown length.
        epoch: epoch of the next step, from 0.
        data_digest: SHA-256 of the first microbatch.
        task_digest: digest of all samples (`Task.data_digest`), if the task gives one.
        pass_starts: of a stream of unknown length, the positions at which passes over it begin.
        places: how far the parts of a stream were read, for each microbatch.
    """

    num_samples: int | None
    epoch: int
    data_digest: str
    task_digest: str | None = None
    pass_starts: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()


@dataclass
class SavedShared:
    """State that belongs to no single parameter, from `optimizer_state.SharedState.values`.

    Attributes:
        groups: what has changed in each group; None for groups that were not stepped there.
        attributes: attributes that have changed.
        state: state of the optimizer under keys that are not parameters.
    """

    groups: list[dict[str, Any] | None]
    attributes: dict[str, Any]
    state: dict[str, Any]

    def holds_only(self, attributes: dict[str, Any]) -> bool:
        """Whether nothing has changed but some of these attributes, to these values."""
        known = all(k in attributes and attributes[k] == v for k, v in self.attributes.items())
        return known and not (any(self.groups) or self.state)


def check_meta(snapshot: Snapshot, where: str) -> tuple[Progress, SamplerMeta]:
    """Progress and data of a snapshot's manifest, which must belong to the snapshot's step.

    Raises:
        CheckpointError: names the field that is missing or wrong.
    """
    progress = _part(snapshot, "progress", Progress, where)
    sampler = _part(snapshot, "sampler", SamplerMeta, where)
    problem = progress.problem()
    if progress.step != snapshot.step:
        problem = f"step={progress.step}: the checkpoint is of step {snapshot.step}"
    if problem:
        raise CheckpointError(f"{where}: is damaged: progress.{problem}")
    starts = sampler.pass_starts
    in_order = all(one < other for one, other in pairwise(starts))
    is_known = sampler.num_samples is None or sampler.num_samples >= 1
    if sampler.epoch < 0 or not is_known or not in_order or (starts and starts[0]):
        raise CheckpointError(f"{where}: is damaged: sampler: {sampler}")
    return progress, sampler


def check_training_state(
    snapshot: Snapshot,
    config: TrainConfig,
    total_steps: int,
    train_step: TrainStep,
    where: str,
) -> None:
    """Refuse a snapshot whose progress, loss scale or state of the task cannot be this run's.

    Args:
        snapshot: snapshot whose model fits, see `fits.check_fits`.
        config: config of this run.
        total_steps: number of optimizer steps of this run.
        train_step: training step of this run.
        where: name of the snapshot in errors.

    Raises:
        CheckpointError: names the field or tensor.
    """
    progress, _ = check_meta(snapshot, where)
    if progress.step > total_steps:
        raise CheckpointError(
            f"{where}: is damaged: progress.step={progress.step}: the run has {total_steps} steps"
        )
    can_end = train_step.task_state.hooks or progress.ended_by_loop
    has_reason = progress.exhausted(config) or can_end
    if progress.finished and progress.step < total_steps and not has_reason:
        raise CheckpointError(
            f"{where}: is damaged: progress.finished={shown(progress.finished)}: nothing else in "
            "it says that the run is over"
        )
    description = snapshot.meta.get("optimizer", {})
    if not isinstance(description, dict):
        raise CheckpointError(f"{where}: is damaged: optimizer={shown(description)}: not an object")
    scale = LossScale(config.precision)
    problem = _loss_scale_problem(snapshot.meta.get("loss_scale"), scale, config)
    problem = problem or _scalars_problem(snapshot.meta.get("optimizer_scalars"))
    problem = problem or _shared_problem(snapshot.meta.get("optimizer_shared", {}))
    problem = problem or _task_problem(snapshot, train_step.task_state)
    if not problem and "learning_rates" in snapshot.meta:
        problem = train_step.rates.problem(snapshot.meta["learning_rates"])
        problem = problem and f"learning_rates: {problem}"
    _check_carry(snapshot, train_step.carries, where)
    if problem:
        raise CheckpointError(f"{where}: is damaged: {problem}")


def stretch(snapshot: Snapshot, config: TrainConfig, parts: Parts, folder: Path) -> str:
    """Convert a checkpoint to one of the run with this config, if that has another length.

    Args:
        snapshot: a checkpoint that is consistent in itself; its progress is changed.
        config: config of the longer run, in which no other key has another value.
        parts: parts of the longer run.
        folder: path of the checkpoint's folder.

    Returns:
        A warning about what was undone; empty if nothing was.

    Raises:
        ConfigError: the run may not have another length, and why.
        CheckpointError: the manifest does not say the length of the run.
    """
    before = _total_steps(snapshot.meta.get("config"), parts.sampler.steps_per_epoch, folder)
    total = parts.total_steps
    if before == total:
        return ""
    progress = Progress.from_state_dict(snapshot.meta["progress"])
    name = "steps" if config.steps else "epochs"
    key = f"{name}={getattr(config, name)}"
    if total <= progress.step:
        raise ConfigError(
            f"{key}: is {total} steps, and the run has done {progress.step}; give more, or take "
            f"the checkpoint of an earlier step: {_WAY_OUT}"
        )
    _check_length_reads(snapshot.meta.get("asked"), key)
    _check_learning_rates(parts, config, key, before, progress.step)
    warning = _undo_last_evaluation(progress, parts, folder, key)
    if progress.finished == ALL_STEPS:
        is_judged = progress.evaluated == progress.step
        progress.finished = progress.exhausted(config) if is_judged else ""
    snapshot.meta["progress"] = progress.state_dict()
    return warning


def _total_steps(config: Any, steps_per_epoch: int | None, folder: Path) -> int:
    """The number of steps of the run that a manifest's config says."""
    there = config if isinstance(config, dict) else {}
    try:
        steps, epochs = (as_type(int | None, there.get(key)) for key in ("steps", "epochs"))  # type: ignore[arg-type]
    except ValueError as error:
        raise CheckpointError(f"{folder}: is damaged: config: epochs or steps: {error}") from None
    return steps or (epochs or 0) * (steps_per_epoch or 0)


def _check_length_reads(names: Any, key: str) -> None:
    """Refuse a run whose code has read its length, or for which that is not known."""
    if not isinstance(names, list):
        raise ConfigError(
            f"{key}: the run was begun by a version that did not note whether the task's code "
            f"reads its length; {_WAY_OUT}"
        )
    if names:
        raise ConfigError(
            f"{key}: the task's code may have used the run's length so far: it has read "
            f"{', '.join(map(str, names))}; {_WAY_OUT}"
        )


def _check_learning_rates(
    parts: Parts, config: TrainConfig, key: str, before: int, num_steps: int
) -> None:
    """Refuse a run whose steps so far would have had other learning rates."""
    schedule, tables = parts.train_step.schedule, parts.train_step.tables
    own = [distributed.module.schedule for distributed in tables.each] if tables is not None else []
    differs = schedule.first_difference(before, num_steps)
    for each in (schedule for schedule in own if schedule is not None):
        for step in range(num_steps):
            lengths = (before, parts.total_steps)
            one, other = (lr_factor(each, step, length, 0) for length in lengths)
            if one != other:
                differs = step if differs is None else min(step, differs)
                break
    if differs is not None:
        raise ConfigError(
            f"{key}: the learning rate depends on where the run ends (schedule.name="
            f"{config.schedule.name}, a table's schedule, or Task.lr_factor): step {differs} would "
            f"have had another one in a run of {parts.total_steps} steps than in one of {before}; "
            f"{_WAY_OUT}"
        )


def _undo_last_evaluation(progress: Progress, parts: Parts, folder: Path, key: str) -> str:
    """Remove the evaluation that was made only because the run was to end there."""
    kept = progress.before_last
    if kept is None:
        return ""
    for hook in parts.task_state.hooks:
        if type(hook).after_evaluation is not Hook.after_evaluation and not hook.first_only:
            raise ConfigError(
                f"{key}: {type(hook).__name__}.after_evaluation has seen the evaluation after step "
                f"{progress.step}, which a longer run does not have; {_WAY_OUT}"
            )
    if parts.train_step.rates.schedulers.go_by_evaluations:
        raise ConfigError(
            f"{key}: Task.build_scheduler goes by evaluations, and has seen the one after step "
            f"{progress.step}, which a longer run does not have; {_WAY_OUT}"
        )
    best = folder.with_name(listing.folder_name(kept.best_step))
    if kept.best_step and not best.is_dir():
        raise ConfigError(
            f"{key}: {best.name} is the best one without the evaluation after step "
            f"{progress.step}, which a longer run does not have, and was deleted; {_WAY_OUT}"
        )
    vars(progress).update(vars(kept))
    return (
        f"the evaluation after step {progress.step} was made because it was the last one, and does "
        "not count in a run of another length"
    )


def _part(snapshot: Snapshot, key: str, kind: Any, where: str) -> Any:
    try:
        return as_type(kind, snapshot.meta.get(key))
    except ValueError as error:
        raise CheckpointError(f"{where}: is damaged: {key}: {error}") from None


def _loss_scale_problem(saved: Any, scale: LossScale, config: TrainConfig) -> str:
    try:
        state = LossScaleState.from_json(saved)
    except ValueError as error:
        return f"loss_scale: {error}"
    if not scale.enabled:
        fits = state == LossScaleState(scale.value, 0)
    else:
        fits = math.isfinite(state.value) and state.value > 0
        fits = fits and 0 <= state.good_steps < config.precision.growth_interval
    return "" if fits else f"loss_scale={saved}: cannot be that of {config.precision.dtype}"


def _scalars_problem(scalars: Any) -> str:
    if not isinstance(scalars, dict) or not all(isinstance(v, dict) for v in scalars.values()):
        return f"optimizer_scalars={shown(scalars)}: must be objects by name"
    for owner, values in scalars.items():
        for key, value in values.items():
            place = f"optimizer_scalars.{shown(owner)}.{shown(key)}={shown(value)}"
            if not tensor_names(key, value) and not _is_state(value):
                return f"{place}: is not a value of an optimizer's state"
    return ""


def _shared_problem(saved: Any) -> str:
    try:
        states = as_type(dict[str, SavedShared], saved)
    except ValueError as error:
        return f"optimizer_shared: {error}"
    for path, state in states.items():
        for values in (*state.groups, state.attributes, state.state):
            wrong = next((k for k, v in (values or {}).items() if not _is_state(v)), None)
            if wrong is not None:
                return f"optimizer_shared.{shown(path)}: {shown(wrong)} is no value of such state"
    return ""


def _task_problem(snapshot: Snapshot, task_state: TaskState) -> str:
    """What is wrong with the task's own state: it must have all parts, of any type."""
    state = snapshot.meta.get("task", {})
    if not isinstance(state, dict):
        return f"task={shown(state)}: must be an object"
    tensors, values = task_state.capture()
    missing = [n for n in (*tensors, *values) if n not in state and n not in snapshot.task]
    return f"task: has no {shown(missing[0])}, which this task's state has" if missing else ""


def _check_carry(snapshot: Snapshot, carries: DistributedCarries | None, where: str) -> None:
    is_wanted = carries is not None
    if is_wanted != ("carry" in snapshot.meta):
        there, here = ("no", "a") if is_wanted else ("a", "no")
        raise CheckpointError(
            f"{where}: is of another task: it has {there} carry, this one has {here} Task.carry; "
            "resume with the same task or start a new run"
        )
    if carries is not None:
        try:
            check_named(snapshot.carry, snapshot.meta["carry"], carries.num_carries)
            carries.check(snapshot.carry, snapshot.meta["carry"])
        except ValueError as error:
            raise CheckpointError(f"{where}: is damaged: carry: {error}") from None


def _is_state(value: Any) -> bool:
    """Whether `optimizer_state.from_json` reads it, and `to_json` writes the same again."""
    try:
        state = from_json(value, torch.device("cpu"))
        return bool(_comparable(to_json(state)) == _comparable(value))
    except (LockstepError, ArithmeticError, RuntimeError, TypeError, ValueError):
        return False


def _comparable(value: Any) -> Any:
    """The value without devices of tensors, and with NaNs that are equal."""
    if isinstance(value, dict):
        is_place = isinstance(value.get("device"), str) and "dtype" in value
        return {k: _comparable(v) for k, v in value.items() if not (is_place and k == "device")}
    if isinstance(value, list):
        return [_comparable(v) for v in value]
    return "nan" if value != value else value
