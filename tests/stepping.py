"""Steps without the loop, which does one again where that is asked for; a task that counts them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import lockstep as ls
from lockstep.engine.assembly import Parts
from lockstep.engine.audit import pass_state
from lockstep.engine.audit.repetition import StepRepeated
from lockstep.engine.step.sums import StepResult
from lockstep.parallel.layout import Assigned


class CountsSteps(ls.Task):
    """A task that knows how many steps have been done, which is allowed."""

    step = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def advance(
    parts: Parts, first: int, last: int, own: Assigned | None = None, decays: int = 0
) -> list[StepResult]:
    """Do steps first <= step < last; what they have come to.

    Args:
        parts: parts of the run.
        first: number of the first step.
        last: number after the last step.
        own: microbatches of this rank, if its workspace does not say.
        decays: number of decays of the learning rate so far.
    """
    own = parts.train_step.workspace.microbatches if own is None else own
    batches, results = parts.loader.stream(own, first, last), list[StepResult]()
    while len(results) < last - first:
        step = first + len(results)
        try:
            results.append(parts.train_step.run(step, decays, batches))
        except StepRepeated:
            parts.train_step.repair()
            batches = parts.loader.stream(own, step, last)
    return results


def repeat_no_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step be done again that is only if there is time: how many are depends on the machine.

    Steps 8, 64, … and suspicious ones still are.
    """
    monkeypatch.setattr(pass_state, "_LEAST_SECONDS", 1e-12)
    monkeypatch.setattr(pass_state, "_MOST_TIME", 1e-12)
