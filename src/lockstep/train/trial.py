"""A microbatch computed twice before training, to find what would differ between ranks.

A run is a pure function of config, data and seed only if a microbatch is: the same samples, random
state, parameters and buffers must give the same gradient, whatever this process has computed
before. So the first microbatch is fetched, passed forward and backward twice, and everything that
can be seen is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.train.buffers import batch_norm_buffers, changed_by, same_bits
from lockstep.train.flat import tensor_digest
from lockstep.train.replicas import batch_digest
from lockstep.train.task import Loss

_MOST_NAMED = 3


@dataclass(frozen=True)
class Trial:
    """What computing a microbatch twice has shown.

    Attributes:
        changed: names of the buffers that a forward pass changes.
        data_digest: SHA-256 of the microbatch.
        digest: SHA-256 of its loss, metrics and gradients.
    """

    changed: list[str]
    data_digest: str
    digest: str


class _Outcome(NamedTuple):
    """One pass: everything that must be the same the second time."""

    batch: str
    values: dict[str, Any]
    gradients: list[Tensor | None]
    changed: list[str]


class Passes:
    """Computes the first microbatch, and compares what comes out."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, Tensor]],
        fetch: Callable[[], Any],
        forward: Callable[[Any], Loss],
    ) -> None:
        """Bind.

        Args:
            model: in training mode.
            named: its trainable parameters.
            fetch: gives the first microbatch.
            forward: gives its loss, with the random state of step 0, microbatch 0.
        """
        self._model = model
        self._named = named
        self._fetch = fetch
        self._forward = forward

    def run_twice(self, held_state: Callable[[], dict[str, str]], scratch: Sequence[str]) -> Trial:
        """Fetch, forward and backward, twice.

        Args:
            held_state: what task, dataset and model hold now, by path.
            scratch: paths of held state that no result depends on.

        Raises:
            TaskError: something is not the same the second time, or a parameter has changed.
        """
        first = self._run()
        held = held_state()
        second = self._run()
        _check_held(held, held_state(), scratch)
        self._check_equal(first, second)
        # A layer of batch norm that is used in later steps only would not be noticed then.
        changed = {*first.changed, *second.changed, *batch_norm_buffers(self._model)}
        return Trial(sorted(changed), first.batch, self._digest(first))

    def _run(self) -> _Outcome:
        passed: list[tuple[Any, Loss]] = []
        changed = changed_by(self._model, lambda: passed.append(self._pass()))
        (batch, loss), gradients = passed[0], [tensor.grad for _, tensor in self._named]
        for parameter in self._model.parameters():
            parameter.grad = None
        values = {"loss": (loss.sum.detach(), loss.weight), **loss.metrics}
        return _Outcome(batch_digest(batch), values, gradients, changed)

    def _pass(self) -> tuple[Any, Loss]:
        batch = self._fetch()
        loss = self._forward(batch)
        loss.sum.backward()  # type: ignore[no-untyped-call]
        return batch, loss

    def _check_equal(self, first: _Outcome, second: _Outcome) -> None:
        why = (
            "though samples, random state, parameters and buffers were the same; something keeps "
            "state between batches, or draws from a generator of its own (use torch's, numpy's or "
            "Python's global one, or lockstep.generator())"
        )
        if first.batch != second.batch:
            raise TaskError(
                f"dataset('train'): gave another batch when the same was fetched again, {why}"
            )
        for name, value in first.values.items():
            if not all(map(_same, value, second.values[name])):
                raise TaskError(
                    f"Task.loss: gave another {name} when the same batch was computed again, {why}"
                )
        for (name, tensor), one, two in zip(
            self._named, first.gradients, second.gradients, strict=True
        ):
            if not _same(one, two) and tensor.device.type == "cpu":
                raise TaskError(
                    f"parameter {name}: got another gradient when the same batch was computed "
                    f"again, {why}"
                )

    def _digest(self, outcome: _Outcome) -> str:
        sha = hashlib.sha256()
        for name, pair in sorted(outcome.values.items()):
            sha.update(f"{name} {[float(v) for v in pair]}\n".encode())
        for (name, _), gradient in zip(self._named, outcome.gradients, strict=True):
            sha.update(name.encode() if gradient is None else tensor_digest(name, gradient))
        return sha.hexdigest()


def _check_held(
    before: Mapping[str, str], after: Mapping[str, str], scratch: Sequence[str]
) -> None:
    moved = [
        path.removesuffix("!")
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]
    moved = [path for path in dict.fromkeys(moved) if not path.startswith(tuple(scratch))]
    if moved:
        more = f" (and {len(moved) - _MOST_NAMED} more)" if len(moved) > _MOST_NAMED else ""
        raise TaskError(
            f"{', '.join(moved[:_MOST_NAMED])}{more}: is changed by every microbatch, so it "
            "depends on how many this rank computes. Draw random numbers from the global "
            "generators or from lockstep.generator(), which are set for each microbatch; change "
            "state once a step, in Task.after_step(model, step), and save it by Task.state_dict(); "
            f"if no result depends on it, say so: `scratch = ({moved[0]!r},)` in the task's class"
        )


def _same(one: Any, two: Any) -> bool:
    """Whether two tensors or numbers are equal to the bit."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return same_bits(one, two)
    return repr(one) == repr(two)
