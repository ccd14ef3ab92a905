"""Metrics that are not ratios: the states of torchmetrics, combined in a fixed order.

Each batch updates a fresh state. States are combined over batches, not over ranks: floats are
added along the canonical tree with the loss, integers exactly, and lists are joined in the order
of batches. So every rank computes the metric from the same bits, however many ranks there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, TaskError, shared

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True, eq=False)
class State:
    """One state of one metric.

    Attributes:
        metric: name of the metric.
        name: name of the state, from `add_state`.
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
"""The states of one batch, in host memory; None for an empty list."""


def reductions() -> dict[Any, str]:
    """The functions of torchmetrics that combine states, each with its kind.

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
    """The states of a metric, which is set up to be computed without torch.distributed.

    Args:
        name: its name in the task.
        metric: value from the task.
        reductions: from `reductions`.

    Raises:
        TaskError: it is not a metric, or has states that cannot be combined.
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


def present(value: Tensor | None) -> Tensor:
    """The value of a state that is not an empty list."""
    assert value is not None
    return value


def reduced(transport: Transport, state: State, values: Sequence[Tensor | None]) -> Tensor:
    """The sum of integers, maximum or minimum over all batches: exact in any order; a collective.

    Args:
        transport: the group of ranks.
        state: of kind `sum`, `max` or `min`.
        values: of this rank's batches.
    """
    default = present(state.default)
    wide = torch.float64 if default.is_floating_point() else torch.int64
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
    }  # fmt: skip
    combine = functions[state.kind]
    own = default.to(wide)
    for value in values:
        own = combine(own, present(value).to(wide))
    everyone = transport.gather_host(own.reshape(-1), [own.numel()] * transport.size)
    parts = everyone.view(transport.size, *default.shape).unbind()
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total + 0 if wide is torch.float64 else total  # -0.0 and 0.0 are compared as equal


def joined(
    transport: Transport, values: Sequence[Tensor | None], numbers: Sequence[Sequence[int]]
) -> Tensor | None:
    """The values of all batches, concatenated in the order of batches; a collective.

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


class StatefulMetrics:
    """The metrics of `Task.metrics`.

    Attributes:
        states: all states of all metrics.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        """Get the metrics of a task.

        Raises:
            TaskError: one is not a metric, or has states that cannot be combined.
            ConfigError: torchmetrics is not installed.
        """
        given: object = task.metrics()
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise TaskError(
                "Task.metrics: must return a dict of names and torchmetrics.Metric, returned a "
                f"{type(given).__name__}"
            )
        self._metrics: dict[str, Metric] = {}
        self.states: list[State] = []
        self._device = device
        known = reductions() if given else {}
        for name, metric in sorted(given.items()):
            self.states += states_of(name, metric, known)
            self._metrics[name] = metric.to(device)

    @property
    def names(self) -> list[str]:
        """The names of the metrics."""
        return list(self._metrics)

    @property
    def num_summed(self) -> int:
        """Number of values that `summed` returns."""
        return sum(present(s.default).numel() for s in self.states if s.is_summed)

    def leaf(self, updates: Mapping[str, Any]) -> Leaf:
        """The states after one batch.

        Args:
            updates: arguments of `update` by the names of all metrics: a tuple, a dict by the names
                of parameters, or one tensor.

        Raises:
            TaskError: a metric is missing or unknown, or its update fails.
        """
        if not isinstance(updates, Mapping) or updates.keys() != self._metrics.keys():
            named = sorted(map(str, updates)) if isinstance(updates, Mapping) else updates
            raise TaskError(
                f"Task.evaluate: Loss.updates must be a dict with the names in Task.metrics, "
                f"{sorted(self._metrics)}; is {named}"
            )
        for name, metric in self._metrics.items():
            _update(name, metric, updates[name])
        leaf = {s: value_of(s, getattr(self._metrics[s.metric], s.name)) for s in self.states}
        for metric in self._metrics.values():
            metric.reset()
        return leaf

    def summed(self, leaf: Leaf) -> list[float]:
        """The values of a leaf that are added up along the tree."""
        return [
            value
            for state in self.states
            if state.is_summed
            for value in present(leaf[state]).double().reshape(-1).tolist()
        ]

    def compute(
        self,
        transport: Transport,
        leaves: Sequence[Leaf],
        totals: Sequence[float],
        numbers: Sequence[Sequence[int]],
    ) -> Callable[[], dict[str, Any]]:
        """Combine the states of all batches of all ranks; a collective.

        Args:
            transport: the group of ranks.
            leaves: of this rank's batches.
            totals: the sums of `summed` over all batches.
            numbers: for each rank, the numbers of its batches.

        Returns:
            A function that computes the metrics by name: tensors, or what else a metric returns.
        """
        values: dict[State, Tensor | None] = {}
        count, rest = sum(map(len, numbers)), list(totals)
        for state in self.states:
            if state.is_summed:
                default = present(state.default)
                own, rest = rest[: default.numel()], rest[default.numel() :]
                total = torch.tensor(own, dtype=torch.float64).reshape(default.shape)
                values[state] = total / count if state.kind == "mean" else total
            elif state.kind == "cat":
                values[state] = joined(transport, [leaf[state] for leaf in leaves], numbers)
            else:
                values[state] = reduced(transport, state, [leaf[state] for leaf in leaves])
        return lambda: {name: self._result(name, values, count) for name in self._metrics}

    def _result(self, name: str, values: Mapping[State, Tensor | None], count: int) -> Any:
        metric = self._metrics[name].clone().to("cpu")
        metric.reset()
        for state, value in values.items():
            if state.metric == name:
                if state.default is None:
                    setattr(metric, state.name, [] if value is None else [value])
                else:
                    setattr(metric, state.name, present(value).to(state.default))
        metric._update_count = count
        try:
            return metric.compute()
        except Exception as error:
            raise TaskError(f"Task.metrics: {name!r}: compute failed: {error}") from error
        finally:
            metric.reset()


def plain(results: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Results of metrics that are one number, and the others as nested lists.

    A metric without a name gives several results by name.
    """
    scalars: dict[str, float] = {}
    arrays: dict[str, Any] = {}
    several = results.get("")
    inner = several if isinstance(several, Mapping) else {}
    named = {name: result for name, result in results.items() if name}
    for name, result in (*named.items(), *inner.items()):
        value = _listed(result)
        if isinstance(value, (int, float)):
            scalars[name] = float(value)
        else:
            arrays[name] = value
    return scalars, arrays


def tried(compute: Callable[[], dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Results of one batch; 0 for all if it is too small for some metric."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compute()
        except TaskError:
            return dict.fromkeys(names, 0.0)


def _update(name: str, metric: Metric, arguments: Any) -> None:
    before = _attributes(metric)
    try:
        if isinstance(arguments, Mapping):
            metric.update(**arguments)
        elif isinstance(arguments, (tuple, list)):
            metric.update(*arguments)
        else:
            metric.update(arguments)
    except Exception as error:
        raise TaskError(f"Task.evaluate: update of metric {name!r} failed: {error}") from error
    after = _attributes(metric)
    changed = [key for key in after if before.get(key) != after[key]]
    if changed:
        raise TaskError(
            f"Task.metrics: {name!r}: update changes {type(metric).__name__}.{changed[0]}, which "
            "is no state of it; what batches leave there depends on the number of ranks"
        )


def _attributes(metric: Metric) -> dict[str, str]:
    """Plain attributes of a metric beside its states."""
    kinds = (bool, int, float, str, type(None), Tensor)
    return {
        key: repr(value)
        for key, value in vars(metric).items()
        if key[0] != "_" and key not in metric._defaults and isinstance(value, kinds)
    }


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_listed(item) for item in value]
    return value
