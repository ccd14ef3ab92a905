"""`steps`: a run as a loop of the caller's own."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from lockstep.config import TrainConfig
from lockstep.engine.run.own_loop import Step
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError
from lockstep.launching.api import rank
from lockstep.launching.api.session import Result, Session
from lockstep.launching.api.training import alone_in_process, looping, session_of, starting
from lockstep.launching.rank.process import tell


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
        with alone_in_process("steps"):
            looping.acquire()
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
            looping.release()


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

    Returns:
        What to loop over, once. Its `result` is there when the loop is over.

    Raises:
        LockstepError: `resume` comes without `run_dir`, or `from_run` cannot be used. The loop
            itself raises what `train` does.
    """
    session = session_of(run_dir, resume, quiet)
    return Steps(task, starting(config or task.config, from_run, from_only), session)
