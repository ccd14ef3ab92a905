"""What scripts, notebooks and the command call to train a task in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lockstep.config import TrainConfig, WeightsConfig
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError
from lockstep.front.rank import run
from lockstep.front.result import Result
from lockstep.front.sitting import Sitting
from lockstep.launchers.rank.output import tell
from lockstep.parsing import shown

_training = threading.RLock()
"""Held while a thread trains."""


def train(
    task: Task,
    config: TrainConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    from_run: str | Path | None = None,
    from_only: Sequence[str] = (),
) -> Result:
    """Train a task in this process: the only one, or a rank that any launcher has started.

    Ctrl-C, SIGTERM and a preemption stop the run after the step that is under way, with a
    checkpoint. The number of threads, the random generators and the signal handlers of the caller
    are left as they were.

    Args:
        task: the task.
        config: how it is to be trained; the task's own config by default.
        run_dir: where files go; a new folder below `runs/` by default. Under `lockstep train` the
            command says where.
        resume: whether to go on from the newest valid checkpoint in `run_dir`.
        quiet: whether to show warnings and how the run ended only, rather than progress.
        from_run: a run directory, or `RUN/CHECKPOINT`, whose weights the run starts from; short for
            `config.weights_from`.
        from_only: glob patterns of the names of the tensors that are taken from there.

    Returns:
        How the run ended, with the trained model, on every rank.

    Raises:
        Stopped: the run was asked to stop before its end; it can be resumed.
        LockstepError: the task, the config or the data do not work, a rank was lost that the
            others cannot go on without, or another thread of this process trains.
    """
    own = Sitting(str(run_dir) if run_dir else None, resume, quiet=quiet)
    config = _starting(config or task.config, from_run, from_only)
    if not _training.acquire(blocking=False):
        raise ConfigError(
            "train: another thread of this process trains already, and random generators and "
            "threads are of the whole process; train one after the other, or use lockstep.launch"
        )
    try:
        return run(task, config, Sitting.from_env() or own)
    finally:
        _training.release()


def main(
    task: Task,
    config: TrainConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    from_run: str | Path | None = None,
    from_only: Sequence[str] = (),
) -> Result:
    """Train a task as the last thing that a script does: as `train`, with messages for a user.

    An error that the user can mend is one message, and the process ends with exit code 2. A run
    that was asked to stop ends it with 130 (Ctrl-C), 143 (SIGTERM, preemption) or 75 (too few
    ranks are left).

    Args:
        task: as for `train`.
        config: as for `train`.
        run_dir: as for `train`.
        resume: as for `train`.
        from_run: as for `train`.
        from_only: as for `train`.

    Returns:
        How the run ended, where it has come to its end or to `stop_at_step`.
    """
    try:
        return train(
            task, config, run_dir=run_dir, resume=resume, from_run=from_run, from_only=from_only
        )
    except LockstepError as error:
        leave(error)


def _starting(config: TrainConfig, from_run: str | Path | None, only: Sequence[str]) -> TrainConfig:
    """A config with the run whose weights are to be taken over.

    Raises:
        ConfigError: it names one already, or only the names of tensors are given, or these are no
            list.
    """
    if isinstance(only, str):
        raise ConfigError(f"from_only={shown(only)}: must be a list of patterns: [{shown(only)}]")
    if from_run is None:
        if only:
            raise ConfigError("from_only: names tensors of from_run; give that too")
        return config
    if config.weights_from.path:
        raise ConfigError(
            f"from_run={str(from_run)!r}: config.weights_from.path="
            f"{config.weights_from.path!r} names a run too; leave one of them out"
        )
    start = WeightsConfig(path=str(from_run), only=tuple(only))
    return config.model_copy(update={"weights_from": start})


def leave(error: LockstepError) -> NoReturn:
    """End the process for an error, with a message of the rank that tells it."""
    tell(error)
    raise SystemExit(error.exit_code) from None
