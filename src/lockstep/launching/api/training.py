"""`train`, `main` and `steps`: for scripts, notebooks and the command."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config import TrainConfig, WeightsConfig, with_keys
from lockstep.config.parsing import shown
from lockstep.engine.run.own_loop import Step
from lockstep.engine.task import Task, check_config
from lockstep.errors import ConfigError, LockstepError, TaskError
from lockstep.launching.api import rank
from lockstep.launching.api.session import Result, Session, check_names_run
from lockstep.launching.rank.process import tell

_training = threading.RLock()
"""Held while a thread trains."""
_looping = threading.Lock()
"""Held while a loop over `lockstep.steps` is under way."""


def train(
    task: Task,
    config: TrainConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    from_run: str | Path | None = None,
    from_only: Sequence[str] = (),
    **keys: Any,
) -> Result:
    """Train a task in this process: the only one, or a rank that any launcher has started.

    Ctrl-C, SIGTERM and a preemption stop the run after the step that is under way, with a
    checkpoint. The number of threads, the random generators and the signal handlers of the caller
    are left as they were.

    Args:
        task: the task.
        config: how it is to be trained; the task's own config by default.
        run_dir: where files go; a new folder below `runs/` by default, or a URL such as
            `s3://bucket/run`. Under `lockstep train` the command says where.
        resume: whether to go on from the newest valid checkpoint in `run_dir`.
        quiet: whether to show warnings and how the run ended only, rather than progress.
        from_run: a run directory, or `RUN/CHECKPOINT`, whose weights the run starts from; short for
            `config.weights_from`.
        from_only: glob patterns of the names of the tensors that are taken from there.
        keys: values for keys of the config, such as `batch_size=64, epochs=5`.

    Returns:
        How the run ended, with the trained model, on every rank.

    Raises:
        Stopped: the run was asked to stop before its end; it can be resumed.
        LockstepError: the task, the config or the data do not work, a rank was lost that the
            others cannot go on without, or another thread of this process trains.
    """
    session = _session_of(run_dir, resume, quiet)
    config = _starting(config_of(task, config, keys, "train"), from_run, from_only)
    with _alone_in_process("train"):
        return rank.run(task, config, session)


@contextmanager
def _alone_in_process(who: str) -> Iterator[None]:
    """The context of a training: no other thread of this process, and no loop, trains.

    Args:
        who: name of the function that trains.

    Raises:
        ConfigError: one does.
    """
    if not _training.acquire(blocking=False):
        raise ConfigError(
            f"{who}: another thread of this process trains already, and random generators and "
            "threads are of the whole process; train one after the other, or use lockstep.launch"
        )
    try:
        if _looping.locked():
            raise ConfigError(
                f"{who}: a loop over lockstep.steps is under way in this process, and random "
                "generators and threads are of the whole process; leave that loop first (a "
                "variable that holds its iterator keeps it open: close() it)"
            )
        yield
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
    **keys: Any,
) -> Result:
    """Train a task as the last thing that a script does: as `train`, with messages for a user.

    An error that the user can fix is one message, and the process ends with exit code 2. A run
    that was asked to stop ends it with 130 (Ctrl-C), 143 (SIGTERM, preemption) or 75 (too few
    ranks are left).

    Args:
        task: as for `train`.
        config: as for `train`.
        run_dir: as for `train`.
        resume: as for `train`.
        from_run: as for `train`.
        from_only: as for `train`.
        keys: as for `train`.

    Returns:
        How the run ended, where it has come to its end or to `stop_at_step`.
    """
    try:
        config = config_of(task, config, keys, "main")
        return train(
            task, config, run_dir=run_dir, resume=resume, from_run=from_run, from_only=from_only
        )
    except LockstepError as error:
        leave(error)


def _session_of(run_dir: str | Path | None, resume: bool, quiet: bool) -> Session:
    """The request of the launcher that has started this process, or else of the caller.

    Raises:
        ConfigError: a run is to be resumed, and none is named.
    """
    given = Session.from_env()
    if given is not None:
        return given
    check_names_run(run_dir, resume)
    return Session(str(run_dir) if run_dir else None, resume, quiet=quiet)


def config_of(
    task: Task, config: TrainConfig | None, keys: Mapping[str, Any], who: str
) -> TrainConfig:
    """The config that a call asks for.

    Args:
        task: the task, whose own config is the default.
        config: as for `train`.
        keys: as for `train`.
        who: name of the function that was called.

    Raises:
        TaskError: `task` is none, or the config is not of its class.
        ConfigError: a key is unknown or a value does not fit.
    """
    given: object = task
    if not isinstance(given, Task):
        hint = f"; call {given.__name__}()" if isinstance(given, type) else ""
        raise TaskError(f"{who}: needs a Task, got {shown(given)}{hint}")
    config = task.config if config is None else config
    check_config(type(task), config)
    return with_keys(config, keys, who)


def _starting(config: TrainConfig, from_run: str | Path | None, only: Sequence[str]) -> TrainConfig:
    """A config with the run whose weights the new one starts from.

    Raises:
        ConfigError: it names a run already, or `only` comes without a run or is no list.
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
    """End the process for an error, with its message if this rank is to print it."""
    tell(error)
    raise SystemExit(error.exit_code) from None


class Steps:
    """A run that a `for` loop trains, once.

    Attributes:
        result: how the session has ended, as `lockstep.train` returns it.
    """

    def __init__(self, task: Task, config: TrainConfig, session: Session) -> None:
        """Nothing is trained yet."""
        self._task, self._config, self._session = task, config, session
        self._is_started = False
        self._result: Result | None = None
        self._error: LockstepError | None = None

    @property
    def result(self) -> Result:
        """How the session has ended.

        Raises:
            LockstepError: what has ended it otherwise; also where it came up while the loop was
                left, when Python lets nothing be raised.
            ConfigError: the loop is not over.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ConfigError("steps.result: is there once the loop is over or left, not before")
        return self._result

    def __iter__(self) -> Iterator[Step]:
        """Start the session; the loop alone holds it, so that to leave the loop is to end it.

        Raises:
            ConfigError: it was started before.
        """
        if self._is_started:
            raise ConfigError(
                "steps: has been looped over already; go on with lockstep.steps(..., resume=True)"
            )
        self._is_started = True
        loop = self._steps()
        weakref.finalize(loop, _leave, weakref.ref(loop))  # where a variable holds it to the end
        return loop

    def _steps(self) -> Generator[Step, None, None]:
        with _alone_in_process("steps"):
            _looping.acquire()
        session = rank.steps(self._task, self._config, self._session)
        is_left = False
        try:
            step = next(session)
            while True:
                try:
                    yield step
                except GeneratorExit:
                    is_left = True
                step = session.send(is_left)
        except StopIteration as end:
            self._result = end.value
        except LockstepError as error:
            self._error = error
            if not is_left:
                raise
            tell(error)
        finally:
            _looping.release()


def _leave(loop: weakref.ref[Generator[Step, None, None]]) -> None:
    """Leave a loop that is still under way when the interpreter ends."""
    if (left := loop()) is not None:
        left.close()


def steps(
    task: Task,
    config: TrainConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    from_run: str | Path | None = None,
    from_only: Sequence[str] = (),
    **keys: Any,
) -> Steps:
    """Train a task as `train` does, in a loop of one's own that gets each step when it is done.

        for step in ls.steps(task, config, run_dir="runs/mine"):
            print(step.number, step.metrics["loss"])
            if step.evaluated.get("val/accuracy", 0.0) > 0.95:
                step.stop("accurate enough")

    The run is the same to the bit, with the same files, and lost ranks are replaced inside the
    loop. Each rank runs the loop, and its body should do the same on each. A body may read the
    model, and change nothing that the run has. Leaving the loop, by `break`, `return` or an
    exception, stops the run on all ranks with a checkpoint, from which it can go on.

    Args:
        task: as for `train`.
        config: as for `train`.
        run_dir: as for `train`.
        resume: as for `train`; of a run that is complete there are no steps.
        quiet: as for `train`.
        from_run: as for `train`.
        from_only: as for `train`.
        keys: as for `train`.

    Returns:
        What to loop over, once. Its `result` is there when the loop is over.

    Raises:
        LockstepError: `resume` comes without `run_dir`, or `from_run` cannot be used. The loop
            itself raises what `train` does.
    """
    session = _session_of(run_dir, resume, quiet)
    config = config_of(task, config, keys, "steps")
    return Steps(task, _starting(config, from_run, from_only), session)
