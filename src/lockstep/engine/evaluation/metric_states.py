"""The states of torchmetrics, and how those of several batches are combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets
from lockstep.errors import ConfigError, TaskError, shared


@dataclass(frozen=True, eq=False)
class State:
    """One state of one metric.

    Attributes:
        metric: name of the metric.
        name: name of the state, as `add_state` was given it.
        kind: how batches are combined: `sum`, `mean`, `max`, `min` or `cat`.
        default: value before any update; None for `cat`.
    """

    metric: str
    name: str
    kind: str
    default: Tensor | None

    @property
    def is_summed(self) -> bool:
        """Whether it is added up along the canonical tree."""
        if self.kind == "mean":
            return True
        return self.kind == "sum" and self.default is not None and self.default.is_floating_point()


Leaf = dict[State, Tensor | None]
"""The states of one batch, in host memory; None for a list that nothing was added to."""


def reductions() -> dict[Any, str]:
    """What torchmetrics calls the ways in which states are combined.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from torchmetrics.utilities import data
    except ImportError as error:
        raise ConfigError(
            f"Task.metrics: torchmetrics cannot be imported ({error}); "
            'pip install "lockstep-train[metrics]"'
        ) from error
    return {
        getattr(data, f"dim_zero_{kind}"): kind for kind in ("sum", "mean", "max", "min", "cat")
    }


def states_of(name: str, metric: Any, reductions: Mapping[Any, str]) -> list[State]:
    """The states of a metric, which is prepared to be computed without torch.distributed.

    Args:
        name: what the task calls it.
        metric: what the task gives.
        reductions: from `reductions`.

    Raises:
        TaskError: it is no metric, or has states that cannot be combined.
    """
    from torchmetrics import Metric

    where = f"Task.metrics: {name!r}"
    if not isinstance(metric, Metric):
        raise TaskError(f"{where}: must be a torchmetrics.Metric, is a {type(metric).__name__}")
    kind = type(metric).__name__
    inner = next((n for n, m in metric.named_modules() if n and isinstance(m, Metric)), None)
    if inner is not None or not metric._defaults:
        raise TaskError(
            f"{where}: a {kind} has {'no states' if inner is None else f'a metric in {inner}'}; "
            "give the metrics that it is made of"
        )
    states = []
    for state, default in metric._defaults.items():
        reduction = reductions.get(metric._reductions[state])
        is_list = isinstance(default, list)
        if reduction is None or (is_list and reduction != "cat"):
            raise TaskError(
                f"{where}: state {state!r} of a {kind} has "
                f"dist_reduce_fx={metric._reductions[state]!r}; states can be combined over "
                "batches by sum, mean, max, min and cat only"
            )
        if is_list or reduction == "cat":
            states.append(State(name, state, "cat", None))
            continue
        assert isinstance(default, Tensor)
        if reduction == "sum" and bool(default.any()):
            raise TaskError(
                f"{where}: state {state!r} of a {kind} begins at {default.tolist()}, which would "
                "be added once for each batch; it must begin at 0"
            )
        states.append(State(name, state, reduction, default.cpu()))
    metric.sync_on_compute = False
    metric._to_sync = False
    metric.reset()
    return states


def value_of(state: State, value: Any) -> Tensor | None:
    """A state's value in host memory; None for an empty list."""
    if state.kind == "cat":
        parts = value if isinstance(value, list) else [value]
        parts = [p.detach().reshape(1) if p.dim() == 0 else p.detach() for p in parts]
        return torch.cat(parts).cpu() if parts else None
    copied: Tensor = value.detach().cpu().clone()
    return copied


def there(value: Tensor | None) -> Tensor:
    """A value of a state that always has one."""
    assert value is not None
    return value


def reduced(transport: Transport, state: State, values: Sequence[Tensor | None]) -> Tensor:
    """The sum of integers, maximum or minimum over all batches: exact in any order; a collective.

    Args:
        transport: the group of ranks.
        state: of kind `sum`, `max` or `min`.
        values: of this rank's batches.
    """
    default = there(state.default)
    wide = torch.float64 if default.is_floating_point() else torch.int64
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
    }  # fmt: skip
    combine = functions[state.kind]
    own = default.to(wide)
    for value in values:
        own = combine(own, there(value).to(wide))
    everyone = transport.gather_host(own.reshape(-1), [own.numel()] * transport.size)
    parts = everyone.view(transport.size, *default.shape).unbind()
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total + 0 if wide is torch.float64 else total  # -0.0 and 0.0 are compared as equal


def joined(
    transport: Transport, values: Sequence[Tensor | None], numbers: Sequence[Sequence[int]]
) -> Tensor | None:
    """The values of all batches behind one another, in the order of batches; a collective.

    Args:
        transport: the group of ranks.
        values: of this rank's batches.
        numbers: for each rank, the numbers of its batches.

    Raises:
        TaskError: they do not fit together; on all ranks.
    """
    there = [value for value in values if value is not None]
    form = [str(there[0].dtype).removeprefix("torch."), list(there[0].shape[1:])] if there else []
    own = [form, [-1 if value is None else len(value) for value in values]]
    ranks = transport.gather_json(own)
    known = next((theirs for theirs, _ in ranks if theirs), None)
    if known is None:
        return None
    dtype, shape = getattr(torch, known[0]), known[1]
    odd = next((v for v in there if v.dtype != dtype or list(v.shape[1:]) != shape), None)
    flags = transport.gather_json(None if odd is None else f"{odd.dtype} {tuple(odd.shape)}")
    if any(flags):
        raise shared(
            TaskError(
                "Task.evaluate: a metric's list has tensors of several kinds: "
                f"{next(filter(None, flags))} beside {dtype} with {shape} in each row"
            )
        )
    data = [v.contiguous().reshape(-1).view(torch.uint8) for v in there if v.numel()]
    bytes_of_row = torch.empty(shape, dtype=dtype).nbytes
    sizes = [[max(0, length) * bytes_of_row for length in lengths] for _, lengths in ranks]
    sent = torch.cat(data) if data else torch.empty(0, dtype=torch.uint8)
    everyone = transport.gather_host(sent, [sum(of_rank) for of_rank in sizes])
    flat = [size for of_rank in sizes for size in of_rank]
    order = [number for of_rank in numbers for number in of_rank]
    parts = [everyone[first : first + n] for first, n in zip(offsets(flat), flat, strict=True)]
    ordered = [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]
    return torch.cat(ordered).view(dtype).reshape(-1, *shape)
