"""Evaluating a split again whose batches have read or changed state that they should not have."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.comm.transport import Transport
from lockstep.engine.audit.pass_state import PassState, Repetition, depends_on, is_looked_at
from lockstep.engine.evaluation.splits import Scores
from lockstep.engine.runtime import everywhere


class EvaluationAudit:
    """Compares an evaluation with itself, if what its batches have left behind is suspicious.

    An evaluation decides when a run ends and which checkpoint is best. What a batch leaves behind
    depends on which of them this rank has evaluated.
    """

    def __init__(self, transport: Transport, state: PassState) -> None:
        self._transport = transport
        self._state = state
        self._counts: dict[str, int] = {}

    def run(self, split: str, evaluate: Callable[[], Scores]) -> Scores:
        """Evaluate a split; a collective.

        Args:
            split: name of the split.
            evaluate: computes its scores, on all ranks.

        Raises:
            TaskError: it came out otherwise when it was done again; on all ranks.
        """
        count = self._counts[split] = self._counts.get(split, 0) + 1
        batches = Repetition(self._state)
        scores = self._once(batches, evaluate, is_looked_at(count))
        suspects = batches.suspects_of_all(self._transport)
        if not suspects:
            return scores
        batches.is_second = True
        again = self._once(batches, evaluate)

        def check() -> None:
            if repr(again) != repr(scores):
                raise depends_on(f"the evaluation of {split}", suspects)
            batches.check_unchanged()
            batches.trust()

        everywhere(self._transport, check)
        return scores

    def _once(
        self, batches: Repetition, evaluate: Callable[[], Scores], is_looked: bool = False
    ) -> Scores:
        batches.begin(is_looked)
        try:
            return evaluate()
        finally:
            batches.end()
