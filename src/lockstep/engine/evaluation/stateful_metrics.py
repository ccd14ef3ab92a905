"""Metrics that are no ratios: the states of torchmetrics, combined in an order that ranks share.

Each batch updates a fresh state. States are combined over batches, not over ranks: floats are
added along the canonical tree with the loss, integers exactly, and lists are joined in the order
of batches. So every rank computes the metric from the same bits, however many ranks there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.evaluation.metric_states import (
    Leaf,
    State,
    joined,
    reduced,
    reductions,
    states_of,
    there,
    value_of,
)
from lockstep.engine.task import Task
from lockstep.errors import TaskError

if TYPE_CHECKING:
    from torchmetrics import Metric


class StatefulMetrics:
    """The metrics that `Task.metrics` gives.

    Attributes:
        states: all states of all metrics.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        """Ask the task for its metrics.

        Raises:
            TaskError: one is no metric, or has states that cannot be combined.
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
        """How many numbers `summed` gives."""
        return sum(there(s.default).numel() for s in self.states if s.is_summed)

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
        """What of a leaf is to be added up along the tree."""
        return [
            value
            for state in self.states
            if state.is_summed
            for value in there(leaf[state]).double().reshape(-1).tolist()
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
            A function that computes the metrics: names to tensors or what else they give.
        """
        values: dict[State, Tensor | None] = {}
        count, rest = sum(map(len, numbers)), list(totals)
        for state in self.states:
            if state.is_summed:
                default = there(state.default)
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
                joined = [] if value is None else [value]
                default = state.default
                setattr(metric, state.name, joined if default is None else there(value).to(default))
        metric._update_count = count
        try:
            return metric.compute()
        except Exception as error:
            raise TaskError(f"Task.metrics: {name!r}: compute failed: {error}") from error
        finally:
            metric.reset()


def plain(results: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Results of metrics as numbers, and as nested lists where they are more than one."""
    scalars: dict[str, float] = {}
    arrays: dict[str, Any] = {}
    for name, result in results.items():
        value = _listed(result)
        if isinstance(value, (int, float)):
            scalars[name] = float(value)
        else:
            arrays[name] = value
    return scalars, arrays


def tried(compute: Callable[[], dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Results of one batch, of which there may be too little for some metrics: these are 0."""
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
    """Plain values that a metric holds beside its states."""
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
