"""Distributed training that gives the same answer on any number of processes.

Subclass `Task`, then call `main(MyTask(), TrainConfig(...))`: the same script runs under python,
mpirun, torchrun and srun.

Importing this package imports neither torch nor anything else that is slow: each name is imported
from its module when it is first used.
"""

import os as _os
import resource as _resource
import sys as _sys
from typing import TYPE_CHECKING, Any

if _resource.getrlimit(_resource.RLIMIT_FSIZE)[0] != _resource.RLIM_INFINITY:
    # Python puts bytecode in its place that such a limit has cut off, and then no process can
    # import the module. So none is written, here and in ranks, of what is imported from here on.
    _sys.dont_write_bytecode = True
    _os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

from lockstep.comm.host import use_large_pages as _use_large_pages
from lockstep.config import lazy_names as _lazy_names
from lockstep.launching.rank.early import ending_at_interrupt as _ending_at_interrupt
from lockstep.launching.rank.early import prepare as _prepare

if TYPE_CHECKING:
    from lockstep import hooks, nn, quantum, sketch
    from lockstep.config import (
        CheckpointConfig,
        CompressionConfig,
        ConvergenceConfig,
        DataConfig,
        EarlyStoppingConfig,
        LocalConfig,
        MeshConfig,
        OptimizerConfig,
        PrecisionConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from lockstep.data.random import generator, numpy_generator
    from lockstep.data.shards import Shards
    from lockstep.engine.hook import Hook, Run
    from lockstep.engine.log import log
    from lockstep.engine.optimizer.schedule import lr_factor
    from lockstep.engine.optimizer.schedulers import Scheduler
    from lockstep.engine.reducer import Reducer
    from lockstep.engine.run.own_loop import Step
    from lockstep.engine.task import Loss, Phase, Task
    from lockstep.errors import LockstepError
    from lockstep.launching.api import Result, Stopped, main, train
    from lockstep.launching.api.trained import Exported, Loaded, export, load
    from lockstep.launching.api.training import Steps, steps
    from lockstep.launching.launch import launch
    from lockstep.lightning import from_lightning

__version__ = "0.1.0"

__all__ = [
    "CheckpointConfig",
    "CompressionConfig",
    "ConvergenceConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "Exported",
    "Hook",
    "Loaded",
    "LocalConfig",
    "LockstepError",
    "Loss",
    "MeshConfig",
    "OptimizerConfig",
    "Phase",
    "PrecisionConfig",
    "Reducer",
    "Result",
    "Run",
    "ScheduleConfig",
    "Scheduler",
    "Shards",
    "Step",
    "Steps",
    "Stopped",
    "Task",
    "TrainConfig",
    "export",
    "from_lightning",
    "generator",
    "hooks",
    "launch",
    "load",
    "log",
    "lr_factor",
    "main",
    "nn",
    "numpy_generator",
    "quantum",
    "sketch",
    "steps",
    "train",
]

_prepare()
_use_large_pages()


if not TYPE_CHECKING:  # else type checkers would take any name for one of this module
    _find, __dir__ = _lazy_names(__name__)

    def __getattr__(name: str) -> Any:
        with _ending_at_interrupt():
            return _find(name)
