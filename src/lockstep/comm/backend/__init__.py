"""The `mpi4py` backend of `torch.distributed`, a part of its own: the engine does not use it.

Importing a name from here calls `MPI_Init`; importing the package does not.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.comm.backend.backend import MpiProcessGroup, init_process_group, register

__all__ = ["MpiProcessGroup", "init_process_group", "register"]

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module("lockstep.comm.backend.backend"), name)
