"""The task that a user writes, its losses, and tasks with other configs."""

from lockstep.engine.task.task import (
    Loss,
    Number,
    Phase,
    Task,
    has_batch_loss,
    has_carry,
)
from lockstep.engine.task.task_config import (
    data_buffers,
    has_lookups,
    is_part_of,
    is_scratch,
    own_collate,
    rebuilt,
    with_config,
    with_watched_config,
)

__all__ = [
    "Loss",
    "Number",
    "Phase",
    "Task",
    "data_buffers",
    "has_batch_loss",
    "has_carry",
    "has_lookups",
    "is_part_of",
    "is_scratch",
    "own_collate",
    "rebuilt",
    "with_config",
    "with_watched_config",
]
