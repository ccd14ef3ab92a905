"""Whether a snapshot is one of this model, and of this optimizer."""

from __future__ import annotations

from torch import nn

from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.optimizer.optimizer_state import TENSOR
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.tables.files import check_described
from lockstep.engine.tables.lookups import tables_of
from lockstep.errors import CheckpointError


def check_fits(snapshot: Snapshot, model: nn.Module, where: str) -> None:
    """Refuse a snapshot of another model.

    Raises:
        CheckpointError: names the first parameter or buffer that differs.
    """
    own = model.state_dict()
    for name in dict.fromkeys([*own, *snapshot.model]):
        if name not in snapshot.model:
            raise CheckpointError(f"{where}: is of another model: it has no {name}")
        if name not in own:
            raise CheckpointError(f"{where}: is of another model: this one has no {name}")
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in snapshot.buffers:
        if name not in buffers:
            raise CheckpointError(f"{where}: is of another model: this one has no {name}")
    for name, there in (snapshot.model | snapshot.buffers).items():
        here = own[name] if name in own else buffers[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise CheckpointError(
                f"{where}: is of another model: {name} is {there.dtype} {tuple(there.shape)} "
                f"there, {here.dtype} {tuple(here.shape)} here"
            )
    check_described(tables_of(model), snapshot.meta.get("tables", {}), where)


def check_optimizer_fits(snapshot: Snapshot, train_step: TrainStep, where: str) -> None:
    """Refuse a snapshot of another optimizer; old ones do not say all of theirs.

    A hyperparameter that only one of them has, as of another version of torch, is not compared.

    Raises:
        CheckpointError: names the first thing that differs.
    """
    here, there = train_step.flat_optimizer.description, snapshot.meta.get("optimizer", {})
    for name in [n for n in (there | here) if there]:
        in_both = name in here and name in there
        if here.get(name) != there.get(name) and (in_both or " of group " not in name):
            raise CheckpointError(
                f"{where}: was trained with another optimizer: {name} is {there.get(name)!r} "
                f"there, {here.get(name)!r} here; resume with the same optimizer or start a new run"
            )
    if train_step.tables is not None:
        tables = {dealt.name: dealt.table for dealt in train_step.tables.each}
        check_described(tables, snapshot.meta.get("tables"), where, ("optimizer", "schedule"))
    wholes = train_step.flat.wholes
    saved = {(n.partition("/")[0], n.partition("/")[2]): t for n, t in snapshot.optimizer.items()}
    if train_step.flat_optimizer.elementwise:
        wanted = {(key, name) for key, _ in saved for name in wholes}
    else:
        scalars = snapshot.meta["optimizer_scalars"]
        wanted = {(k, n) for n, kept in scalars.items() for k, v in kept.items() if v == TENSOR}
    for key, name in [*saved, *wanted]:
        tensor = saved.get((key, name))
        if tensor is None or name not in wholes:
            raise CheckpointError(f"{where}: is damaged: optimizer state {key}/{name} does not fit")
        if train_step.flat_optimizer.elementwise and (tensor.shape, tensor.dtype) != wholes[name]:
            shape, dtype = wholes[name]
            raise CheckpointError(
                f"{where}: is damaged: optimizer state {key}/{name} is {tensor.dtype} "
                f"{tuple(tensor.shape)}, must be {dtype} {tuple(shape)}"
            )
