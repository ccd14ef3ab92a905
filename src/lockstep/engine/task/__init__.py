"""What a user writes, and what the engine makes of it: a task, its losses, its config."""

from lockstep.engine.task.rebuilt import (
    data_buffers,
    is_part_of,
    is_scratch,
    made_anew,
    observed,
    with_config,
)
from lockstep.engine.task.task import Loss, Number, Phase, Task, has_carry, has_lookups, own_collate

__all__ = [
    "Loss",
    "Number",
    "Phase",
    "Task",
    "data_buffers",
    "has_carry",
    "has_lookups",
    "is_part_of",
    "is_scratch",
    "made_anew",
    "observed",
    "own_collate",
    "with_config",
]
