"""A model in shards: cutting it, keeping a rank's part of it, and names of whole tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, TaskError
from lockstep.nn.holding import EVERYWHERE, WHOLE, Holding, Unit, release
from lockstep.nn.row import row_of
from lockstep.nn.sharded.layers import DIVIDED, ShardedModule, watch_backward_hooks
from lockstep.nn.sharded.regions import Region
from lockstep.parallel.axes import ShardAxis
from lockstep.parallel.layout import split


class Shard(NamedTuple):
    """What a parameter of a cut model is a part of."""

    whole: str
    """Name of the whole tensor, as in the model's `state_dict`."""
    number: int
    """Number of the shard."""
    dim: int
    """Dimension that the whole tensor is cut along."""
    shape: torch.Size
    """Shape of the whole tensor."""
    of: int
    """Number of shards of the whole tensor."""


def cut(model: nn.Module, num_shards: int) -> None:
    """Cut the layers of a model that can be cut, all shards of which this process then computes.

    Args:
        model: model that `lockstep.nn.shard` has marked, or that is made of layers of
            `lockstep.nn`.
        num_shards: number of shards of each layer.

    Raises:
        ConfigError: there is no such layer, or a width does not divide.
    """
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, ShardedModule)]
    if not layers:
        raise ConfigError(
            f"num_shards={num_shards}: the model has no layers that can be cut into shards; mark "
            "them in build_model with lockstep.nn.shard(model, plan), or leave num_shards at 1"
        )
    _check_sharing(model, num_shards)
    made: dict[int, list[nn.Parameter]] = {}
    # Held while modules are cut: the id of a parameter that is gone may be another one's.
    wholes = list(model.parameters())
    for name, module in layers:
        module.cut(num_shards, made, name)
    del wholes
    watch_backward_hooks(model)
    for name, module in model.named_modules():
        for attribute in getattr(module, DIVIDED, ()):
            value = getattr(module, attribute)
            if value % num_shards:
                raise ConfigError(
                    f"num_shards={num_shards}: {name}.{attribute} is {value}, which does not "
                    "divide into so many shards"
                )
            setattr(module, attribute, value // num_shards)
    compute_in(model, Region(ShardAxis(num_shards)))


def _check_sharing(model: nn.Module, num_shards: int) -> None:
    """Refuse a parameter of several modules of which not all cut it alike: they would part.

    Raises:
        ConfigError: naming the parameter.
    """
    ways: dict[int, dict[int | None, str]] = {}
    for prefix, module in model.named_modules():
        dims = module.cut_dims if isinstance(module, ShardedModule) else {}
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{key}" if prefix else key
                ways.setdefault(id(parameter), {}).setdefault(dims.get(key), name)
    for found in ways.values():
        if len(found) > 1:
            first, other = list(found.values())[:2]
            raise ConfigError(
                f"num_shards={num_shards}: {first} and {other} are one parameter, which is not cut "
                "alike in both places; let the plan cut both layers along the same dimension, or "
                "neither"
            )


def region_of(model: nn.Module) -> Region | None:
    """The region that a cut model computes the shards of; None if it is not cut."""
    modules = (module for module in model.modules() if isinstance(module, ShardedModule))
    return next((m.region for m in modules if m.region is not None), None)


def compute_in(model: nn.Module, region: Region) -> None:
    """Have a cut model compute the shards of a region from now on."""
    region.model = weakref.ref(model)
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.region = region


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """What each parameter in shards is a part of, by its name in the cut model."""
    shards: dict[str, Shard] = {}
    # A module that is at two places has two names in the `state_dict` too.
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ShardedModule):
            dot = f"{prefix}." if prefix else ""
            for key, shape in getattr(module, "whole_shapes", {}).items():
                for number in range(module.num_shards):
                    name = f"{dot}{key}_{number}"
                    shards[name] = Shard(
                        dot + key, number, module.cut_dims[key], shape, module.num_shards
                    )
    return shards


def units_of(model: nn.Module) -> dict[str, Unit]:
    """The unit of each parameter that not every rank need hold, by its name in the cut model.

    A parameter of several blocks belongs to the first of them.
    """
    shards = shards_of(model)
    row = row_of(model)
    if row is None:
        return {name: Unit(shard=shard.number) for name, shard in shards.items()}
    return {
        name: Unit(block, shards[name].number if name in shards else WHOLE)
        for name, block in row.homes().items()
    }


def keep(model: nn.Module, own: Holding) -> None:
    """Free the parameters of all units but some."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    units = units_of(model)
    row = row_of(model)
    copies = {name for tie in row.ties for name in tie.names} if row is not None else set()
    for name, unit in units.items():
        if name not in copies and not own.has(unit):
            release(parameters[name])
    if row is not None:
        row.ties.take_place(own, units)


def check_state_dict(model: nn.Module) -> None:
    """Refuse a model in blocks or shards whose `state_dict` is not its parameters and buffers.

    Ranks that have a part of it cannot run the code that makes it something else.

    Raises:
        TaskError: naming a tensor.
    """
    if not units_of(model):
        return
    shards = shards_of(model)
    wholes = {shard.whole for shard in shards.values()}
    own = dict(model.named_buffers(remove_duplicate=False))
    own |= dict(model.named_parameters(remove_duplicate=False))
    own = dict(joined_by_name(own, shards))
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        there = own.get(name)
        if name in wholes:
            is_own = there is not None and torch.equal(tensor, there)
        else:  # by memory: elements that are alike look the same in another order
            is_own = there is not None and tensor.is_set_to(there)
        if not is_own:
            raise TaskError(
                f"build_model: a hook, or a state_dict of the module's own, gives something else "
                f"for {name} than the parameter or buffer, which a model in blocks or shards is "
                "saved by; remove it, or keep the model whole (no Pipeline or lockstep.nn.stages, "
                "sharding=gradients at most, no mesh.pp and mesh.tp)"
            )


def every_tensor(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by name in the cut model.

    Those that this rank does not have are there with their shapes. Of a model that is not cut this
    is its `state_dict`.
    """
    wholes = {shard.whole for shard in shards_of(model).values()}
    tensors = {name: t for name, t in model.state_dict().items() if name not in wholes}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return tensors | {name: parameters[name].detach() for name in units_of(model)}


def held_tensors(model: nn.Module, own: Holding) -> dict[str, Tensor]:
    """Those of `every_tensor` that a rank which holds `own` has."""
    units = units_of(model)
    return {
        name: tensor
        for name, tensor in every_tensor(model).items()
        if own.has(units.get(name, EVERYWHERE))
    }


def load_held(model: nn.Module, own: Holding, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `held_tensors` gave, or a `state_dict`, into the model."""
    here = held_tensors(model, own)
    if not units_of(model) or not here.keys() >= tensors.keys():
        model.load_state_dict(tensors)
        return
    with torch.no_grad():
        for name, tensor in tensors.items():
            here[name].copy_(tensor)


def joined_by_name(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by name, of tensors by their names in the cut model.

    Args:
        tensors: all shards of what is cut, and what is not.
        shards: what each tensor in shards is a part of.
    """
    pieces: dict[str, dict[int, Tensor]] = {}
    dims: dict[str, int] = {}
    for name, tensor in tensors.items():
        shard = shards.get(name)
        if shard is None:
            yield name, tensor
        else:
            pieces.setdefault(shard.whole, {})[shard.number] = tensor
            dims[shard.whole] = shard.dim
    for whole, of_whole in pieces.items():
        ordered = [of_whole[number] for number in sorted(of_whole)]
        yield whole, torch.cat(ordered, dims[whole])


def found(
    tensors: Mapping[str, Tensor], name: str, shards: Mapping[str, Shard], prefix: str = ""
) -> Tensor | None:
    """The tensor of a name in the cut model: there by that name, or as a part of a whole one.

    Args:
        tensors: tensors by name, whole ones or shards.
        name: name in the cut model.
        shards: what each tensor in shards is a part of.
        prefix: what names in `tensors` begin with.
    """
    if prefix + name in tensors:
        return tensors[prefix + name]
    shard = shards.get(name)
    if shard is None or prefix + shard.whole not in tensors:
        return None
    own = split(shard.shape[shard.dim], shard.of)[shard.number]
    return tensors[prefix + shard.whole].narrow(shard.dim, own.first, len(own))
