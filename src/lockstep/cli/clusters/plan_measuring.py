"""The measurements that a plan is made from: short trainings, and messages on this host."""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.cli.clusters.comm_profile import profile_of
from lockstep.cli.clusters.comm_profile_profiler import versions
from lockstep.cli.clusters.comm_profile_rank import Request
from lockstep.cli.clusters.comm_profile_rank import command as profile_argv
from lockstep.cli.clusters.plan_probes import Probe, Prober, Shape
from lockstep.config import TrainConfig
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import is_elementwise
from lockstep.engine.recovery import SURVIVABLE
from lockstep.engine.step.memory import Kept, Needs, memory_limits
from lockstep.engine.step.model import built, trainable_groups
from lockstep.engine.task import Task
from lockstep.launching.start import launcher_command
from lockstep.launching.targets import make_task
from lockstep.nn.cutting import shards_of, units_of
from lockstep.nn.row import row_of
from lockstep.parallel.fold import rows_needed
from lockstep.parallel.layout import Range
from lockstep.planning.measurements import Anatomy, Facts, Group, Timed
from lockstep.planning.operations import MOST_BYTES
from lockstep.planning.profile import Profile


def anatomy(kind: type[Task], config: TrainConfig) -> Anatomy:
    """Build the model and the optimizer, and measure their sizes.

    Raises:
        LockstepError: one of them cannot work.
    """
    model, compute, optimizer, _ = built(make_task(kind, config), config, torch.device("cpu"))
    shards, row = shards_of(model), row_of(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    flat = FlatTensors(
        trainable_groups(model, optimizer), "parameter", shards, units_of(model),
        by_block=row is not None,
    )  # fmt: skip
    needs = Needs(config, Kept(flat, optimizer), can_regroup=False)
    return Anatomy(
        num_parameters=num_parameters,
        gradient_bytes=needs.parameters,
        largest_bytes=needs.largest,
        state_bytes=needs.states,
        num_blocks=len(row.groups) if row is not None and row.has_stages else 1,
        num_shards=config.num_shards if shards else 1,
        is_elementwise=is_elementwise(optimizer),
        has_tables=bool(compute.lookups.tables),
    )


_LEAST_BYTES = 1024
_TIMES_CORES = 2
"""Ranks of a host are measured up to so many times its cores."""


@dataclass(frozen=True)
class Measuring:
    """The measurements to make.

    Attributes:
        target: recipe, or `file.py:Task` with the whole path.
        kind: its class.
        config: its config.
        overrides: `key=value` items that made it.
        numbers: numbers of ranks that are planned.
        ranks_per_host: most ranks of a host.
        cores: cores of this one, or GPUs that ranks compute on.
        launcher: what starts several ranks.
        seconds: time that steps of a training are measured for, about.
        rounds: how often each training is done, in turn.
        server: the warm server that several ranks are forked from; empty if there is none.
    """

    target: str
    kind: type[Task]
    config: TrainConfig
    overrides: tuple[str, ...]
    numbers: tuple[int, ...]
    ranks_per_host: int
    cores: int
    launcher: str
    seconds: float
    rounds: int = 1
    server: str = ""

    @property
    def most_here(self) -> int:
        """Most ranks that are measured on this host at the same time."""
        if device_of(self.config) != "cpu":
            return min(self.ranks_per_host, self.cores)  # each rank has a GPU of its own
        return max(2, min(self.ranks_per_host, _TIMES_CORES * self.cores))


def device_of(config: TrainConfig) -> str:
    """The device that a plan of a config is for."""
    return "cpu" if config.device == "auto" else config.device


def measure(measuring: Measuring, say: Callable[[str], None]) -> Facts:
    """Train for a few steps in each required shape, and time messages of the task's sizes.

    Args:
        measuring: measurements to make.
        say: called with a description of each activity.

    Raises:
        LockstepError: the task cannot be trained, or a rank was lost.
    """
    config = measuring.config
    say("building the model")
    parts = anatomy(measuring.kind, config)
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-", ignore_cleanup_errors=True) as name:
        prober = Prober(
            measuring.target, config, measuring.overrides, Path(name), measuring.launcher,
            measuring.seconds, measuring.server,
        )  # fmt: skip
        say("a step on two ranks")
        pair = prober.first(2 if max(measuring.numbers) > 1 else 1)
        wanted, together = shapes(measuring, parts), groups(measuring)
        best = _fastest(prober, [*wanted, *together], measuring.rounds, say)
        alone, timed = best[wanted[0]][0], [best[shape][1] for shape in wanted]
        busiest = max(wanted, key=lambda s: (s.num_copies <= measuring.cores, s.num_copies))
        if busiest.num_copies > 1:
            say(f"{busiest.name}, step by step")
            timed.append(prober.timed(busiest, single=True)[1])
    # The memory of a single rank that computes one microbatch.
    rows = rows_needed(Range(0, config.num_microbatches), config.num_microbatches)
    lean_bytes = alone.peak_bytes - (rows - 1) * parts.gradient_bytes
    saved = alone.checkpoints
    return Facts(
        task=measuring.target,
        overrides=measuring.overrides,
        config_hash=config.hash,
        measured_at=time.time(),
        versions=versions(measuring.launcher),
        host=socket.gethostname(),
        cores=measuring.cores,
        memory_bytes=alone.device_bytes or max(0, min(free for _, free in memory_limits())),
        launcher=measuring.launcher,
        batch_size=int(alone.plan["batch_size"]),
        num_microbatches=config.num_microbatches,
        total_steps=config.steps or config.epochs * int(alone.plan["steps_per_epoch"]),
        buddy=config.optimizer.buddy and measuring.launcher in SURVIVABLE,
        anatomy=parts,
        timed=tuple(timed),
        groups=tuple(
            Group(shape.num_replicas, best[shape][1].step_s, best[shape][1].peak_bytes)
            for shape in together
        ),
        messages=tuple(_profiles(measuring, parts, say)),
        group_bytes=max(0, pair.peak_bytes - lean_bytes),
        start_s=pair.started_s,
        checkpoint_bytes=int(saved[0]["num_bytes"]) if saved else 0,
        checkpoint_s=statistics.median([row["stall_s"] for row in saved]) if saved else 0.0,
        write_s=statistics.median([row["write_s"] for row in saved]) if saved else 0.0,
        device=device_of(config),
    )


def _fastest(
    prober: Prober, wanted: Sequence[Shape], rounds: int, say: Callable[[str], None]
) -> dict[Shape, tuple[Probe, Timed]]:
    """The fastest training of each shape: other work on the machine can only slow one down.

    The memory is the most of all trainings: how much is in use at a time varies.
    """
    found: dict[Shape, list[tuple[Probe, Timed]]] = {shape: [] for shape in wanted}
    for number in range(rounds):
        for shape in wanted:
            say(f"{shape.name}, round {number + 1} of {rounds}")
            found[shape].append(prober.timed(shape))
    best = {}
    for shape, tried in found.items():
        probe, timed = min(tried, key=lambda pair: pair[1].step_s)
        peak_bytes = max(each.peak_bytes for _, each in tried)
        best[shape] = probe, replace(timed, peak_bytes=peak_bytes)
    return best


def groups(measuring: Measuring) -> list[Shape]:
    """The trainings of several ranks that communicate, up to the most ranks of this host."""
    numbers = {min(number, measuring.most_here) for number in measuring.numbers if number > 1}
    return [
        Shape(measuring.config.num_microbatches, num_replicas=number) for number in sorted(numbers)
    ]


def shapes(measuring: Measuring, parts: Anatomy) -> list[Shape]:
    """The trainings without communication; the first is one rank that computes everything."""
    num, most = measuring.config.num_microbatches, measuring.most_here
    wanted = [Shape(num)]
    for number in sorted(measuring.numbers):
        copies = min(number, most)
        wanted.append(Shape(-(-num // min(number, num)), copies))
        if number > most:  # others follow from a line through two
            wanted += [Shape(1, copies), Shape(min(2, num), copies)]
    for pp, tp in _replicas(measuring, parts):
        fitting = [n // (pp * tp) for n in measuring.numbers if n >= pp * tp]
        if fitting:
            counts = {-(-num // replicas) for replicas in fitting} | {1, num}
            wanted += [Shape(k, pp=pp, tp=tp) for k in sorted({min(counts), max(counts)})]
    return list(dict.fromkeys(wanted))


def _replicas(measuring: Measuring, parts: Anatomy) -> list[tuple[int, int]]:
    """Replicas of several ranks that this host has cores for."""
    if not parts.is_elementwise:
        return []
    sizes = range(1, measuring.cores + 1)
    return [
        (pp, tp)
        for pp in sizes
        for tp in sizes
        if 1 < pp * tp <= measuring.cores and pp <= parts.num_blocks and tp <= parts.num_shards
    ]


def _profiles(measuring: Measuring, parts: Anatomy, say: Callable[[str], None]) -> list[Profile]:
    """The cost of messages of the task's sizes among the ranks of each group.

    Raises:
        LockstepError: ranks could not be started, or one was lost.
    """
    device = device_of(measuring.config)
    request = Request(message_sizes(parts), measuring.seconds, device, with_torch=False)
    found = []
    for shape in groups(measuring):
        say(f"messages among {shape.num_replicas} ranks")
        argv = profile_argv(request)
        command = launcher_command(measuring.launcher, shape.num_replicas, argv)
        found.append(profile_of(command, measuring.seconds))
    return found


def message_sizes(parts: Anatomy) -> tuple[int, ...]:
    """Sizes at which collectives are measured: near those that layouts of the model exchange."""
    whole = parts.gradient_bytes
    sizes = (_LEAST_BYTES, whole // 4, whole // 2, whole, 2 * whole, 4 * whole)
    return tuple(sorted({min(max(size, _LEAST_BYTES), MOST_BYTES) for size in sizes}))
