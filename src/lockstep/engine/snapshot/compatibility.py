"""Whether a snapshot belongs to this model and this optimizer; loading one that does.

Torch's own optimizers have the same state from their first step on, so the state that one of them
has can be found by stepping a small one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.config.parsing import shown
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.optimizer import fast_steps
from lockstep.engine.optimizer.choice import ELEMENTWISE
from lockstep.engine.optimizer.optimizer_state import TENSOR, tensor_names, to_json
from lockstep.engine.snapshot.resumable import SavedShared
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.tables.files import check_described, load_whole
from lockstep.engine.tables.run_tables import tables_of
from lockstep.errors import CheckpointError

_TENSOR = "tensor"


def check_fits(snapshot: Snapshot, model: nn.Module, where: str) -> None:
    """Refuse a snapshot of another model.

    Raises:
        CheckpointError: naming the first parameter or buffer that differs.
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
    for name, there in (dict(snapshot.model) | snapshot.buffers).items():
        here = own[name] if name in own else buffers[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise CheckpointError(
                f"{where}: is of another model: {name} is {there.dtype} {tuple(there.shape)} "
                f"there, {here.dtype} {tuple(here.shape)} here"
            )
    check_described(tables_of(model), snapshot.meta.get("tables", {}), where)


def load_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Load a snapshot that fits into a model, with all rows of its tables.

    Raises:
        CheckpointError: the rows of a table cannot be read.
    """
    model.load_state_dict(snapshot.model)
    tables = tables_of(model)
    if tables:
        assert snapshot.folder is not None, "it was read from disk"
        load_whole(tables, snapshot.folder, next(iter(model.parameters())).device)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in snapshot.buffers.items():
        buffers[name].copy_(tensor)


def check_optimizer_fits(snapshot: Snapshot, train_step: TrainStep, where: str) -> None:
    """Refuse a snapshot of another optimizer; old ones do not name all hyperparameters.

    A hyperparameter that only one of them has, due to another version of torch, is not compared.

    Raises:
        CheckpointError: naming the first thing that differs.
    """
    here, there = train_step.optimizer_description, snapshot.meta.get("optimizer", {})
    for name in [n for n in (there | here) if there]:
        in_both = name in here and name in there
        if here.get(name) != there.get(name) and (in_both or " of group " not in name):
            raise CheckpointError(
                f"{where}: was trained with another optimizer: {name} is {there.get(name)!r} "
                f"there, {here.get(name)!r} here; resume with the same optimizer or start a new run"
            )
    if train_step.tables is not None:
        tables = {distributed.name: distributed.module for distributed in train_step.tables.each}
        check_described(tables, snapshot.meta.get("tables"), where, ("optimizer", "schedule"))
    wholes = train_step.flat.wholes
    saved = {(n.partition("/")[0], n.partition("/")[2]): t for n, t in snapshot.optimizer.items()}
    if train_step.flat_optimizer.elementwise:
        wanted = {(key, name) for key, _ in saved for name in wholes}
    else:
        scalars = snapshot.meta["optimizer_scalars"]
        wanted = {
            (each, owner)
            for owner, values in scalars.items()
            for key, kept in values.items()
            for each in tensor_names(key, kept)
        }
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


def check_optimizer_state(snapshot: Snapshot, train_step: TrainStep, where: str) -> None:
    """Refuse a snapshot whose state does not match the optimizer, if it is one of torch's own.

    Args:
        snapshot: snapshot that `check_training_state` and `fits.check_optimizer_fits` accept.
        train_step: training step of this run.
        where: name of the snapshot in errors.

    Raises:
        CheckpointError: naming what does not match.
    """
    if not (
        train_step.flat_optimizer.elementwise
        and type(train_step.flat_optimizer.optimizer) in ELEMENTWISE
    ):
        return
    # After a step, task and hooks may have changed groups, or cleared the optimizer's state.
    may_change = train_step.task_state.may_change_optimizer or train_step.rates.schedulers
    is_exact = not may_change
    is_exact = is_exact or not snapshot.meta.get("optimizer")  # written by an earlier version
    _check_layout(snapshot, train_step, is_exact, where)
    # With fp16, some steps are skipped.
    least = snapshot.step if is_exact and not train_step.loss_scale.enabled else 0
    for owner, values in snapshot.meta["optimizer_scalars"].items():
        saved: Any = values.get("step", snapshot.step)
        count: Any = saved.get("value") if isinstance(saved, dict) else saved
        is_whole = count.is_integer() if isinstance(count, float) else isinstance(count, int)
        if not is_whole or not least <= count <= snapshot.step:
            raise CheckpointError(
                f"{where}: is damaged: optimizer_scalars.{owner}.step={shown(count)}: cannot be; "
                f"the checkpoint is of step {snapshot.step}"
            )


def _check_layout(snapshot: Snapshot, train_step: TrainStep, is_exact: bool, where: str) -> None:
    """Refuse a snapshot with other state than one of torch's own optimizers has.

    Args:
        snapshot: snapshot to check.
        train_step: training step of this run.
        is_exact: whether only the optimizer itself changes its state.
        where: name of the snapshot in errors.

    Raises:
        CheckpointError: it has other state.
    """
    scalars = snapshot.meta["optimizer_scalars"]
    scale = train_step.loss_scale
    theirs = _Layout(
        {name.partition("/")[0] for name in snapshot.optimizer},
        {owner: {k: _kind(v) for k, v in values.items()} for owner, values in scalars.items()},
    )
    if theirs == _Layout(set(), {}) and (scale.enabled or not snapshot.step):
        return  # no step so far, or all of them were skipped
    own, attributes = _layout(train_step)
    if not any(_TENSOR in values.values() for values in theirs.scalars.values()):
        own = own.without_tensors()  # written by an earlier version
    groups = [group for group, values in theirs.scalars.items() if values]
    fits = all(theirs.scalars[group] == own.scalars.get(group) for group in groups)
    fits = fits and theirs.tensors == (own.tensors if groups else set())
    if theirs != own and (is_exact or not fits):
        raise CheckpointError(
            f"{where}: is of another optimizer: it has {theirs}, this "
            f"{type(train_step.flat_optimizer.optimizer).__name__} keeps {own}"
        )
    for path, state in snapshot.meta.get("optimizer_shared", {}).items() if is_exact else ():
        if path or not SavedShared(**state).holds_only(attributes):
            raise CheckpointError(
                f"{where}: is of another optimizer: optimizer_shared.{shown(path)}="
                f"{shown(state)}, which torch's own do not have"
            )


class _Layout(NamedTuple):
    """State of an optimizer: keys of whole tensors; by group, each key with its dtype."""

    tensors: set[str]
    scalars: dict[str, dict[str, str]]

    def __str__(self) -> str:
        groups = [f"{', '.join(sorted(keys))} of group {g}" for g, keys in self.scalars.items()]
        return "; ".join(filter(None, [", ".join(sorted(self.tensors)), *groups])) or "no state"

    def without_tensors(self) -> _Layout:
        """As earlier versions wrote it, whose scalars did not name the tensors."""
        kept = {
            group: {k: v for k, v in values.items() if v != _TENSOR}
            for group, values in self.scalars.items()
        }
        return _Layout(self.tensors, {group: values for group, values in kept.items() if values})


def _layout(train_step: TrainStep) -> tuple[_Layout, dict[str, Any]]:
    """State of this optimizer, and its attributes, found by stepping small ones of its class."""
    own, flat = train_step.flat_optimizer.optimizer, train_step.flat
    layout = _Layout(set(), {})
    attributes: dict[str, Any] = {}
    for dtype, index in flat.kinds:
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype, device=flat.flats[0].device))
        parameter.grad = torch.zeros_like(parameter)
        trial = type(own)([parameter], lr=1e-3)  # type: ignore[call-arg]
        hyper = own.param_groups[index]
        trial.param_groups[0].update({k: v for k, v in hyper.items() if k != "params"})
        fast_steps.step(trial)
        attributes |= {k: v for k, v in vars(trial).items() if isinstance(v, bool)}
        for key, value in trial.state.get(parameter, {}).items():
            is_whole = isinstance(value, torch.Tensor) and value.dim() > 0
            if is_whole:
                layout.tensors.add(key)
            kind = _TENSOR if is_whole else _kind(to_json(value))
            layout.scalars.setdefault(str(index), {})[key] = kind
    return layout, attributes


def _kind(value: Any) -> str:
    if value == TENSOR:
        return _TENSOR
    return str(value.get("dtype", "")) if isinstance(value, dict) else ""
