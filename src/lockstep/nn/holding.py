"""What a rank holds of a model: parameters that several blocks use, and shapes of all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.errors import TaskError
from lockstep.parallel.axes import TIED, DepthAxis
from lockstep.parallel.layout import Range


class Storage(Protocol):
    """Where the parameters of blocks are while these are not computed.

    Each call may talk to other ranks, and all of them make the same ones.
    """

    def unshard(self, block: int) -> None:
        """Have the parameters of a block, for a forward pass."""

    def prefetch(self, block: int) -> None:
        """Begin to have the parameters of the block that comes next, if there is one."""

    def reshard(self, block: int) -> None:
        """Free the parameters of a block, of which the forward pass is over."""

    def skip_forward(self) -> None:
        """Do for other ranks what a forward pass has to, without computing one."""


WHOLE = -1
"""In place of a number: of no block, or not cut into shards."""


class Unit(NamedTuple):
    """A part of a model that is never divided."""

    block: int = WHOLE
    """Number of the block; `WHOLE` if the model is no pipeline."""
    shard: int = WHOLE
    """Number of the shard; `WHOLE` for what is not cut, which all ranks of a stage hold."""


EVERYWHERE = Unit()
"""What every rank holds."""


class Holding(NamedTuple):
    """The blocks and shards that a rank holds."""

    blocks: tuple[Range, ...]
    """One range for each of its stages."""
    shards: Range

    def has(self, unit: Unit) -> bool:
        """Whether a unit is among them."""
        has_block = any(_is_in(unit.block, blocks) for blocks in self.blocks)
        return has_block and _is_in(unit.shard, self.shards)


def _is_in(number: int, range_: Range) -> bool:
    return number == WHOLE or range_.first <= number < range_.last


_Role = Literal["trains", "uses", "alone"]
"""Whether a rank trains a parameter that another one uses, or the other way, or neither."""


@dataclass(eq=False)
class Tie:
    """A parameter that an earlier block has, too.

    Attributes:
        original: its name in the first block that has it, whose stage trains it.
        names: its names in this block.
        first: number of the first block.
        block: number of this block.
        parameter: tensor of the first block.
        copy: tensor of this block.
        is_shared: whether the copy is to share the memory of the first block's tensor.
        is_used: whether this rank computes with the copy.
    """

    original: str
    names: list[str]
    first: int
    block: int
    parameter: nn.Parameter
    copy: nn.Parameter
    is_shared: bool = True
    is_used: bool = True


class Ties:
    """All of a pipeline's ties, and what stages do about them.

    Each has one gradient for each block; they are added in the order of blocks.
    """

    def __init__(self, ties: list[Tie]) -> None:
        self._ties = ties

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._ties)

    def __iter__(self) -> Iterator[Tie]:
        """In the order of blocks."""
        return iter(self._ties)

    def take_place(self, own: Holding, units: Mapping[str, Unit]) -> None:
        """Have copies share the memory of the first tensor, where that is held.

        A block whose first tensor is not held here gets memory of its own, for `refresh`.

        Args:
            own: blocks and shards that this rank holds.
            units: unit of each parameter by name.
        """
        for tie in self._ties:
            copy, unit = tie.copy, units[tie.original]
            tie.is_shared = own.has(unit)
            tie.is_used = tie.is_shared or own.has(Unit(tie.block, unit.shard))
            if tie.is_used and not tie.is_shared:
                copy.data = torch.zeros(copy.shape, dtype=copy.dtype, device=copy.device)
            elif not tie.is_used:
                release(copy)
        self.share()

    def share(self) -> None:
        """Have copies follow the memory of the first tensors, where these are held."""
        for tie in self._ties:
            if tie.is_shared:
                tie.copy.data = tie.parameter.data

    def refresh(self, axis: DepthAxis, storage: Storage | None) -> None:
        """Bring what later stages have of earlier blocks' parameters up to date; a collective.

        Args:
            axis: the stages.
            storage: where parameters of blocks are, if they are in slices.
        """
        for tie in self._ties:
            role, other = _role(tie, axis)
            if role == "trains" and storage is not None:
                storage.unshard(tie.first)
                axis.send([tie.parameter.detach().clone()], other, TIED)
                storage.reshard(tie.first)
            elif role == "trains":
                axis.send([tie.parameter.detach()], other, TIED)
            elif role == "uses":
                [received] = axis.receive(other, TIED)
                assert received is not None
                tie.copy.data.copy_(received)

    def skip_refresh(self, stages: Sequence[Range], stage: int, storage: Storage) -> None:
        """Do for other ranks what `refresh` has to on a rank that computes nothing.

        Args:
            stages: range of blocks of each stage.
            stage: stage whose parameters this rank keeps slices of.
            storage: where parameters of blocks are.
        """
        stage_of = {block: number for number, own in enumerate(stages) for block in range(*own)}
        for tie in self._ties:
            if tie.is_used and stage_of[tie.first] == stage != stage_of[tie.block]:
                storage.unshard(tie.first)
                storage.reshard(tie.first)

    def collect(self, axis: DepthAxis) -> None:
        """Add the gradients of copies to those of the first tensors, in the order of blocks.

        A collective of the stages. Those of copies are gone afterwards.
        """
        for tie in self._ties:
            role, other = _role(tie, axis)
            gradient, tie.copy.grad = tie.copy.grad, None
            if role == "uses":
                axis.send([gradient], other, TIED)
                continue
            if role == "trains":
                [gradient] = axis.receive(other, TIED)
            if gradient is None:
                continue
            total = tie.parameter.grad
            tie.parameter.grad = gradient if total is None else total + gradient

    def forget(self) -> None:
        """Forget the gradients that `collect` would add up."""
        for tie in self._ties:
            tie.copy.grad = None


def _role(tie: Tie, axis: DepthAxis) -> tuple[_Role, int]:
    """What this rank does about a tied parameter, and the place that it does this with."""
    if axis.size > 1 and tie.is_used:
        trains, uses = axis.rank_of(tie.first), axis.rank_of(tie.block)
        if trains != uses and axis.rank == trains:
            return "trains", uses
        if trains != uses and axis.rank == uses:
            return "uses", trains
    return "alone", axis.rank


_KNOWN = frozenset({"__get__", "__len__", "dim", "numel", "size"})


class RemoteTensor(Tensor):
    """What a `state_dict` has for a parameter that this rank has not, or has some shards of."""

    _name = "a parameter"

    @staticmethod
    def of(name: str, shape: torch.Size, dtype: torch.dtype) -> RemoteTensor:
        """Stand for a whole tensor.

        Args:
            name: its name in the module's `state_dict`.
            shape: shape of the whole tensor.
            dtype: its dtype.
        """
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(RemoteTensor)
        made._name = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give shape, dtype and the like.

        Raises:
            TaskError: the content is asked for.
        """
        if getattr(func, "__name__", "") in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                known = func(*args, **(kwargs or {}))
            if not isinstance(known, Tensor):
                return known
        leaves = pytree.tree_leaves((args, kwargs))
        own = next((leaf for leaf in leaves if isinstance(leaf, RemoteTensor)), cls)
        raise TaskError(
            f"state_dict: {own._name} lies on other ranks, or some of its shards or slices do "
            "(mesh.tp, mesh.pp, sharding=parameters); in a loss, compute with what the model gives "
            "rather than with its parameters; in a hook, set both to 1 and sharding=gradients; "
            "lockstep.load gives a run's whole model"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Its name and shape."""
        return f"RemoteTensor({self._name}, {tuple(self.shape)})"


def release(piece: Tensor) -> None:
    """Keep the shape of a tensor, and free its memory; computing with it gives NaN."""
    # Strides of 0 mark it: no tensor with content has them.
    piece.data = torch.full((), float("nan"), dtype=piece.dtype, device=piece.device).expand(
        piece.shape
    )


def is_held(piece: Tensor) -> bool:
    """Whether this rank has the content of a shard's tensor, not only its shape."""
    return piece.numel() == 0 or any(piece.stride()) or piece.dim() == 0


def is_released(parameter: Tensor) -> bool:
    """Whether `release` has freed a parameter's memory."""
    if parameter.dim() > 0:
        return not is_held(parameter)
    # A number has no strides that could be 0. What watches reads of parameters need not see this.
    with _disable_current_modes():
        return bool(parameter.isnan())


def say_what_is_held(model: nn.Module) -> None:
    """Make `state_dict` give a `RemoteTensor` for each parameter that other ranks have."""
    for module in model.modules():
        module.register_state_dict_post_hook(_without_content)  # type: ignore[no-untyped-call]


def _without_content(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key, parameter in module._parameters.items():
        name = prefix + key
        if parameter is None or name not in state:
            continue
        if is_released(parameter):
            state[name] = RemoteTensor.of(name, parameter.shape, parameter.dtype)
