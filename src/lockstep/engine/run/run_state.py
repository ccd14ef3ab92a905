"""The state of a run besides its tensors, to which steps and evaluations are committed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.evaluation.batches import Scores, is_validation, judged
from lockstep.engine.events import Evaluated, Improved
from lockstep.engine.hook_calls import Hooks
from lockstep.engine.run.progress import ALL_STEPS, Progress
from lockstep.engine.run.reporter import Reporter
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.sums import StepResult


class RunState:
    """The history of a run as far as this rank knows it.

    Ranks differ by one step at most, since the sums of a step need all of them.

    Attributes:
        progress: position and history, as kept in checkpoints.
        result: result of the newest step that was committed in this session.
        stop_reason: reason for which this session ends before the run; empty while it goes on.
        failed_step: newest step in which the task's code has failed; -1 if there is none.
        test_step: step whose parameters the test split was evaluated with, if it was.
        is_save_overdue: whether the newest checkpoint may have been lost with the rank that was
            writing it.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        parts: Parts,
        hooks: Hooks,
        reporter: Reporter,
        progress: Progress,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._parts = parts
        self._has_validation = any(map(is_validation, parts.evaluations))
        self._hooks = hooks
        self._reporter = reporter
        self.progress = progress
        self.result: StepResult | None = None
        self.stop_reason = ""
        self.failed_step = -1
        self.test_step: int | None = None
        self.is_save_overdue = False

    def commit(self, result: StepResult, with_task: bool = True) -> None:
        """Commit a step: from now on it is not repeated.

        Args:
            result: result of the step.
            with_task: whether the task and its hooks have yet to run their `after_step`.
        """
        self.result = result
        progress = self.progress
        progress.step += 1
        if with_task:
            self._step_schedulers()
            ended = self._hooks.after_step(progress, result)
            progress.finished = progress.finished or ended
        self.stop_reason = self.stop_reason or result.stop_reason
        # In all files, the row of a step comes before its evaluation and its checkpoint.
        self._reporter.add(self.progress, result, self.is_save_due() or self.is_evaluation_due())
        self._runtime.heartbeat.arm()
        self._runtime.transport.call_ring.note_step(progress.step)
        self._runtime.at("committed", self.progress.step)
        self._runtime.on_step(self.progress.step)

    def _step_schedulers(self) -> None:
        parts, step = self._parts, self.progress.step
        rates = parts.train_step.rates
        if rates.schedulers:
            phase = parts.compute.phases.at(step - 1).name
            rates.step_schedulers(phase, parts.sampler.is_epoch_end(step))
        rates.keep_written()

    def restore(self, progress: Progress, stop_reason: str) -> None:
        """Go on from a checkpoint.

        Args:
            progress: position of the run in the checkpoint.
            stop_reason: why the ranks were asked to stop; empty if they were not.
        """
        self.progress, self.result, self.stop_reason = progress, None, stop_reason
        self.failed_step, self.test_step, self.is_save_overdue = -1, None, False

    def commit_evaluation(
        self,
        scores: Mapping[str, Scores],
        seconds: Mapping[str, float],
        model_step: int | None = None,
    ) -> None:
        """Commit an evaluation; one of validation splits may end training.

        Args:
            scores: scores by split, of all validation splits or of none.
            seconds: wall time of each split; 0 for those that are not named.
            model_step: step whose parameters were evaluated, if it is not the last one.
        """
        progress, config, emit = self.progress, self._config, self._runtime.emit
        is_judged = any(map(is_validation, scores))
        if is_judged and not self._is_due(config.eval_every):
            progress.keep_before_last()
        for split, (metrics, arrays) in scores.items():
            progress.metrics |= {f"{split}/{name}": value for name, value in metrics.items()}
            progress.arrays |= {f"{split}/{name}": value for name, value in arrays.items()}
            emit(
                Evaluated(
                    step=progress.step,
                    split=split,
                    metrics=metrics,
                    arrays=arrays,
                    seconds=seconds.get(split, 0.0),
                    model_step=model_step,
                )
            )
            if not is_validation(split):
                self.test_step = progress.step if model_step is None else model_step
            ended = self._hooks.after_evaluation(progress, split, metrics)
            # It would have ended a longer run too, unlike `ALL_STEPS`, so it is the reason to keep.
            if not progress.finished or (progress.finished == ALL_STEPS and ended):
                progress.finished = ended
        if not is_judged:
            return
        # A split without a loss is no better than any other.
        watched = judged({n: {"loss": math.nan} | metrics for n, (metrics, _) in scores.items()})
        if progress.judge(config, watched):
            value = watched[config.watch]
            emit(Improved(step=progress.step, metric=config.watch, value=value))
        self._parts.train_step.rates.after_evaluation(watched, config.watch)
        progress.finished = progress.finished or progress.exhausted(config)

    def is_over(self) -> bool:
        """Whether the run or this session ends here; notes why in `progress` or `stop_reason`."""
        progress, stop = self.progress, self._config.stop_at_step
        if progress.step >= self._parts.total_steps and not progress.finished:
            progress.finished = ALL_STEPS
        if not progress.finished and stop is not None and progress.step >= stop:
            self.stop_reason = self.stop_reason or f"stop_at_step={stop}"
        return bool(progress.finished or self.stop_reason)

    def is_save_due(self) -> bool:
        """Whether a checkpoint is to be written after this step."""
        due = self.progress.step > 0 and self._is_due(self._config.checkpoint.every)
        return due or self.is_over() or self.is_save_overdue

    def is_evaluation_due(self) -> bool:
        """Whether the validation splits are to be evaluated after this step."""
        step = self.progress.step
        if step == 0 or not self._has_validation:
            return False
        # Independent of where a session ends, or an interrupted run would be judged differently.
        return step == self._parts.total_steps or self._is_due(self._config.eval_every)

    def is_digest_due(self) -> bool:
        """Whether the replicas are to be compared after this step."""
        every = self._config.digest_every
        return every > 0 and self.progress.step > 0 and self.progress.step % every == 0

    def state_dict(self) -> dict[str, Any]:
        """What a joining rank needs beside the content of a checkpoint, as JSON."""
        return {
            "stop_reason": self.stop_reason,
            "failed_step": self.failed_step,
            "reporter": self._reporter.state_dict(),
            "pass_starts": list(self._parts.loader.pass_starts),
            "places": self._parts.loader.places(self.progress.step, all_known=True),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Go on from what `state_dict` said on another rank."""
        self.stop_reason, self.failed_step = values["stop_reason"], values["failed_step"]
        self._reporter.load_state_dict(values["reporter"])
        self._parts.loader.know_passes(values["pass_starts"])
        self._parts.loader.add_places(values["places"])

    def _is_due(self, every: int) -> bool:
        return self._parts.sampler.is_due(self.progress.step, every)
