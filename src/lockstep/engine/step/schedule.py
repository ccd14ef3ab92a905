"""The learning rate as a function of the step, and of the decays that evaluations have caused."""

from __future__ import annotations

import math

from lockstep.config import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int, decays: int = 0) -> float:
    """The factor of the base learning rate at a step, counted from 0.

    Warmup rises as (step + 1) / warmup_steps, so step 0 already learns and step warmup_steps - 1
    runs at the full rate. Then the linear and cosine decays fall from 1 towards `min_ratio`, which
    step `total_steps` (the first that is not taken) and all beyond it have.

    Args:
        schedule: shape of the schedule.
        step: number of the step, from 0.
        total_steps: number of steps of the whole run, warmup included.
        decays: number of decays so far (plateau), see `Progress.decays`.

    Returns:
        A factor in [0, 1].
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "step":
        return schedule.gamma ** ((step - warmup) // schedule.step_size)
    if schedule.name == "plateau":
        return max(schedule.min_ratio, schedule.gamma**decays)
    if schedule.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * shape
