"""Distributed training that gives the same answer on any number of processes.

Subclass `Task`, then call `main(MyTask(), TrainConfig(...))`: the same script runs under python,
mpirun, torchrun and srun.

Importing this package imports neither torch nor anything else that is slow: each name is imported
from its module when it is first used.
"""

import os as _os
import resource as _resource
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if _resource.getrlimit(_resource.RLIMIT_FSIZE)[0] != _resource.RLIM_INFINITY:
    # Python puts bytecode in its place that such a limit has cut off, and then no process can
    # import the module. So none is written, here and in ranks, of what is imported from here on.
    _sys.dont_write_bytecode = True
    _os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

from lockstep.comm.host import use_large_pages as _use_large_pages
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
    from lockstep.engine.reducer import Reducer
    from lockstep.engine.task import Loss, Phase, Task
    from lockstep.errors import LockstepError
    from lockstep.launching.front import Result, Stopped, main, train
    from lockstep.launching.front.api import Loaded, load
    from lockstep.launching.front.export import Exported, export
    from lockstep.launching.launch import launch

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
    "Shards",
    "Stopped",
    "Task",
    "TrainConfig",
    "export",
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
    "train",
]

_HOMES = {
    "CheckpointConfig": "lockstep.config",
    "CompressionConfig": "lockstep.config",
    "ConvergenceConfig": "lockstep.config",
    "DataConfig": "lockstep.config",
    "EarlyStoppingConfig": "lockstep.config",
    "LocalConfig": "lockstep.config",
    "Exported": "lockstep.launching.front.export",
    "Hook": "lockstep.engine.hook",
    "Loaded": "lockstep.launching.front.api",
    "LockstepError": "lockstep.errors",
    "Loss": "lockstep.engine.task",
    "MeshConfig": "lockstep.config",
    "OptimizerConfig": "lockstep.config",
    "Phase": "lockstep.engine.task",
    "PrecisionConfig": "lockstep.config",
    "Reducer": "lockstep.engine.reducer",
    "Result": "lockstep.launching.front",
    "Run": "lockstep.engine.hook",
    "ScheduleConfig": "lockstep.config",
    "Shards": "lockstep.data.shards",
    "Stopped": "lockstep.launching.front",
    "Task": "lockstep.engine.task",
    "TrainConfig": "lockstep.config",
    "export": "lockstep.launching.front.export",
    "generator": "lockstep.data.random",
    "launch": "lockstep.launching.launch",
    "load": "lockstep.launching.front.api",
    "log": "lockstep.engine.log",
    "lr_factor": "lockstep.engine.optimizer.schedule",
    "main": "lockstep.launching.front",
    "numpy_generator": "lockstep.data.random",
    "train": "lockstep.launching.front",
}
"""The module that each name of `__all__` comes from, but for those that are modules."""

_prepare()
_use_large_pages()


if not TYPE_CHECKING:  # else type checkers would take any name for one of this module

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _ending_at_interrupt():
            if name not in _HOMES:
                return _import_module(f"{__name__}.{name}")
            value = getattr(_import_module(_HOMES[name]), name)
        globals()[name] = value  # from now on it is found without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
