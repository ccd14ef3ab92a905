"""The front door: from a task and a config to a finished run, wherever this process is."""

from lockstep.front.api import leave, main, train
from lockstep.front.device import find_device, on_device
from lockstep.front.foretelling import foretold
from lockstep.front.rank import TIMEOUT_S, claim, new_run_dir, run
from lockstep.front.result import Result, Stopped
from lockstep.front.sitting import SITTING, Sitting

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
