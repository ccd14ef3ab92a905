"""The learning rate of each parameter group in each step, whoever sets it.

A rate is a base rate times the factor of the run's schedule. Code may write another one into
`param_groups` between two steps: schedulers of torch, `Task.after_step`, hooks. It then counts from
the next step on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from lockstep.config.parsing import shown
from lockstep.engine.optimizer.optimizer_state import from_json, to_json
from lockstep.engine.optimizer.schedulers import Schedulers
from lockstep.errors import CheckpointError, LockstepError, TaskError, shared

_DIGEST_BITS = (1 << 52) - 1
"""Bits of an integer that a float64 holds."""
_NUMBERS = frozenset({bool, int, float})
_OWN = frozenset({"params", "lr", "fused"})
"""What of a group is no option: the parameters, the rate, and what the engine sets for speed."""
_RATE = operator.methodcaller("get", "lr")


class LearningRates:
    """Sets the learning rates of groups, and takes over what others have written into groups.

    Attributes:
        schedulers: those of torch that the task has attached.
        written: for each group, options beside `lr` that were written, by name, as JSON.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        fixed: Sequence[dict[str, Any]],
        factors: Callable[[int, int], list[float]],
        schedulers: Schedulers,
        may_be_written: bool,
        optimizers: Sequence[optim.Optimizer] = (),
        is_replicated: bool = True,
    ) -> None:
        """Bind them to parameter groups, as they are before the first step.

        Args:
            groups: groups that the schedule is for.
            fixed: further groups, which it is not for.
            factors: what the base rates of `groups` are multiplied with: a function of the step,
                from 0, and of the number of decays.
            schedulers: those of torch that the task has attached; the schedule is constant then.
            may_be_written: whether there is code that may write other options than rates.
            optimizers: those that have the groups.
            is_replicated: whether every rank steps all groups.
        """
        self._groups = [*groups, *fixed]
        self._num_fixed = len(fixed)
        self._factors_at = factors
        self.schedulers = schedulers
        self._may_be_written = may_be_written or bool(schedulers)
        self._base = [_number(group["lr"]) for group in self._groups]
        self._factors = [1.0] * len(self._groups)  # those of the newest step that was applied
        self._next = self._factors
        self._rates, self._held = list(self._base), list(self._base)
        self.written: list[dict[str, Any]] = [{} for _ in self._groups]
        self._options = [_options(group) for group in self._groups]
        self._optimizers, self._is_replicated = list(optimizers), is_replicated
        self.note_groups()
        self._error: Exception | None = None

    def note_groups(self) -> None:
        """Note which groups there are, and which parameters are in them."""
        self._lists = [(o, list(o.param_groups)) for o in self._optimizers]
        self._members = [[*map(id, group["params"])] for group in self._groups]
        self._numbers_of = {id(group): number for number, group in enumerate(self._groups)}

    def begin(self, step: int, decays: int) -> None:
        """Set the rates of a step.

        Args:
            step: number of the step, from 0.
            decays: number of decays that evaluations have caused so far (`Progress.decays`).

        Raises:
            TaskError: the schedule or a scheduler has failed.
        """
        self.check()
        self._next = self._factors_at(step, decays)
        if self._num_fixed:
            self._next = [*self._next, *([1.0] * self._num_fixed)]
        self._rates = self._set([*map(operator.mul, self._base, self._next)])

    def check_passes(self) -> None:
        """Refuse rates that microbatches have changed: other ranks compute other ones.

        Raises:
            TaskError: naming the group.
        """
        self._check_groups()
        for group, rate in zip(self._groups, self._rates, strict=True):
            written = group.get("lr")
            if written is not rate and _number(written) != rate:
                index = self._numbers_of[id(group)]
                raise TaskError(
                    f"the optimizer's group {index}: 'lr' was changed by a microbatch; change it "
                    "in Task.after_step, or by Task.build_scheduler"
                )

    def applied(self) -> None:
        """Note that the optimizer has stepped with the rates that were set last."""
        self._factors, self._held = self._next, list(self._rates)
        if self._is_replicated:
            # What the optimizer, or a hook of it, has written when it stepped.
            if not self._are_as_set():
                self._keep_error(self._take_over_rates)
        else:
            # It counts for that step only: a rank that steps no part of the group has not done it.
            self._set(self._rates)
        if self._may_be_written:
            self._options = [_options(group) for group in self._groups]

    def give_up(self) -> None:
        """Set the rates as the newest step that was applied, or what followed it, has left them."""
        self._set(self._held)

    def step_schedulers(self, phase: str, is_epoch_end: bool) -> None:
        """Step schedulers that are due after a step. What they raise is raised by `check`."""
        self._keep_error(lambda: self.schedulers.after_step(phase, is_epoch_end))

    def keep_written(self) -> None:
        """As `take_over`, after a step. What it raises is raised by `check`."""
        if self._may_be_written or not self._are_as_set():
            self._keep_error(self.take_over)

    def after_evaluation(self, metrics: Mapping[str, float], watch: str) -> None:
        """Step schedulers that are due after an evaluation of the validation splits."""
        if self.schedulers:
            self._keep_error(lambda: self.schedulers.after_evaluation(metrics, watch))
            self._keep_error(self.take_over)

    def take_over(self) -> None:
        """Let what was written into the groups since the newest step count from the next one on.

        With a schedule, a rate is that of the newest step, and the schedule goes on from it.

        Raises:
            TaskError: no rate was written, the schedule is at 0, or an option cannot be saved.
        """
        self._check_groups()
        self._take_over_rates()
        if not self._may_be_written:
            return
        for index, (group, noted) in enumerate(zip(self._groups, self._options, strict=True)):
            written = self.written[index]
            missing = [key for key in noted if key not in group]
            if missing:
                raise TaskError(
                    f"the optimizer's group {index}: {missing[0]!r} was deleted, and no checkpoint "
                    "would say so; set it to another value"
                )
            for key, value in _options(group).items():
                if key in noted and _is_same(noted[key], value) and key not in written:
                    continue
                try:
                    written[key] = to_json(value)
                except TypeError as error:
                    raise TaskError(
                        f"the optimizer's group {index}: {key!r} was set to a {error}, which no "
                        "checkpoint holds; set it to a number, text, or a tuple of them"
                    ) from None
            self._options[index] = _options(group)

    def _are_as_set(self) -> bool:
        """Whether groups are those of the start, with the very rates that were set last."""
        # In each step, so without anything that takes longer than these comparisons.
        rates = map(_RATE, self._groups)
        return all(map(operator.is_, rates, self._held)) and not self._changed_group()

    def _take_over_rates(self) -> None:
        for index, (group, held) in enumerate(zip(self._groups, self._held, strict=True)):
            written, factor = group.get("lr"), self._factors[index]
            if written is held or _is_same(_number(written), held):
                continue
            where = f"the optimizer's group {index}: 'lr' was set to {shown(written)}"
            if not _is_rate(written):
                raise TaskError(f"{where}; must be a finite number of at least 0")
            if factor == 0:
                raise TaskError(
                    f"{where} where the schedule is at 0, so it would stay 0; set "
                    "schedule.name=constant or schedule.min_ratio, or write Task.build_scheduler"
                )
            self._base[index] = _number(written) / factor
            self._held[index] = _number(written)

    def _check_groups(self) -> None:
        """Refuse other groups, or other parameters in them, than those of the start.

        Raises:
            TaskError: naming what has changed.
        """
        change = self._changed_group()
        if change:
            raise TaskError(
                f"{change}, and no checkpoint would say so; give it all groups in build_optimizer, "
                "and set 'lr' to 0 for parameters that are to stay as they are"
            )

    def _changed_group(self) -> str:
        """What has changed, by words for people; empty if nothing has."""
        for optimizer, groups in self._lists:
            now = optimizer.param_groups
            if len(now) != len(groups) or any(map(operator.is_not, now, groups)):
                return f"the groups of {type(optimizer).__name__} were added, removed or replaced"
        for index, members in enumerate(self._members if self._may_be_written else ()):
            if [*map(id, self._groups[index]["params"])] != members:
                return f"the optimizer's group {index}: other parameters were put into it"
        return ""

    def values(self) -> list[dict[str, Any]]:
        """All values of the groups, for `changed`."""
        return values_of(self._groups)

    def changed(self, before: Sequence[Mapping[str, Any]]) -> str:
        """The first value that is not as it was, by words for people; empty if all are.

        Args:
            before: what `values` gave.
        """
        return first_change(self._groups, before)

    def write_again(self) -> None:
        """Write the options that were written, after the optimizer's state was loaded."""
        for group, written in zip(self._groups, self.written, strict=True):
            for key, value in written.items():
                device = group["params"][0].device if group["params"] else torch.device("cpu")
                group[key] = from_json(value, device)
        self._options = [_options(group) for group in self._groups]

    def check(self) -> None:
        """Raise what a scheduler has raised.

        Raises:
            TaskError: see above.
        """
        if self._error is not None:
            raise self._error

    def of(self, group: Mapping[str, Any]) -> float:
        """The rate that a group had when the last step began."""
        return float(self._rates[self._numbers_of[id(group)]])

    def digest(self) -> int:
        """A digest of the numbers that all ranks must step with alike: 52 bits."""
        own = [v for group in self._groups for v in group.values() if type(v) in _NUMBERS]
        return hash((*self._rates, *own)) & _DIGEST_BITS

    def described(self) -> dict[str, Any]:
        """What `digest` is made of, by words for people."""
        described: dict[str, Any] = {"learning rates": list(self._rates)}
        for index, key, value in self._numbers():
            described[f"{key!r} of the optimizer's group {index}"] = value
        return described

    def state_dict(self) -> dict[str, Any]:
        """Rates, all that was written, and the state of schedulers, as JSON."""
        state: dict[str, Any] = {"base": self._base[:], "factors": self._factors[:]}
        state |= {"lr": self._held[:], "written": [dict(one) for one in self.written]}
        if self.schedulers:
            state["schedulers"] = self.schedulers.state_dict()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; the optimizer's own state was loaded before.

        Raises:
            CheckpointError: it is not the state of such groups and schedulers.
        """
        problem = self.problem(saved)
        if problem:
            raise shared(CheckpointError(f"learning_rates: {problem}"))
        if self.schedulers:
            self.schedulers.load_state_dict(saved.get("schedulers"))
        self._base, self._factors = list(saved["base"]), list(saved["factors"])
        self._next, self._held = self._factors, list(saved["lr"])
        for written, there in zip(self.written, saved["written"], strict=True):
            written.clear()
            written.update(there)
        self._error = None
        self._set(self._held)
        self.write_again()

    def problem(self, saved: Any) -> str:
        """Why a saved state cannot be that of these groups; empty if it can."""
        if not isinstance(saved, dict):
            return f"{shown(saved)}: must be an object"
        count = len(self._groups)
        for key in ("base", "factors", "lr", "written"):
            values = saved.get(key)
            if not isinstance(values, list) or len(values) != count:
                return f"{key}={shown(values)}: must be a list of {count}"
        for key in ("base", "factors", "lr"):
            wrong = next((v for v in saved[key] if not _is_rate(v)), None)
            if wrong is not None:
                return f"{key}: {shown(wrong)}: must be a finite number of at least 0"
        for there in saved["written"]:
            if not isinstance(there, dict) or {*there} & _OWN:
                return f"written={shown(there)}: must be options by name"
            for key, value in there.items():
                try:
                    from_json(value, torch.device("cpu"))
                except (LockstepError, ArithmeticError, RuntimeError, TypeError, ValueError):
                    return f"written: {key}={shown(value)}: is no value of an option"
        return ""

    def _numbers(self) -> Iterator[tuple[int, str, Any]]:
        """Group, name and value of each option that is a number."""
        for index, group in enumerate(self._groups):
            for key, value in group.items():
                if key != "lr" and type(value) in _NUMBERS:
                    yield index, key, value

    def _set(self, rates: Sequence[float]) -> list[float]:
        """Set the rates; returns what groups then have, which a tensor may have rounded."""
        held = list(rates)
        for index, (group, rate) in enumerate(zip(self._groups, rates, strict=True)):
            if isinstance(group["lr"], Tensor):
                held[index] = float(group["lr"].fill_(rate))
            else:
                group["lr"] = rate
        return held

    def _keep_error(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._error = self._error or error


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, (Tensor, np.generic)) else value


def _is_rate(value: Any) -> bool:
    is_number = isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
    is_number = is_number and _both_scalar(value)
    return is_number and math.isfinite(_number(value)) and bool(_number(value) >= 0)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a group but its parameters and its rate."""
    return {key: value for key, value in group.items() if key not in _OWN}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(_number(one) == _number(other)) if _both_scalar(one, other) else one is other
    return one is other or bool(type(one) is type(other) and one == other)


def _both_scalar(*values: Any) -> bool:
    return all(not isinstance(value, Tensor) or value.numel() == 1 for value in values)


def values_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All values of parameter groups, for `first_change`; no parameters."""
    return [_options(group) | {"lr": _number(group.get("lr"))} for group in groups]


def first_change(groups: Iterable[Mapping[str, Any]], before: Iterable[Mapping[str, Any]]) -> str:
    """The first value of groups that is not as it was, by words for people; empty if all are.

    Args:
        groups: parameter groups.
        before: what `values_of` gave of them.
    """
    for index, (was, now) in enumerate(zip(before, values_of(groups), strict=True)):
        for key in {**was, **now}:
            if key not in was or key not in now or not _is_same(was[key], now[key]):
                return f"{key!r} of the optimizer's group {index}"
    return ""


def unequal_settings(everyone: Sequence[Mapping[str, Any]]) -> str:
    """What to say of ranks that would step with other settings.

    Args:
        everyone: what `LearningRates.described` says on each rank.
    """
    for name, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != value:
                return (
                    f"{name}: is {value} on rank 0 but {theirs.get(name)} on rank {rank}; let "
                    "Task.lr_factor, and what changes the optimizer's groups, depend on the step, "
                    "the config and metrics of whole evaluations, not on what microbatches or "
                    "evaluation batches of this rank have left"
                )
    return "ranks would step with other learning rates or options"
