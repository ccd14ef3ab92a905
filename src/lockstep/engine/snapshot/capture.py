"""Taking a snapshot of a training state, also of one on several ranks, and loading part of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.share import Scattered, gathered
from lockstep.engine.checkpoint.tensor_files import Kind
from lockstep.engine.digests import combined_digest, model_digest, tensor_digest
from lockstep.engine.flat_tensors import Entry
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.run.progress import Progress
from lockstep.engine.step.train_step import TrainStep
from lockstep.nn.cutting import (
    Shard,
    every_tensor,
    found,
    held_tensors,
    joined_by_name,
    load_held,
    shards_of,
    units_of,
)
from lockstep.nn.holding import EVERYWHERE, Unit, is_released
from lockstep.nn.row import row_of
from lockstep.parallel.layout import Range, split


class _Piece(NamedTuple):
    """Elements of a tensor, by its name in the cut model, that a rank sends."""

    name: str
    elements: Range
    rank: int


class _OfState(Scattered):
    """A tensor of the model or of the optimizer's state.

    It may be cut into shards, and each of these be in slices.
    """

    def __init__(
        self,
        state: ScatteredState,
        key: str,
        kind: Kind,
        shards: Sequence[Shard | None],
        pieces: Sequence[Sequence[_Piece]],
    ) -> None:
        """Describe it.

        Args:
            state: the state that it is of.
            key: key of the optimizer's state; empty for a tensor of the model.
            kind: dtype and shape.
            shards: its shards in order; a single None if it is not cut.
            pieces: of each shard, all elements.
        """
        counts = Counter[int]()
        for piece in (piece for of_shard in pieces for piece in of_shard):
            counts[piece.rank] += len(piece.elements)
        if sum(counts.values()) != kind.shape.numel():
            raise RuntimeError(f"{key or 'model'}: an element is sent by no rank, or by two")
        super().__init__(kind, counts)
        self._state, self._key, self._shards, self._pieces = state, key, shards, pieces

    def own(self) -> Tensor:
        mine = [p for of in self._pieces for p in of if p.rank == self._state.rank]
        return torch.cat([self._state.elements(self._key, p.name, p.elements) for p in mine])

    def whole(self, parts: Mapping[int, Tensor]) -> Tensor:
        if len(parts) == 1 and self._shards == [None]:
            return next(iter(parts.values())).view(self.kind.shape)
        device = next((part.device for part in parts.values()), None)
        whole = torch.empty(self.kind.shape, dtype=self.kind.dtype, device=device)
        starts = Counter[int]()
        for shard, pieces in zip(self._shards, self._pieces, strict=True):
            place, flat = whole, whole.view(-1)
            if shard is not None:
                own = split(shard.shape[shard.dim], shard.of)[shard.number]
                place = whole.narrow(shard.dim, own.first, len(own))
                flat = place.new_empty(place.numel())
            for piece in pieces:
                start, count = starts[piece.rank], len(piece.elements)
                flat[piece.elements.slice] = parts[piece.rank][start : start + count]
                starts[piece.rank] += count
            if shard is not None:
                place.copy_(flat.view(place.shape))
        return whole


class ScatteredState:
    """Parameters, persistent buffers and optimizer state of all ranks.

    Attributes:
        model: tensors of the model's `state_dict`, by name.
        optimizer: tensors of an element-wise optimizer's state, by "key/parameter".
        rank: number of this rank.
    """

    def __init__(self, train_step: TrainStep, keys: Sequence[str] = ()) -> None:
        """Find out who has what; a collective.

        Args:
            train_step: training step with the model and the optimizer.
            keys: keys of the optimizer's state that are tensors, of all ranks.
        """
        self._train_step, self._flat = train_step, train_step.flat
        self.rank = train_step.placement.world.rank
        self._entries = {entry.name: entry for entry in self._flat.entries}
        self._tensors = every_tensor(train_step.model)
        self._flat_names = _names_in_flat(train_step, self._tensors)
        self._states = train_step.flat_optimizer.by_segment() if keys else {}
        pieces: dict[str, list[_Piece]] = {}
        for rank, own in enumerate(train_step.placement.world.gather_json(self._own())):
            for name, first, last in own:
                pieces.setdefault(name, []).append(_Piece(name, Range(first, last), rank))
        self._pieces = {
            name: sorted(of_name, key=lambda piece: piece.elements.first)
            for name, of_name in pieces.items()
        }
        shards = shards_of(train_step.model)
        names = {name: self._flat_names.get(name, f".{name}") for name in self._tensors}
        self.model = self._described("", self._tensors, names, shards)
        self.optimizer: dict[str, Scattered] = {}
        trained = self._flat.everyone
        for key in keys:
            same = dict(zip(trained, trained, strict=True))
            of_key = self._described(key, trained, same, self._flat.shards)
            self.optimizer |= {f"{key}/{name}": tensor for name, tensor in of_key.items()}

    def _own(self) -> list[tuple[str, int, int]]:
        """What this rank sends of each tensor: the first element, and the one after the last."""
        placement, flat = self._train_step.placement, self._flat
        stepped = self._train_step.workspace.stepped
        own: list[tuple[str, int, int]] = []
        for number, entry in enumerate(flat.entries):
            if not self._is_mine(flat.units.get(entry.name, EVERYWHERE)):
                continue
            if self._train_step.sharded:
                mine = entry.range.common(stepped[entry.segment][0].range)
                if len(mine):
                    own.append((entry.name, mine.first - entry.offset, mine.last - entry.offset))
            elif number % placement.data.size == placement.data.rank:
                own.append((entry.name, 0, entry.shape.numel()))
        units = units_of(self._train_step.model)
        for name, tensor in self._tensors.items():
            if name in self._flat_names:
                continue
            is_first = self.rank == 0
            if name in units:
                is_first = self._is_mine(units[name]) and placement.data.rank == 0
            if is_first:
                own.append((f".{name}", 0, tensor.numel()))
        return own

    def _is_mine(self, unit: Unit) -> bool:
        """Whether ranks of this one's column send a unit."""
        placement = self._train_step.placement
        return placement.owner_column(unit) == placement.column

    def _described(
        self,
        key: str,
        likes: Mapping[str, Tensor],
        names: Mapping[str, str],
        shards: Mapping[str, Shard],
    ) -> dict[str, Scattered]:
        """Whole tensors by name.

        Args:
            key: key of the optimizer's state; empty for the model.
            likes: tensors by their names in the cut model, of these dtypes and shapes.
            names: by which name `_pieces` has each of them.
            shards: what each tensor in shards is a part of.
        """
        by_whole: dict[str, list[str]] = {}
        for name in likes:
            by_whole.setdefault(shards[name].whole if name in shards else name, []).append(name)
        found: dict[str, Scattered] = {}
        for whole, parts in by_whole.items():
            cut = [shards.get(name) for name in parts]
            order = sorted(range(len(parts)), key=lambda i: s.number if (s := cut[i]) else 0)
            first, like = cut[0], likes[parts[0]]
            kind = Kind(like.dtype, like.shape if first is None else first.shape)
            pieces = [self._pieces.get(names[parts[i]], []) for i in order]
            found[whole] = _OfState(self, key, kind, [cut[i] for i in order], pieces)
        return found

    def elements(self, key: str, name: str, elements: Range) -> Tensor:
        """Some elements that this rank has.

        Args:
            key: key of the optimizer's state; empty for the model.
            name: name of a tensor in the cut model, after a dot if it is not trained.
            elements: which of its elements.
        """
        entry = self._entries.get(name)
        if entry is None:
            return self._tensors[name[1:]].detach().reshape(-1)[elements.slice]
        place = Range(entry.offset + elements.first, entry.offset + elements.last)
        if key:
            return self._of_optimizer(key, entry, place)
        own = self._train_step.workspace.stepped[entry.segment][0]
        if self._train_step.placement.in_slices:
            first = own.range.first
            return own.parameters[place.first - first : place.last - first]
        return self._flat.flats[entry.segment][place.slice]

    def _of_optimizer(self, key: str, entry: Entry, place: Range) -> Tensor:
        made = torch.zeros(
            len(place),
            dtype=self._flat.segments[entry.segment].dtype,
            device=self._flat.flats[entry.segment].device,
        )
        for part, value in self._states.get((entry.segment, key), ()):
            there = part.common(place)
            if len(there):
                made[there.first - place.first : there.last - place.first] = value[
                    there.first - part.first : there.last - part.first
                ]
        return made


def _names_in_flat(train_step: TrainStep, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names in flat memory of those tensors, by name in the cut model, that are trained."""
    model, flat = train_step.model, train_step.flat
    parameters = dict(model.named_parameters(remove_duplicate=False))
    row = row_of(model)
    originals = {n: tie.original for tie in row.ties for n in tie.names} if row else {}
    names = {}
    for name, tensor in tensors.items():
        trained = flat.names.get(id(parameters.get(originals.get(name, name))))
        if trained is None:
            continue
        # A hook of a `state_dict` may give something else by the name of a parameter. Only its
        # shape can say so where this rank has no values.
        own = parameters[name]
        has_values = not (train_step.placement.in_slices or is_released(own))
        if tensor.is_set_to(own) if has_values else tensor.shape == own.shape:
            names[name] = trained
    return names


def capture(
    train_step: TrainStep,
    progress: Progress,
    meta: dict[str, Any],
    state: OptimizerState,
    is_scattered: bool = False,
) -> Callable[[], Snapshot]:
    """Copy the state in memory; the function that is returned makes a snapshot of the copies.

    Args:
        train_step: training step with the model, the optimizer, the loss scale and the task.
        progress: position and history of the run.
        meta: further values for the manifest, JSON-able.
        state: state of the optimizer, already copied.
        is_scattered: whether the tensors of model and optimizer are saved in another way. If not,
            the snapshot of a model in shards has what this rank owns.
    """
    task, values = train_step.task_state.capture()
    tensors: dict[str, Tensor] = {}
    if not is_scattered:
        with train_step.flat_optimizer.evaluating():
            tensors = _copied(own_tensors(train_step))
    buffers = _copied(train_step.state.unsaved)
    meta = meta | {
        "progress": progress.state_dict(),
        "loss_scale": train_step.loss_scale.state_dict(),
        "learning_rates": train_step.rates.state_dict(),
        "optimizer_scalars": state.scalars,
        "optimizer_shared": state.shared,
        "task": values,
    }
    step = progress.step  # the progress goes on while the snapshot is written

    def make() -> Snapshot:
        optimizer = {} if is_scattered else _optimizer_tensors(train_step, state)
        return Snapshot(step, tensors, optimizer, meta, buffers, task)

    return make


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _optimizer_tensors(train_step: TrainStep, state: OptimizerState) -> dict[str, Tensor]:
    """An optimizer's tensors by "key/parameter", on the CPU."""
    optimizer = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    shards = {} if train_step.placement.is_split else train_step.flat.shards
    for key, segments in state.flats.items():
        for name, tensor in joined_by_name(train_step.flat.named(segments), shards):
            optimizer[f"{key}/{name}"] = tensor.cpu()
    return optimizer


def whole_digest(train_step: TrainStep) -> str:
    """`model_digest` of the whole model; a collective of all ranks."""
    placement, buffers = train_step.placement, train_step.state.unsaved
    if not (placement.is_split or placement.in_slices):
        return model_digest(train_step.model, buffers)
    world, model = placement.world, ScatteredState(train_step).model
    names = sorted(model)
    wanted = [[model[name] for name in names[rank :: world.size]] for rank in range(world.size)]
    tensors = gathered(world, wanted, train_step.flat.flats[0].device)
    own = zip(names[world.rank :: world.size], tensors, strict=True)
    digests = {name: tensor_digest(name, tensor) for name, tensor in own}
    for theirs in world.gather_json({name: digest.hex() for name, digest in digests.items()}):
        digests |= {name: bytes.fromhex(digest) for name, digest in theirs.items()}
    return combined_digest(digests | {n: tensor_digest(n, t) for n, t in buffers.items()})


def own_tensors(train_step: TrainStep) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank has; whole ones by their own names."""
    placement, model = train_step.placement, train_step.model
    return held_tensors(model, placement.own) if placement.is_split else dict(model.state_dict())


def kept_model(train_step: TrainStep) -> Callable[[], None]:
    """Copy this rank's part of the model; the function that is returned restores it."""
    in_slices = train_step.placement.in_slices and shards_of(train_step.model)
    own = every_tensor(train_step.model) if in_slices else own_tensors(train_step)
    memory = [*train_step.state.unsaved.values()]
    if train_step.placement.in_slices:
        memory += [own_slice.parameters for own_slice in train_step.workspace.every_slice]
        trained = _names_in_flat(train_step, own)
        memory += [tensor for name, tensor in own.items() if name not in trained]
        own = {}
    copies = [tensor.detach().clone() for tensor in memory]
    tensors = {name: tensor.detach().clone() for name, tensor in own.items()}

    def restore() -> None:
        if tensors:
            load_held(train_step.model, train_step.placement.own, tensors)
        with torch.no_grad():
            for tensor, before in zip(memory, copies, strict=True):
                tensor.copy_(before)
        train_step.state.mark()

    return restore


def load_own(train_step: TrainStep, snapshot: Snapshot) -> None:
    """Load this rank's part of a model from a snapshot; what that lacks stays as it is.

    Args:
        train_step: training step with the model.
        snapshot: snapshot that fits.
    """
    placement, flat, model = train_step.placement, train_step.flat, train_step.model
    shards = shards_of(model)

    def find(name: str) -> Tensor | None:
        return snapshot.look(found(snapshot.model, name, shards))

    # In slices, there are no whole tensors of those that are cut into shards.
    tensors = every_tensor(model) if placement.in_slices and shards else own_tensors(train_step)
    if placement.in_slices:
        for segment, of_segment in enumerate(train_step.workspace.stepped):
            for elements, parameters, _ in of_segment:
                flat.fill(parameters, segment, elements, find)
        trained = _names_in_flat(train_step, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in trained and (saved := find(name)) is not None:
                    tensor.copy_(saved)
    else:
        whole = {n: t if (saved := find(n)) is None else saved for n, t in tensors.items()}
        load_held(model, placement.own, whole)
    for name, buffer in train_step.state.unsaved.items():
        if name in snapshot.buffers:
            buffer.copy_(snapshot.buffers[name])
    snapshot.drop()
    train_step.state.mark()


def own_optimizer_state(
    train_step: TrainStep, snapshot: Snapshot, meta: Mapping[str, Any]
) -> OptimizerState:
    """A snapshot's state of the optimizer, of which this rank reads its part when it loads it."""
    flat, saved = train_step.flat, snapshot.optimizer
    scalars, shared = meta["optimizer_scalars"], meta.get("optimizer_shared", {})
    if not train_step.flat_optimizer.elementwise:
        return OptimizerState({}, saved, scalars, shared)

    def read(key: str, segment: int, elements: Range) -> Tensor:
        def find(name: str) -> Tensor | None:
            return snapshot.look(found(saved, name, flat.shards, f"{key}/"))

        dtype = flat.segments[segment].dtype
        made = torch.zeros(len(elements), dtype=dtype, device=flat.flats[segment].device)
        flat.fill(made, segment, elements, find)
        return made

    keys = {name.partition("/")[0] for name in saved}
    return OptimizerState({key: [] for key in keys}, {}, scalars, shared, read)
