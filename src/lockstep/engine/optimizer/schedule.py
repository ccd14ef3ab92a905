"""The learning rate as a function of the step, and of the decays that evaluations have caused.

Schedulers of torch have functions of their own; their state is made JSON here, and back.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config import ScheduleConfig
from lockstep.config.parsing import shown
from lockstep.engine.optimizer.optimizer_state import DTYPES, dtype_name, from_json, to_json
from lockstep.engine.task import Task
from lockstep.errors import CheckpointError, ConfigError, TaskError, shared

_MOST_ELEMENTS = 10_000
"""Of a tensor or array that is kept as text."""


def lr_factor(
    schedule: ScheduleConfig, step: int, total_steps: int, decays: int | None = None
) -> float:
    """The factor of the base learning rate at a step, counted from 0.

    For `Task.lr_factor` of a task that has several schedules.

    Warmup rises as (step + 1) / warmup_steps, so step 0 already learns and step warmup_steps - 1
    runs at the full rate. Then the factor falls from 1 towards `min_ratio`, which the decays of
    linear, cosine and polynomial have at step `total_steps` (the first that is not taken) and
    beyond, and that of onecycle at the last step that is taken.

    Args:
        schedule: shape of the schedule.
        step: number of the step, from 0.
        total_steps: number of steps of the whole run, warmup included.
        decays: number of decays so far (plateau), which evaluations have caused; a task does not
            know it.

    Returns:
        A factor in [0, 1].

    Raises:
        ConfigError: the schedule is `plateau`, and `decays` is not given.
    """
    if schedule.name == "plateau" and decays is None:
        raise ConfigError(
            "schedule.name='plateau': goes by evaluations, of which a task's own lr_factor knows "
            "nothing; take another schedule there, or leave lr_factor out"
        )
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "plateau":
        return max(schedule.min_ratio, schedule.gamma ** (decays or 0))
    return _shape(schedule, step - warmup, max(1, total_steps - warmup))


def _shape(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """The factor at a step that is counted from the end of the warmup, of so many steps."""
    done = min(1.0, step / num_steps)
    match schedule.name:
        case "constant":
            return 1.0
        case "step":
            return schedule.gamma ** (step // schedule.step_size)
        case "inverse_sqrt":
            # Vaswani et al. 2017, section 5.3, with the warmup's last step at the full rate.
            warmup = max(1, schedule.warmup_steps)
            return math.sqrt(warmup / (warmup + step))
        case "linear":
            left = 1.0 - done
        case "polynomial":
            left = (1.0 - done) ** schedule.power
        case "cosine":
            left = _half_cosine(done)
        case "cosine_restarts":
            left = _half_cosine(_in_cycle(schedule, step))
        case "onecycle":
            # Smith and Topin 2018, with cosines, as torch's `OneCycleLR` has it.
            top, last = max(0.0, schedule.peak * num_steps - 1.0), num_steps - 1.0
            if step <= top:
                rise = _half_cosine(step / top if top else 1.0)
                return 1.0 + (schedule.start_ratio - 1.0) * rise
            left = _half_cosine((step - top) / (last - top)) if step < last else 0.0
        case _:
            raise AssertionError(schedule.name)
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * left


def _in_cycle(schedule: ScheduleConfig, step: int) -> float:
    """How much of its cycle is done at a step: Loshchilov and Hutter 2017 (SGDR), equation 5."""
    length = schedule.cycle_steps
    while step >= length:
        if schedule.cycle_factor == 1:
            step %= length
            break
        step, length = step - length, length * schedule.cycle_factor
    return step / length


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


class Schedule:
    """The learning rates of a run's steps: the task's own, or those of its config."""

    def __init__(
        self,
        task: Task,
        config: ScheduleConfig,
        total_steps: int,
        num_groups: Mapping[str, int],
    ) -> None:
        """Bind the schedule to a run.

        Args:
            task: the task.
            config: section `schedule` of the run's config.
            total_steps: number of steps of the whole run.
            num_groups: number of parameter groups of each optimizer by its name, which is "" if
                there is one only.
        """
        self._task = task
        self._config = config
        self._total_steps = total_steps
        self._num_groups = num_groups
        self._is_own = type(task).lr_factor is not Task.lr_factor

    def probe(self) -> list[list[float]]:
        """The factors of some steps of a task's own schedule, none for that of a config.

        Raises:
            TaskError: `Task.lr_factor` returns something else than finite numbers of at least 0,
                one or one for each group, or such for each optimizer by its name; or is not a
                function of the step alone.
        """
        if not self._is_own:
            return []
        total = self._total_steps
        steps = sorted({0, 1, total // 2, total - 1} & {*range(total)})
        probes, again = ([self.factors(step, 0) for step in steps] for _ in range(2))
        if probes != again:
            raise TaskError(
                f"{type(self._task).__name__}.lr_factor: gave two values for one step; it must "
                "depend on its arguments and the config alone"
            )
        return probes

    def first_difference(self, total_steps: int, num_steps: int) -> int | None:
        """The first of so many steps at which a run of another length has other learning rates.

        Args:
            total_steps: number of steps of the whole other run.
            num_steps: number of steps, from 0, that are compared.

        Returns:
            Its number; None if there is none.

        Raises:
            TaskError: see above.
        """
        other = Schedule(self._task, self._config, total_steps, self._num_groups)
        steps = range(num_steps)
        return next((s for s in steps if self.factors(s, 0) != other.factors(s, 0)), None)

    def factors(self, step: int, decays: int) -> list[float]:
        """What the base learning rate of each parameter group is multiplied with at a step.

        Args:
            step: number of the step, from 0.
            decays: number of decays that `Progress` has counted.

        Raises:
            TaskError: see above.
        """
        if not self._is_own:
            factor = lr_factor(self._config, step, self._total_steps, decays)
            return [factor] * sum(self._num_groups.values())
        value: Any = self._task.lr_factor(step, self._total_steps)
        where = f"{type(self._task).__name__}.lr_factor({step}, {self._total_steps})"
        if not isinstance(value, Mapping):
            return _each(value, sum(self._num_groups.values()), "the optimizer has", where)
        names = [name for name in self._num_groups if name]
        if not names:
            raise TaskError(
                f"{where}: returned {shown(value)}; the task has one optimizer: return a number, "
                "or one for each parameter group"
            )
        if {*value} != {*names}:
            raise TaskError(
                f"{where}: returned factors for {shown(list(value))}; the optimizers are {names}"
            )
        return [
            factor
            for name in names
            for factor in _each(value[name], self._num_groups[name], f"that of {name!r} has", where)
        ]


def _each(value: Any, num_groups: int, owner: str, where: str) -> list[float]:
    """The factor of each parameter group, from one for all or one for each.

    Args:
        value: what a task has returned.
        num_groups: number of the groups.
        owner: what messages say of who has them.
        where: by which call, for messages.

    Raises:
        TaskError: it is something else.
    """
    values = value if isinstance(value, (list, tuple)) else [value] * num_groups
    if len(values) != num_groups:
        raise TaskError(
            f"{where}: returned {len(values)} factors; {owner} {num_groups} parameter groups"
        )
    for one in values:
        if not isinstance(one, Real) or not math.isfinite(one) or one < 0:
            raise TaskError(
                f"{where}: returned {value!r}; must be a number of at least 0, or one for each "
                "parameter group"
            )
    return [float(one) for one in values]


def encoded(value: Any) -> Any:
    """A scheduler's state as JSON.

    Numbers, text, small arrays, and lists, tuples, dicts and counters of these are kept. Of
    anything else, such as functions, there is the type's name: `decoded` takes it from the
    scheduler that the task builds.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encoded(v) for v in value]}
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim and _is_small(value):
        is_tensor = isinstance(value, Tensor)
        name = dtype_name(value.dtype) if isinstance(value, Tensor) else value.dtype.name
        return {"tensor" if is_tensor else "array": name, "values": value.tolist()}
    if isinstance(value, deque):
        return {"deque": [encoded(v) for v in value], "most": value.maxlen}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encoded(k), encoded(v)] for k, v in value.items()]}
    try:
        return {"number": to_json(value)}
    except TypeError:
        return {"built": type(value).__qualname__}


def decoded(saved: Any, own: Any) -> Any:
    """The inverse of `encoded`.

    Args:
        saved: an encoded value.
        own: what the scheduler has in its place.

    Raises:
        CheckpointError: it is no such value.
    """
    match saved:
        case None | bool() | int() | float() | str():
            return saved
        case {"float": str(text)} if text in ("inf", "-inf", "nan"):
            return float(text)
        case {"list": list(values)}:
            return _items(values, own)
        case {"tuple": list(values)}:
            return tuple(_items(values, own))
        case {"deque": list(values), "most": None | int() as most}:
            return deque(_items(values, own), most)
        case {"dict": list(pairs)}:
            return _pairs(pairs, own)
        case {"counter": list(pairs)}:
            return Counter(_pairs(pairs, own))
        case {"tensor": str(dtype), "values": list(values)} if dtype in DTYPES:
            device = own.device if isinstance(own, Tensor) else torch.device("cpu")
            return torch.tensor(values, dtype=DTYPES[dtype], device=device)
        case {"array": str(dtype), "values": list(values)} if dtype in DTYPES:
            return np.array(values, dtype=dtype)
        case {"number": number}:
            return from_json(number, own.device if isinstance(own, Tensor) else torch.device("cpu"))
        case {"built": str(name)} if type(own).__qualname__ == name:
            return own
    raise shared(
        CheckpointError(
            f"learning_rates.schedulers: is damaged: {shown(saved)} is no value of a scheduler"
        )
    )


def _items(values: Sequence[Any], own: Any) -> list[Any]:
    there = (
        own if isinstance(own, (list, tuple)) and len(own) == len(values) else [None] * len(values)
    )
    return [decoded(value, mine) for value, mine in zip(values, there, strict=True)]


def _pairs(pairs: Sequence[Any], own: Any) -> dict[Any, Any]:
    there = own if isinstance(own, dict) else {}
    made: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise shared(CheckpointError("learning_rates.schedulers: is damaged: an odd pair"))
        key = decoded(pair[0], None)
        made[key] = decoded(pair[1], there.get(key))
    return made


def _is_small(value: Any) -> bool:
    name = dtype_name(value.dtype) if isinstance(value, Tensor) else value.dtype.name
    return bool(np.prod(value.shape) <= _MOST_ELEMENTS and name in DTYPES and name != "bfloat16")
