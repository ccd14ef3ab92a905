"""Faults as data: what goes wrong, on which process, and at which moment of which step.

For tests and for `lockstep chaos`. Faults come in through an environment variable, so that they
strike real processes under any launcher. Every fault strikes once; where there is a log of those
that have, also when the ranks are started again.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lockstep.comm.transport import GroupBroken
from lockstep.errors import ConfigError
from lockstep.files import read_bytes
from lockstep.parsing import parse_object

FAULTS = "LOCKSTEP_FAULTS"
"""Environment variable that holds a JSON list of faults."""

Moment = Literal[
    "compute", "reduce", "reduced", "optimizer", "gather", "committed", "evaluate", "checkpoint",
    "regroup", "catch_up",
]  # fmt: skip
"""When in a step: after a microbatch; before and after the reduction; before the optimizer; before
ranks with a sharded one tell each other what they have stepped; after the step; before an
evaluation; in the middle of writing a checkpoint (rank 0); when a loss was noticed; when survivors
have regrouped but not agreed yet."""

Kind = Literal["kill", "stop", "raise", "slow", "preempt", "miss"]
"""SIGKILL; SIGSTOP; an exception; half a second's sleep; SIGUSR1, the notice of a preemption; what
a rank sees that misses the end of a collective, which others got, because another has died."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)
KINDS: tuple[Kind, ...] = get_args(Kind)

At = Callable[[Moment, int], None]
"""Called by the engine at each moment of a step."""

SLOW_S, MISS_S = 0.5, 0.02

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once.

    Attributes:
        slot: of the process.
        step: number of the step (from 0), or the first later one that has this moment.
        moment: when.
        kind: what.
        delay_s: how long after that moment, whatever the process is doing by then.
    """

    slot: int
    step: int
    moment: Moment = "compute"
    kind: Kind = "kill"
    delay_s: float = 0.0


class InjectedError(RuntimeError):
    """What a fault of kind `raise` raises."""


def to_env(faults: Sequence[Fault], log: Path | None = None) -> dict[str, str]:
    """The environment variable that `injector` reads.

    Args:
        faults: all of them; each process takes its own.
        log: gets a JSON line for each fault just before it strikes: `time` and the fault's fields.
    """
    values = {"log": str(log) if log else "", "faults": [asdict(f) for f in faults]}
    return {FAULTS: json.dumps(values)}


def injector(env: Mapping[str, str], slot: int) -> At:
    """Strikes with the faults in the environment that are meant for this process.

    Raises:
        ConfigError: the variable does not hold faults.
    """
    text = env.get(FAULTS)
    if not text:
        return nothing
    try:
        values = json.loads(text)
        log, faults = str(values["log"]), [Fault(**v) for v in values["faults"]]
        assert all(f.moment in MOMENTS and f.kind in KINDS for f in faults)
    except (ValueError, TypeError, KeyError, AssertionError):
        raise ConfigError(f"environment variable {FAULTS}: is not a list of faults") from None
    struck = _struck(Path(log)) if log else []
    due = [f for f in faults if f.slot == slot and asdict(f) not in struck]

    def at(moment: Moment, step: int) -> None:
        for fault in tuple(due):
            if fault.moment == moment and fault.step <= step:
                due.remove(fault)
                if fault.delay_s:
                    timer = threading.Timer(fault.delay_s, _strike, (fault, log))
                    timer.daemon = True
                    timer.start()
                else:
                    _strike(fault, log)

    return at


def nothing(moment: Moment, step: int) -> None:
    """No faults."""


def _struck(log: Path) -> list[dict[str, Any]]:
    """What has struck in an earlier life of the ranks."""
    if not log.exists():
        return []
    try:
        rows = [parse_object(line) for line in read_bytes(log, follow_links=True).splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{log}: is no log of faults: {error}; remove it") from None
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def _strike(fault: Fault, log: str) -> None:
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **asdict(fault)}) + "\n")
    if fault.kind == "slow":
        time.sleep(SLOW_S)
    elif fault.kind == "raise":
        raise InjectedError(f"fault injected at {fault.moment} of step {fault.step}")
    elif fault.kind == "miss":
        time.sleep(MISS_S)  # for the others to get what this one misses
        raise GroupBroken(f"fault injected at {fault.moment} of step {fault.step}")
    else:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
