"""Whole tensors of a model that is shared out over ranks, on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.engine.digests import model_digest, tensors_digest
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.places import Places
from lockstep.nn.cutting import every_tensor, held_tensors, joined_by_name, shards_of, units_of
from lockstep.nn.units import Unit


@dataclass(frozen=True)
class WholeTensors:
    """Copies in host memory.

    Attributes:
        model: parameters and persistent buffers by name.
        optimizer: tensors of an element-wise optimizer's state by "key/parameter".
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def whole_tensors(
    places: Places, model: nn.Module, flat: FlatTensors, state: OptimizerState | None
) -> WholeTensors | None:
    """All tensors on rank 0, None on the others; a collective of all ranks.

    Args:
        places: place of each rank on the mesh.
        model: model of this rank.
        flat: its trainable parameters in flat memory.
        state: this rank's part of the optimizer's state, if that is wanted too.
    """
    if places.replica_number != 0:
        return None
    shards, units = shards_of(model), units_of(model)
    here, everywhere = held_tensors(model, places.own), every_tensor(model)
    tensors = dict(joined_by_name(_gathered(places, here, everywhere, units), shards))
    optimizer = {}
    flats = state.flats if state else {}
    # A rank that trains no parameter has no state of any.
    for key in sorted({key for keys in places.replica.gather_json(list(flats)) for key in keys}):
        here = flat.named(flats[key]) if key in flats else {}
        everyone = _gathered(places, here, flat.everyone, flat.units)
        for name, tensor in joined_by_name(everyone, flat.shards):
            optimizer[f"{key}/{name}"] = tensor
    return WholeTensors(tensors, optimizer) if places.world.rank == 0 else None


def whole_digest(
    places: Places, model: nn.Module, flat: FlatTensors, buffers: Mapping[str, Tensor]
) -> str:
    """`model_digest` of the whole model; a collective of all ranks."""
    if not places.is_split:
        return model_digest(model, buffers)
    whole = whole_tensors(places, model, flat, None)
    digest = tensors_digest(whole.model | dict(buffers)) if whole else ""
    return str(places.world.gather_json(digest)[0])


def _gathered(
    places: Places,
    own: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    units: Mapping[str, Unit],
) -> dict[str, Tensor]:
    """Tensors by name, on rank 0 those of all ranks of its replica, in host memory.

    Args:
        places: place of each rank on the mesh.
        own: tensors that this rank holds.
        likes: all tensors; those that this rank does not hold count with their shapes only.
        units: unit of each tensor that not every rank need hold.
    """
    is_first = places.world.rank == 0
    gathered = {n: t.detach().to("cpu", copy=True) for n, t in own.items() if n not in units}
    for name, like in likes.items():
        if name not in units:
            continue
        tensor = own.get(name)
        if tensor is None:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        places.replica.broadcast(flat, places.holder(units[name]))
        if is_first:
            gathered[name] = flat.view(tensor.dtype).view(tensor.shape).to("cpu", copy=True)
    return gathered
