"""Faults as data: what goes wrong, in which process, and at which moment of which step.

For tests and for `lockstep chaos`. Faults are passed by an environment variable, so that they
affect real processes under any launcher. Every fault happens once; with a log of those that have
happened, also if the ranks are started again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
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
from lockstep.engine.task import Loss, Task, has_batch_loss, has_carry
from lockstep.errors import ConfigError
from lockstep.nn.row import row_of

FAULTS = "LOCKSTEP_FAULTS"
"""Environment variable that holds a JSON list of faults."""

Moment = Literal[
    "forward", "outputs", "second_forward", "backward", "shards_forward", "shards_backward",
    "send", "receive", "unshard", "ahead", "leave",
    "compute", "reduce", "summing", "copying", "between", "factors", "reduced", "optimizer",
    "search", "gather", "gathered", "lookup", "rows", "rows_summed",
    "copy", "copied", "committed", "places", "evaluate", "checkpoint", "regroup", "catch_up",
    "join", "start", "met", "ready",
]  # fmt: skip
"""Moments of a step, in the order of the list:

- forward, backward: inside a pass, when some modules have run, or some gradients exist;
- outputs, second_forward: before outputs are gathered for a loss over the whole batch
  (`Task.batch_loss`), and inside the second forward pass (`batch_loss.recompute`);
- shards_forward, shards_backward: before a sum over shards in a pass (`mesh.tp`);
- send, receive: before activations or gradients are sent to another stage, and before a stage waits
  for them (`mesh.pp`);
- unshard, ahead, leave: before the slices of a block's parameters are gathered, while they travel
  and another block is computed, and before its gradients are sent (`sharding`);
- compute: after a microbatch;
- reduce, summing, copying, between, factors, reduced: before the reduction; in it, with shared
  memory or inside the last backward pass (`overlap`), when a part of a slice is summed, and with
  shared memory when a rank has the slices of others (not with a sharded optimizer); in it, host by
  host, before the sums of a host are sent to others; in it, between the sums of left and right
  factors (`compression.name=lowrank`); after it;
- optimizer: before the optimizer;
- search: before the batch is computed again for an optimizer with a closure;
- gather, gathered: before and after ranks with a sharded optimizer exchange what they have stepped;
- lookup, rows, rows_summed: before rows of tables (`lockstep.nn.SparseEmbedding`) are fetched, and
  before and after their gradients are sent;
- copy, copied: before and after copies of carries (`Task.carry`) are sent to other ranks;
- committed: after the step;
- places: before ranks tell each other how far they have read a stream (`data.stream_shards`);
- evaluate: before an evaluation;
- checkpoint: in the middle of writing a checkpoint (rank 0, and others that write a part);
- regroup, catch_up: when a loss was noticed, and when survivors have regrouped but not agreed yet;
- join: when a new process begins to join;
- start, met, ready: at the start of a session, always of step 0: before a process meets the others,
  before they assemble the training, and when they have."""

Kind = Literal[
    "kill", "stop", "raise", "slow", "preempt", "miss", "worker", "edit", "print", "move"
]
"""Kinds of faults:

- kill, stop: SIGKILL, SIGSTOP;
- raise: an exception;
- slow: a sleep;
- preempt: SIGUSR1, the notice of a preemption;
- miss: the error of a rank that misses the end of a collective, which others have received, because
  another rank has died;
- worker: SIGKILL for a process that fetches data for this one (`data.num_workers`);
- edit: a new process with another script than the others (at the moment `join`);
- print: more lines on standard output than a pipe without a reader holds, the first of which is
  `PRINTED`;
- move: the run directory is moved to `moved`, followed by a sleep in which that can be noticed."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)
KINDS: tuple[Kind, ...] = get_args(Kind)

At = Callable[[Moment, int], None]
"""Called by the engine at each moment of a step."""

SLOW_S, MISS_S = 0.5, 0.02

PRINTED = "lockstep: a fault prints what follows"
_LINES, _LINE = 20_000, "-" * 79

_PACED: tuple[Moment, ...] = (
    "forward", "backward", "compute", "reduce", "reduced", "optimizer", "committed",
)  # fmt: skip

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}


@dataclass(frozen=True)
class PlannedFault:
    """A fault that happens once.

    Attributes:
        slot: lifelong number of the process it is meant for.
        step: number of the step (from 0), or the first later one that has this moment.
        moment: point of the step at which it happens.
        kind: kind of the fault.
        delay_s: seconds from that moment to the fault, at any point of the computation.
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
class Pace:
    """Makes steps take longer, for faults from outside.

    Attributes:
        seconds: how long each rank sleeps, at one of the moments of each step.
        file: path of a file; ranks sleep as long as it is there.
    """

    seconds: float = 0.0
    file: str = ""


@dataclass(frozen=True)
class _Plan:
    """The content of the environment variable."""

    log: str
    faults: list[PlannedFault]
    run_dir: str = ""
    pace: Pace = Pace()


class InjectedError(RuntimeError):
    """The exception of a fault of kind `raise`."""


def moved(run_dir: Path) -> Path:
    """The path to which a fault of kind `move` moves a run directory."""
    return run_dir.with_name(f"{run_dir.name}-moved")


def to_env(
    faults: Sequence[PlannedFault],
    log: Path | None = None,
    run_dir: Path | None = None,
    pace: Pace = Pace(),
) -> dict[str, str]:
    """The environment variable that `injector` reads.

    Args:
        faults: faults of all processes; each process takes its own.
        log: path of a file that gets a JSON line just before each fault: `time` and its fields; or,
            if there are no faults, a line for each `moment` that a process reaches.
        run_dir: run directory, for faults of kind `move`.
        pace: what makes steps take longer.
    """
    values = {
        "log": str(log or ""),
        "faults": [asdict(f) for f in faults],
        "run_dir": str(run_dir or ""),
        "pace": asdict(pace),
    }
    return {FAULTS: json.dumps(values)}


def logged(log: Path) -> list[dict[str, Any]]:
    """The rows of a log of faults, or of moments; none if there is no file.

    Raises:
        ConfigError: it is not such a log.
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
    """A function that triggers the faults in the environment that are meant for this process.

    Raises:
        ConfigError: the variable does not hold faults.
    """
    plan = _plan(env)
    if plan.pace.seconds:
        return _paced(plan.pace)
    if plan.log and not plan.faults:
        logged(Path(plan.log))  # a damaged log is refused here, and not at the first moment
        return _noting_moments(plan.log)
    due = [fault for fault in _due(plan, slot) if fault.kind != "edit"]
    if not due:
        return _of_others if plan.faults else nothing

    def at(moment: Moment, step: int) -> None:
        for fault in tuple(due):
            if fault.moment == moment and fault.step <= step:
                due.remove(fault)
                if fault.delay_s:
                    timer = threading.Timer(fault.delay_s, _trigger, (fault, plan))
                    timer.daemon = True
                    timer.start()
                else:
                    _trigger(fault, plan)

    return at


def edited(task: Task, env: Mapping[str, str], slot: int) -> Task:
    """The task of a new process: with another loss, if a fault of kind `edit` is meant for it."""
    plan = _plan(env)
    is_whole = has_batch_loss(task)
    original: Callable[..., Any] = task.batch_loss if is_whole else task.loss

    def loss(*args: Any) -> Any:
        returned = original(*args)
        loss: Loss = returned[0] if has_carry(task) else returned
        loss = replace(loss, sum=loss.sum * (1 + 2**-10))
        return (loss, returned[1]) if has_carry(task) else loss

    for fault in _due(plan, slot):
        if fault.kind == "edit":
            _note(asdict(fault), plan.log)
            setattr(task, "batch_loss" if is_whole else "loss", loss)
    return task


def _plan(env: Mapping[str, str]) -> _Plan:
    text = env.get(FAULTS)
    if not text:
        return _Plan("", [])
    try:
        plan = as_type(_Plan, parse_object(text))
        times = [seconds for f in plan.faults for seconds in (f.delay_s, f.sleep_s)]
        if min([plan.pace.seconds, *times]) < 0:
            raise ValueError("a time is less than 0")
    except ValueError as error:
        raise ConfigError(
            f"environment variable {FAULTS}: is not a list of faults ({error}); unset it"
        ) from None
    return plan


def _due(plan: _Plan, slot: int) -> list[PlannedFault]:
    """The faults for a process that have not happened yet."""
    done = [
        {k: v for k, v in row.items() if k != "time"}
        for row in (logged(Path(plan.log)) if plan.log else [])
    ]
    return [f for f in plan.faults if f.slot == slot and asdict(f) not in done]


def _noting_moments(log: str) -> At:
    """Logs each moment that this process reaches, once."""
    seen: set[Moment] = set()

    def at(moment: Moment, step: int) -> None:
        if moment not in seen:
            seen.add(moment)
            _note({"moment": moment}, log)

    return at


def _paced(pace: Pace) -> At:
    last = -1

    def at(moment: Moment, step: int) -> None:
        nonlocal last
        # The same moment on all ranks, which then sleep at the same time.
        if step > last and moment == random.Random(step).choice(_PACED):
            last = step
            if Path(pace.file).exists():
                time.sleep(pace.seconds)

    return at


def nothing(moment: Moment, step: int) -> None:
    """No faults."""


def _of_others(moment: Moment, step: int) -> None:
    """Faults of other processes only: the model gets the same hooks, for ranks are compared."""


class FaultsInside:
    """Triggers faults inside forward and backward passes of training; no hooks without faults.

    Attributes:
        step: number of the step that is being computed.
        is_second: whether a forward pass is the second one of its microbatch.
    """

    def __init__(self, model: nn.Module, at: At) -> None:
        self.step, self.is_second = 0, False
        self._at = at
        if at is nothing:
            return
        # In each block, since a rank may compute any of them.
        row = row_of(model)
        for block in [model] if row is None else row.watched():
            self._watch(block)

    def _watch(self, block: nn.Module) -> None:
        layers = [m for m in block.modules() if not any(True for _ in m.children())]
        for layer in layers[len(layers) // 2 :]:
            layer.register_forward_hook(self._in_forward)
        # Gradients are computed in the reverse order, so those of the second half exist by then.
        parameters = [p for p in block.parameters() if p.requires_grad]
        for parameter in parameters[: -(-len(parameters) // 2)]:
            parameter.register_post_accumulate_grad_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            self._at("second_forward" if self.is_second else "forward", self.step)

    def _in_backward(self, parameter: Tensor) -> None:
        self._at("backward", self.step)


def _note(row: Mapping[str, Any], log: str) -> None:
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **row}) + "\n")


def _trigger(fault: PlannedFault, plan: _Plan) -> None:
    _note(asdict(fault), plan.log)
    if fault.kind == "slow":
        time.sleep(fault.sleep_s)
    elif fault.kind == "raise":
        raise InjectedError(f"fault injected at {fault.moment} of step {fault.step}")
    elif fault.kind == "miss":
        time.sleep(MISS_S)  # until the others have received what this one misses
        raise GroupBroken(f"fault injected at {fault.moment} of step {fault.step}")
    elif fault.kind == "worker":
        for worker in multiprocessing.active_children()[:1]:
            worker.kill()
    elif fault.kind == "print":
        print(PRINTED, *[_LINE] * _LINES, sep="\n", flush=True)
    elif fault.kind == "move":
        run_dir = Path(plan.run_dir)
        run_dir.rename(moved(run_dir))
        time.sleep(fault.sleep_s)
    else:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
