"""The front door: from a task and a config to a finished run, wherever this process is."""

from lockstep.launching.front.api import leave, main, train
from lockstep.launching.front.device import find_device, on_device
from lockstep.launching.front.rank import TIMEOUT_S, claim, new_run_dir, run
from lockstep.launching.front.session import SITTING, Result, Sitting, Stopped, foretold

__all__ = [
    "SITTING",
    "TIMEOUT_S",
    "Result",
    "Sitting",
    "Stopped",
    "claim",
    "find_device",
    "foretold",
    "leave",
    "main",
    "new_run_dir",
    "on_device",
    "run",
    "train",
]
