"""What programs call: from a task and a config to a finished run, under any launcher."""

from lockstep.launching.api.device import find_device, on_device
from lockstep.launching.api.rank import TIMEOUT_S, claim, new_run_dir, run
from lockstep.launching.api.session import SESSION, Result, Session, Stopped, predicted
from lockstep.launching.api.training import leave, main, train

__all__ = [
    "SESSION",
    "TIMEOUT_S",
    "Result",
    "Session",
    "Stopped",
    "claim",
    "find_device",
    "leave",
    "main",
    "new_run_dir",
    "on_device",
    "predicted",
    "run",
    "train",
]
