"""Distributed training that gives the same answer on any number of processes.

Subclass `Task`, then call `train(MyTask(), TrainConfig(...))`: the same script runs under python,
mpirun, torchrun and srun.
"""

from lockstep.launch.rank.early import ending_at_interrupt, prepare

with ending_at_interrupt():
    prepare()
    from lockstep.config import TrainConfig
    from lockstep.data.random import generator, numpy_generator
    from lockstep.engine.events import Finished
    from lockstep.engine.task import Loss, Task
    from lockstep.errors import LockstepError
    from lockstep.front import run, train

__all__ = [
    "Finished",
    "LockstepError",
    "Loss",
    "Task",
    "TrainConfig",
    "generator",
    "numpy_generator",
    "run",
    "train",
]
