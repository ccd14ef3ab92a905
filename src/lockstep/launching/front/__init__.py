"""What programs call: from a task and a config to a finished run, under any launcher."""

from lockstep.launching.front.api import leave, main, train
from lockstep.launching.front.device import find_device, on_device
from lockstep.launching.front.prediction import predicted
from lockstep.launching.front.rank import TIMEOUT_S, claim, new_run_dir, run
from lockstep.launching.front.session import SESSION, Result, Session, Stopped

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
