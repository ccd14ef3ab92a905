"""A run that goes on for more, or fewer, steps than it was begun for.

It may where it then is, to the bit, the run that was begun for that many: nothing that was done
so far may depend on where the run was to end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.hooks.hook import Hook
from lockstep.engine.optimizer.schedule import lr_factor
from lockstep.engine.run.progress import ALL_STEPS, Progress
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parsing import as_type

_WAY_OUT = (
    "start a new run with that length, or one that goes on from these weights: "
    "`lockstep train TASK --from RUN_DIR`"
)


def stretch(snapshot: Snapshot, config: TrainConfig, parts: Parts, folder: Path) -> str:
    """Make a checkpoint of a run one of the run with this config, where that has another length.

    Args:
        snapshot: a checkpoint that makes sense by itself; its progress is changed.
        config: config of the longer run, in which no other key has another value.
        parts: parts of the longer run.
        folder: path of the checkpoint's folder.

    Returns:
        What was taken back, for people; empty if nothing was.

    Raises:
        ConfigError: the run may not have another length, and why.
        CheckpointError: the manifest does not say what length the run had.
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
    _check_asked(snapshot.meta.get("asked"), key)
    _check_learning_rates(parts, config, key, before, progress.step)
    said = _take_back(progress, parts, folder, key)
    if progress.finished == ALL_STEPS:
        is_judged = progress.evaluated == progress.step
        progress.finished = progress.exhausted(config) if is_judged else ""
    snapshot.meta["progress"] = progress.state_dict()
    return said


def _total_steps(config: Any, steps_per_epoch: int | None, folder: Path) -> int:
    """The number of steps of the run that a manifest's config says."""
    there = config if isinstance(config, dict) else {}
    try:
        epochs = as_type(int, there.get("epochs"))
        steps: int | None = as_type(int | None, there.get("steps"))  # type: ignore[arg-type]
    except ValueError as error:
        raise CheckpointError(f"{folder}: is damaged: config: epochs or steps: {error}") from None
    return steps or epochs * (steps_per_epoch or 0)


def _check_asked(asked: Any, key: str) -> None:
    """Refuse a run whose code has asked where it ends, or of which that is not known."""
    if not isinstance(asked, list):
        raise ConfigError(
            f"{key}: the run was begun by a version that did not note whether the task's code asks "
            f"for its length; {_WAY_OUT}"
        )
    if asked:
        raise ConfigError(
            f"{key}: the task's code may have used the run's length so far: it has read "
            f"{', '.join(map(str, asked))}; {_WAY_OUT}"
        )


def _check_learning_rates(
    parts: Parts, config: TrainConfig, key: str, before: int, num_steps: int
) -> None:
    """Refuse a run whose steps so far would have had other learning rates."""
    schedule, tables = parts.train_step.schedule, parts.train_step.tables
    own = [dealt.table.schedule for dealt in tables.each] if tables is not None else []
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


def _take_back(progress: Progress, parts: Parts, folder: Path, key: str) -> str:
    """Forget the evaluation that was made only because the run was to end there."""
    kept = progress.before_last
    if kept is None:
        return ""
    for hook in parts.task_state.hooks:
        if type(hook).after_evaluation is not Hook.after_evaluation and not hook.first_only:
            raise ConfigError(
                f"{key}: {type(hook).__name__}.after_evaluation has seen the evaluation after step "
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
