"""Faults as data: what goes wrong, on which process, and at which moment of which step.

For tests and for `lockstep chaos`. Faults come in through an environment variable, so that they
strike real processes under any launcher. Every fault strikes once; where there is a log of those
that have, also when the ranks are started again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lockstep.comm.transport import GroupBroken
from lockstep.config.files import read_bytes
from lockstep.config.parsing import as_type, parse_object, shown
from lockstep.engine.task import Loss, Task, has_carry
from lockstep.errors import ConfigError
from lockstep.nn.pipeline import Pipeline

FAULTS = "LOCKSTEP_FAULTS"
"""Environment variable that holds a JSON list of faults."""

Moment = Literal[
    "forward", "backward", "shards_forward", "shards_backward", "send", "receive",
    "unshard", "leave",
    "compute", "reduce", "summing", "copying", "between", "factors", "reduced", "optimizer",
    "gather", "gathered", "lookup", "rows", "rows_summed",
    "copy", "copied", "committed", "evaluate", "checkpoint", "regroup", "catch_up", "join",
    "start", "met", "ready",
]  # fmt: skip
"""When in a step: inside a forward pass, when some of its modules have run; inside a backward pass,
when some gradients are there; before a sum over shards in a forward and in a backward pass
(`mesh.tp`); before activations or gradients go to another stage, and before a stage waits for them
(`mesh.pp`); before the slices of a block's parameters come together, and before its gradients are
sent (`sharding`); after a microbatch; before and after the reduction, and in it, where ranks share
memory, when a part of a slice is summed and when a rank has the slices of others (not with a
sharded optimizer), and where they sum host by host, before what is left of a host goes to others;
between the sums of left and right factors (`compression.name=lowrank`); before and after copies of
what microbatches carry (`Task.carry`) go to other ranks; before rows of tables
(`lockstep.nn.SparseEmbedding`) come from their owners, before and after their gradients go there;
before the optimizer; before and after ranks with a sharded one tell each other what they have
stepped; after the step; before an evaluation; in the middle of writing a checkpoint (rank 0); when
a loss was noticed; when survivors have regrouped but not agreed yet; when a new process begins, to
be taken in; at the start of a session, always of step 0: before a process meets the others, before
they assemble the training, and when they have."""

Kind = Literal[
    "kill", "stop", "raise", "slow", "preempt", "miss", "worker", "edit", "print", "move"
]
"""SIGKILL; SIGSTOP; an exception; a sleep; SIGUSR1, the notice of a preemption; what a rank sees
that misses the end of a collective, which others got, because another has died; SIGKILL for a
process that fetches data for this one (`data.num_workers`); what a new process finds whose script
was edited since the others began (at the moment `join`); more lines on standard output than pipes
hold whose reader stands still, the first of which is `PRINTED`; the run directory moved away, see
`moved`, and a sleep, in which that can be noticed."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)
KINDS: tuple[Kind, ...] = get_args(Kind)

At = Callable[[Moment, int], None]
"""Called by the engine at each moment of a step."""

SLOW_S, MISS_S = 0.5, 0.02

PRINTED = "lockstep: a fault prints what follows"
_LINES, _LINE = 20_000, "-" * 79

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}


@dataclass(frozen=True)
class PlannedFault:
    """A fault that strikes once.

    Attributes:
        slot: lifelong number of the process it is meant for.
        step: number of the step (from 0), or the first later one that has this moment.
        moment: point of the step at which it strikes.
        kind: kind of the fault.
        delay_s: seconds from that moment to the fault, whatever the process is doing by then.
        sleep_s: seconds that a fault of kind `slow` sleeps; at the moment `checkpoint`, a slow
            disk.
    """

    slot: int
    step: int
    moment: Moment = "compute"
    kind: Kind = "kill"
    delay_s: float = 0.0
    sleep_s: float = SLOW_S


@dataclass(frozen=True)
class _Given:
    """The content of the environment variable."""

    log: str
    faults: list[PlannedFault]
    run_dir: str = ""


class InjectedError(RuntimeError):
    """The exception of a fault of kind `raise`."""


def moved(run_dir: Path) -> Path:
    """Where a fault of kind `move` puts a run directory."""
    return run_dir.with_name(f"{run_dir.name}-moved")


def to_env(
    faults: Sequence[PlannedFault], log: Path | None = None, run_dir: Path | None = None
) -> dict[str, str]:
    """The environment variable that `injector` reads.

    Args:
        faults: faults of all processes; each process takes its own.
        log: path of a file that gets a JSON line just before each fault: `time` and its fields; or,
            if there are no faults at all, a line for each `moment` that a process comes to.
        run_dir: run directory, for faults of kind `move`.
    """
    values = {
        "log": str(log or ""),
        "faults": [asdict(f) for f in faults],
        "run_dir": str(run_dir or ""),
    }
    return {FAULTS: json.dumps(values)}


def logged(log: Path) -> list[dict[str, Any]]:
    """The rows of a log of faults, or of moments; none if there is no file.

    Raises:
        ConfigError: it is no such log.
    """
    try:
        if not log.exists():
            return []
        return [parse_object(line) for line in read_bytes(log, follow_links=True).splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"environment variable {FAULTS}: {shown(str(log))[1:-1]}: is no log of faults: "
            f"{reason}; remove it"
        ) from None


def injector(env: Mapping[str, str], slot: int) -> At:
    """Strikes with the faults in the environment that are meant for this process.

    Raises:
        ConfigError: the variable does not hold faults.
    """
    given = _given(env)
    if given.log and not given.faults:
        logged(Path(given.log))  # what is none is refused here, and not at the first moment
        return _noting_moments(given.log)
    due = [fault for fault in _due(given, slot) if fault.kind != "edit"]
    if not due:
        return nothing

    def at(moment: Moment, step: int) -> None:
        for fault in tuple(due):
            if fault.moment == moment and fault.step <= step:
                due.remove(fault)
                if fault.delay_s:
                    timer = threading.Timer(fault.delay_s, _strike, (fault, given))
                    timer.daemon = True
                    timer.start()
                else:
                    _strike(fault, given)

    return at


def edited(task: Task, env: Mapping[str, str], slot: int) -> Task:
    """The task of a new process: with another loss, if a fault of kind `edit` is meant for it."""
    given = _given(env)
    original = task.loss

    def loss(*args: Any) -> Any:
        returned = original(*args)
        loss: Loss = returned[0] if has_carry(task) else returned
        loss = replace(loss, sum=loss.sum * (1 + 2**-10))
        return (loss, returned[1]) if has_carry(task) else loss

    for fault in _due(given, slot):
        if fault.kind == "edit":
            _note(asdict(fault), given.log)
            task.loss = loss  # type: ignore[method-assign]
    return task


def _given(env: Mapping[str, str]) -> _Given:
    """What the environment holds."""
    text = env.get(FAULTS)
    if not text:
        return _Given("", [])
    try:
        given = as_type(_Given, parse_object(text))
        if not all(min(f.delay_s, f.sleep_s) >= 0 for f in given.faults):
            raise ValueError("a time is less than 0")
    except ValueError as error:
        raise ConfigError(
            f"environment variable {FAULTS}: is not a list of faults ({error}); unset it"
        ) from None
    return given


def _due(given: _Given, slot: int) -> list[PlannedFault]:
    """The faults for a process that have not struck yet."""
    struck = [
        {k: v for k, v in row.items() if k != "time"}
        for row in (logged(Path(given.log)) if given.log else [])
    ]
    return [f for f in given.faults if f.slot == slot and asdict(f) not in struck]


def _noting_moments(log: str) -> At:
    """Writes down each moment that this process comes to, once."""
    seen: set[Moment] = set()

    def at(moment: Moment, step: int) -> None:
        if moment not in seen:
            seen.add(moment)
            _note({"moment": moment}, log)

    return at


def nothing(moment: Moment, step: int) -> None:
    """No faults."""


class FaultsInside:
    """Strikes inside forward and backward passes of training, by hooks; none without faults.

    Attributes:
        step: number of the step that is being computed.
    """

    def __init__(self, model: nn.Module, at: At) -> None:
        self.step = 0
        self._at = at
        if at is nothing:
            return
        # Whichever blocks a rank computes, it comes to each moment.
        for block in model if isinstance(model, Pipeline) else [model]:
            self._watch(block)

    def _watch(self, block: nn.Module) -> None:
        layers = [m for m in block.modules() if not any(True for _ in m.children())]
        for layer in layers[len(layers) // 2 :]:
            layer.register_forward_hook(self._in_forward)
        # Gradients come in the reverse order, so those of the second half are there by then.
        parameters = [p for p in block.parameters() if p.requires_grad]
        for parameter in parameters[: -(-len(parameters) // 2)]:
            parameter.register_post_accumulate_grad_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            self._at("forward", self.step)

    def _in_backward(self, parameter: Tensor) -> None:
        self._at("backward", self.step)


def _note(row: Mapping[str, Any], log: str) -> None:
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **row}) + "\n")


def _strike(fault: PlannedFault, given: _Given) -> None:
    _note(asdict(fault), given.log)
    if fault.kind == "slow":
        time.sleep(fault.sleep_s)
    elif fault.kind == "raise":
        raise InjectedError(f"fault injected at {fault.moment} of step {fault.step}")
    elif fault.kind == "miss":
        time.sleep(MISS_S)  # for the others to get what this one misses
        raise GroupBroken(f"fault injected at {fault.moment} of step {fault.step}")
    elif fault.kind == "worker":
        for worker in multiprocessing.active_children()[:1]:
            worker.kill()
    elif fault.kind == "print":
        print(PRINTED, *[_LINE] * _LINES, sep="\n", flush=True)
    elif fault.kind == "move":
        run_dir = Path(given.run_dir)
        run_dir.rename(moved(run_dir))
        time.sleep(fault.sleep_s)
    else:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
