"""Checks that a rank has the memory for what a step keeps, before it is allocated."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from lockstep.comm.host import control_groups
from lockstep.config import TrainConfig, override
from lockstep.config.train_config import Sharding
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import parts_of
from lockstep.errors import ConfigError
from lockstep.nn.row import row_of
from lockstep.nn.units import rows_in
from lockstep.parallel.fold import rows_needed
from lockstep.parallel.layout import Range

_GIB, _MIB = 1 << 30, 1 << 20
_MOST_RANKS = 4096
_STATM = Path("/proc/self/statm")
"""Pages of this process: all, and those in memory."""


class Kept(NamedTuple):
    """What a step keeps memory of beside what the config says.

    Attributes:
        flat: trainable parameters of this rank's column.
        optimizer: optimizer of the parameters.
        has_phases: whether a step may have gradients of some parameters only.
        inner: optimizer of workers (`local.steps`), over copies in the groups of `optimizer`.
        gathered: bytes of the rows of a whole batch (`Task.batch_loss`).
    """

    flat: FlatTensors
    optimizer: optim.Optimizer
    has_phases: bool = False
    inner: optim.Optimizer | None = None
    gathered: int = 0


class Needs:
    """The least bytes that a rank keeps of parameters, gradients and optimizer state.

    Activations, and what ranks exchange, come on top.

    Attributes:
        parameters: of all trainable parameters.
        largest: of the largest block of the model, or else of all parameters of a dtype.
        states: of the optimizer's state of all parameters.
    """

    def __init__(self, config: TrainConfig, kept: Kept, can_regroup: bool) -> None:
        """Count.

        Args:
            config: config of the run.
            kept: what memory is kept of.
            can_regroup: whether ranks keep slices and carries of others too, where the config says
                so.
        """
        flat, inner = kept.flat, kept.inner
        sizes = [s.numel * s.dtype.itemsize for s in flat.segments]
        self.parameters = sum(sizes)
        self.largest = max(sizes)
        self.states = _bytes_of_states(flat, kept.optimizer)
        # A microbatch's gradient; there may be one of a few parameters only.
        self._gradient = 0 if kept.has_phases else self.parameters
        self._copies = 2 if can_regroup and config.optimizer.buddy else 1
        # What is compressed is summed without rows of a tree.
        is_compressed = config.compression.name != "none"
        feeds_back = is_compressed and config.compression.error_feedback
        self._num_microbatches = 1 if is_compressed else config.num_microbatches
        leaves = self.parameters * config.num_microbatches
        # Gradients of low rank are needed until the second sum.
        self._waiting = leaves if config.compression.name == "lowrank" else 0
        # Committed ones, and those that the step makes.
        self._errors = 2 * leaves if feeds_back else 0
        # Parameters of the worker that is computed, and how far it has come.
        self._worker = 2 * self.parameters if inner else 0
        self._gathered = kept.gathered
        # State of its optimizer: as of the last step, and what this one makes of it.
        inner_states = _bytes_of_states(flat, inner) if inner else 0
        self._workers = 2 * inner_states * config.num_microbatches
        # Both are carries, which all are copied or none (`CompressedCarries.are_copied`).
        is_copied = config.carry.buddy and (config.compression.buddy or not feeds_back)
        self._carried = 2 if can_regroup and is_copied else 1

    def of(self, sharding: Sharding, num_ranks: int, whole_blocks: int = 1) -> int:
        """Bytes of each of some ranks that share out microbatches and slices; see `kept_bytes`."""
        carries = (self._workers + self._errors) * min(self._carried, num_ranks)
        # Waiting gradients become errors.
        waiting = 0 if self._errors else self._waiting
        return (
            self._worker
            + self._gathered
            + (carries + waiting) // num_ranks
            + kept_bytes(
                sharding,
                num_ranks,
                self._num_microbatches,
                parameters=self.parameters,
                gradient=self._gradient,
                largest=self.largest,
                states=self.states,
                copies=self._copies,
                whole_blocks=whole_blocks,
            )
        )


def kept_bytes(
    sharding: Sharding,
    num_ranks: int,
    num_microbatches: int,
    *,
    parameters: int,
    gradient: int,
    largest: int,
    states: int,
    copies: int,
    whole_blocks: int,
) -> int:
    """Bytes that each of some ranks keeps of parameters, gradients and optimizer state.

    Args:
        sharding: what ranks keep their slice of only.
        num_ranks: ranks that share out microbatches and slices.
        num_microbatches: microbatches of a step.
        parameters: bytes of all trainable parameters.
        gradient: bytes of a microbatch's gradient.
        largest: bytes of the largest block of the model.
        states: bytes of the optimizer's state of all parameters.
        copies: slices that each rank keeps: 2 with a buddy, else 1.
        whole_blocks: blocks whose parameters a rank has at a time, of `sharding=parameters`: at
            least 1, and 2 where the next one is gathered while one is computed.
    """
    copies = min(copies, num_ranks)
    slices = parameters * copies // num_ranks
    own_states = states if sharding == "none" else states * copies // num_ranks
    # Of slices just stepped there are copies, with a buddy (`Workspace.keep_aside`).
    aside = slices if copies > 1 and sharding in ("optimizer", "gradients") else 0
    if sharding in ("none", "optimizer"):
        rows = rows_needed(Range(0, -(-num_microbatches // num_ranks)), num_microbatches)
        return (1 + rows) * parameters + gradient + own_states + aside
    # The fold's rows have this rank's own slice; a gradient is whole for a block only.
    rows = rows_needed(Range(0, num_microbatches), num_microbatches)
    sums = rows * parameters // num_ranks + slices - parameters // num_ranks
    whole = min(whole_blocks * largest, parameters)
    kept = slices + whole if sharding == "parameters" else parameters + aside
    return kept + largest + sums + own_states


def check_memory(
    config: TrainConfig, model: torch.nn.Module, kept: Kept, num_ranks: int, can_regroup: bool
) -> None:
    """Refuse a run for which a rank's memory cannot suffice, and say what would.

    Args:
        config: config of the run.
        model: model of which `kept.flat` has the trainable parameters.
        kept: what memory is kept of.
        num_ranks: number of ranks of the column.
        can_regroup: whether survivors can go on without ranks that die.

    Raises:
        ConfigError: a limit of this process (`ulimit -v`, a control group, the host's memory) is
            less than what the run needs at least.
    """
    needs = Needs(config, kept, can_regroup)
    sharding: Sharding = config.sharding
    if sharding == "none" and config.optimizer.sharded:
        sharding = "optimizer"
    needed = needs.of(sharding, num_ranks)
    device = kept.flat.flats[0].device
    limit, available = f"free on {device}", device_memory(device)[0]
    if device.type == "cpu":
        limit, available = min(memory_limits(), key=lambda pair: pair[1])
    elif not available:
        return  # it does not say
    # Parameters that have values are there already.
    available += sum(flat.untyped_storage().nbytes() for flat in kept.flat.flats)
    if needed <= available:
        return
    lean = Needs(config, kept._replace(inner=None), can_regroup=False)
    has_blocks = row_of(model) is not None or rows_in(model)
    kind: Sharding = "parameters" if has_blocks else "gradients"
    if kept.gathered:  # does not go with more
        kind = "optimizer"
    enough = (n for n in range(num_ranks, _MOST_RANKS) if lean.of(kind, n, 2) <= available)
    number = next(enough, None)
    remedy = "use a smaller model, or give ranks more memory"
    if kept.inner:  # does not go with sharding
        remedy = f"{remedy}; or have fewer workers (num_microbatches), or more ranks"
    elif config.compression.name == "none" and number is not None:  # nor does compression
        remedy = (
            f"sharding={kind} optimizer.buddy=false needs {_gib(lean.of(kind, number, 2))} on each "
            f"of {number} ranks"
        )
    if kept.gathered:
        remedy = f"{remedy}; or set a smaller batch_size"
    for key in ("carry.buddy", "compression.error_feedback"):
        thin = Needs(override(config, [f"{key}=false"]), kept, can_regroup)
        less = thin.of(sharding, num_ranks)
        if less <= available:
            remedy = f"{remedy}; {key}=false needs {_gib(less)}"
    subject = "parameters, gradients and optimizer state"
    if kept.gathered:
        outputs = f"{_gib(kept.gathered)} of gathered outputs"
        subject = f"parameters, gradients, optimizer state and {outputs}"
    raise ConfigError(
        f"memory: a rank needs at least {_gib(needed)} for {subject} (sharding={sharding}, "
        f"world size {num_ranks}), and has {_gib(available)} ({limit}); {remedy}"
    )


def check_table_memory(
    num_bytes: Mapping[str, int], num_ranks: int, with_buddy: bool, device: torch.device
) -> None:
    """Refuse a run whose tables do not fit into a rank's memory.

    Args:
        num_bytes: size of each table, with what is kept of its rows, by name.
        num_ranks: number of ranks.
        with_buddy: whether each rank keeps the rows of another one too.
        device: device that they are to be on.

    Raises:
        ConfigError: a limit of this process is less than they take.
    """
    if device.type != "cpu" or not num_bytes:
        return
    whole, copies = sum(num_bytes.values()), min(1 + with_buddy, num_ranks)
    needed = whole * copies // num_ranks
    limit, available = min(memory_limits(), key=lambda pair: pair[1])
    if needed <= available:
        return
    number = -(-whole // max(available, 1))
    remedy = "use smaller tables, or give ranks more memory"
    if number <= _MOST_RANKS:
        remedy = f"tables.buddy=false needs {_gib(whole // number)} on each of {number} ranks"
    raise ConfigError(
        f"memory: a rank needs {_gib(needed)} for the rows of {', '.join(num_bytes)} (world size "
        f"{num_ranks}), and has {_gib(available)} ({limit}); {remedy}"
    )


def _bytes_of_states(flat: FlatTensors, optimizer: optim.Optimizer) -> int:
    """Bytes that optimizers keep of all parameters, of those optimizers that it is known of."""
    sizes = [0] * len(optimizer.param_groups)
    for piece in flat.pieces:
        sizes[piece.group] += len(piece.range) * flat.segments[piece.segment].dtype.itemsize
    parts = parts_of(optimizer).values()
    groups = [(part, group) for part in parts for group in part.param_groups]
    return sum(
        _num_states(part, group) * size for (part, group), size in zip(groups, sizes, strict=True)
    )


def _num_states(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> int:
    """Numbers that an optimizer keeps for each element of a group."""
    if isinstance(optimizer, (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax)):
        return 2
    if isinstance(optimizer, optim.SGD):
        return int(bool(group["momentum"]))
    return int(isinstance(optimizer, (optim.Adagrad, optim.RMSprop)))


def memory_limits() -> Iterator[tuple[str, int]]:
    """What this process may still take, by what limits it; more than there is without a limit."""
    page = resource.getpagesize()
    try:
        size, resident = (int(n) * page for n in _STATM.read_text().split()[:2])
    except OSError:  # no Linux
        size = resident = 0
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield f"ulimit -v {soft // 1024}", soft - size
    for is_unified, folder in control_groups("memory"):
        path = folder / ("memory.max" if is_unified else "memory.limit_in_bytes")
        try:
            yield str(path), int(path.read_text()) - resident
        except (OSError, ValueError):
            continue
    yield "the host's memory", os.sysconf("SC_PHYS_PAGES") * page - resident


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a device that are free, and all of them; 0 on CPUs, or if it does not say."""
    if device.type == "cpu":
        return 0, 0
    try:
        free, whole = torch.accelerator.get_memory_info(device)
        kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(
            device
        )
    except (RuntimeError, AttributeError):
        return 0, 0
    return free + kept, whole


def held(device: torch.device, kinds: Mapping[str, Iterable[Tensor | None]]) -> str:
    """What holds a rank's memory, in words.

    Args:
        device: device of the rank.
        kinds: tensors by what they are.
    """
    seen, known, parts = set[int](), 0, list[str]()
    for name, tensors in kinds.items():
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if t is not None
        }
        num_bytes = sum(size for place, size in storages.items() if place not in seen)
        seen |= storages.keys()
        known += num_bytes
        parts.append(f"{name} {num_bytes / _MIB:,.1f} MiB")
    if device.type != "cpu" and (allocated := torch.accelerator.memory_allocated(device)):
        parts.append(f"activations and the rest {max(0, allocated - known) / _MIB:,.1f} MiB")
    return "held were: " + ", ".join(parts)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
