"""Tensors with a row for each sample, and how those of all microbatches come together.

A loss over the whole batch needs the rows of all microbatches. They are gathered in the order of
the microbatches, whichever ranks have computed them, so every rank gets the same tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from lockstep.comm.transport import Transport
from lockstep.engine.runtime import Raised, shared_texts
from lockstep.errors import TaskError
from lockstep.parallel.fold import ALIGNMENT
from lockstep.parallel.layout import Range


class RowKind(NamedTuple):
    """What the rows of a tensor are; it travels as JSON.

    Attributes:
        dtype: name of the dtype, without `torch.`.
        shape: shape of a row.
    """

    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, tensor: Tensor) -> RowKind:
        """Of a tensor whose first dimension is its rows."""
        return cls(str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:]))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of so many rows, in whole units of alignment."""
        size = self.torch_dtype.itemsize * torch.Size(self.shape).numel() * num_rows
        return -(-size // ALIGNMENT) * ALIGNMENT

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)}"


class Ungathered:
    """In the whole batch, the place of what has no row for each sample. Any use is an error."""

    def __init__(self, path: str, what: str) -> None:
        self._path, self._what = path, what

    def _refuse(self, *args: Any) -> NoReturn:
        raise TaskError(
            f"Task.batch_loss: reads {self._path} ({self._what}), which has no row for each sample "
            "and is not gathered from the microbatches; make it a tensor whose first dimension is "
            "the samples, in dataset or collate, or return what the loss needs from Task.outputs"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))._refuse()

    # Python looks operators up in the class, past `__getattr__`.
    __getattr__ = __iter__ = __len__ = __getitem__ = __bool__ = __call__ = __eq__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __neg__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _refuse
    __hash__ = object.__hash__


def flattened(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested lists, tuples and dicts; a part without tensors is one leaf."""
    return tree_flatten(tree, is_leaf=_has_no_tensor)


def paths(tree: Any, root: str) -> list[str]:
    """What messages call the leaves of `flattened`."""
    pairs, _ = tree_flatten_with_path(tree, is_leaf=_has_no_tensor)
    return [f"{root}{keystr(path)}" for path, _ in pairs]


def _has_no_tensor(node: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))


@dataclass
class Rows:
    """What a microbatch gives a loss over the whole batch.

    Attributes:
        outputs: tensors that `Task.outputs` has returned: [samples, …] each.
        read: tensors of the batch that `Task.batch_loss` reads: [samples, …] each.
    """

    outputs: list[Tensor]
    read: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        """Both."""
        return [*self.outputs, *self.read]

    def without_graph(self) -> Rows:
        """The same rows, marked as having a gradient if they have one, but without activations."""
        outputs = [t.detach().requires_grad_(t.requires_grad) for t in self.outputs]
        return Rows(outputs, self.read)


def plain(tensor: Tensor) -> Tensor:
    """A copy without a graph, which gets a gradient if the tensor has one."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class BatchStructure:
    """The structure of outputs and batches, as those of the first microbatch have it.

    Attributes:
        names: what messages call the tensors of `Rows.all`.
        kinds: their rows in the first microbatch.
    """

    def __init__(self, outputs: Any, batch: Any, call: Callable[[Any, Any], Any]) -> None:
        """Find out what of the batch `Task.batch_loss` reads.

        Args:
            outputs: what `Task.outputs` has returned, checked.
            batch: batch of the same samples.
            call: calls `Task.batch_loss` with such outputs and such a batch.
        """
        leaves, self._outputs = flattened(outputs)
        parts, self._batch = flattened(batch)
        in_batch, num_rows = paths(batch, "batch"), len(leaves[0])
        self._others: list[RowKind | Ungathered] = [
            RowKind.of(part) if _has_rows(part, num_rows) else Ungathered(path, type(part).__name__)
            for part, path in zip(parts, in_batch, strict=True)
        ]
        # Copies, since the loss may change what it is given.
        copies = [
            other if isinstance(other, Ungathered) else part.clone()
            for part, other in zip(parts, self._others, strict=True)
        ]
        noted = _Reads([copy for copy in copies if isinstance(copy, Tensor)])
        with _without_compiler(), noted:
            call(
                tree_unflatten([plain(t) for t in leaves], self._outputs),
                tree_unflatten(copies, self._batch),
            )
        self._read = [i for i, copy in enumerate(copies) if id(copy) in noted.found]
        self.names = paths(outputs, "outputs") + [in_batch[i] for i in self._read]
        self.kinds = [RowKind.of(t) for t in (*leaves, *(parts[i] for i in self._read))]

    @property
    def num_outputs(self) -> int:
        """Number of tensors of the outputs, which come first."""
        return self._outputs.num_leaves

    def rows(self, outputs: Any, batch: Any) -> Rows:
        """Those of a microbatch.

        Raises:
            TaskError: they have another structure than the first microbatch.
        """
        leaves, structure = flattened(outputs)
        parts, of_batch = flattened(batch)
        if structure != self._outputs:
            raise TaskError(
                f"Task.outputs: returned {paths(outputs, 'outputs')}, for the first microbatch "
                f"{self.names[: len(leaves)]}; every microbatch must give the same tensors"
            )
        read: list[Any] = [parts[i] for i in self._read] if of_batch == self._batch else [None]
        for part in read:
            if not _has_rows(part, len(leaves[0])):
                raise TaskError(
                    f"Task.batch_loss: reads {self.names[len(leaves) :]} of the batch, and a "
                    "microbatch does not have these tensors with a row for each sample; every "
                    "batch that dataset and collate make must have the same"
                )
        return Rows(leaves, read)

    def trees(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Outputs and batch, from all tensors of `names`.

        What is not read of the batch has its shape, but no memory (device `meta`).
        """
        num = self.num_outputs
        read = dict(zip(self._read, tensors[num:], strict=True))
        parts: list[Any] = [
            other
            if isinstance(other, Ungathered)
            else torch.empty(
                (len(tensors[0]), *other.shape), dtype=other.torch_dtype, device="meta"
            )
            for other in self._others
        ]
        for i, tensor in read.items():
            parts[i] = tensor
        return tree_unflatten(tensors[:num], self._outputs), tree_unflatten(parts, self._batch)


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_rows


def _without_compiler() -> AbstractContextManager[object]:
    """Has compiled functions run as they were written, whose calls of torch can be noted."""
    # The compiler is there if anything was compiled; else its import would take seconds.
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


class _Reads(TorchFunctionMode):
    """Notes which of some tensors any function of torch gets.

    Attributes:
        found: their ids.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._ids = {id(tensor) for tensor in tensors}
        self.found: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self.found |= given & self._ids
        return func(*args, **(kwargs or {}))


class Gathered(NamedTuple):
    """The rows of all microbatches.

    Attributes:
        tensors: those of `Rows.all`, with the rows of all microbatches; leaves of a graph.
        places: for each microbatch with samples, by its number, where its rows are.
    """

    tensors: list[Tensor]
    places: dict[int, Range]

    @property
    def num_rows(self) -> int:
        """Number of samples of the batch."""
        return len(self.tensors[0])


def gather(
    transport: Transport,
    device: torch.device,
    names: Sequence[str],
    own: Mapping[int, Rows | None],
    error: Raised | None,
) -> Gathered:
    """The rows of the microbatches of all ranks, in order; a collective.

    Args:
        transport: the ranks that share out the microbatches.
        device: device that the rows are on.
        names: what messages call the tensors.
        own: of each microbatch of this rank, in order; None for one without samples.
        error: what has kept this rank from having them, if anything.

    Raises:
        LockstepError: some rank could not compute its microbatches, or their rows do not fit
            together; on all ranks.
    """
    tensors = {m: rows.all for m, rows in own.items() if rows is not None}
    about = [
        [m, len(of[0]), [[*RowKind.of(t), t.requires_grad] for t in of]]
        for m, of in tensors.items()
    ]
    failure, texts = shared_texts(transport, error, json.dumps(about))
    if failure is not None:
        raise failure
    of_ranks = [[_Known.of(one) for one in json.loads(text)] for text in texts]
    known = sorted((one for of in of_ranks for one in of), key=lambda one: one.microbatch)
    kinds = _common(known, names)
    counts = [
        sum(kind.num_bytes(sum(one.num_rows for one in of)) for kind in kinds) for of in of_ranks
    ]
    packed = torch.empty(counts[transport.rank], dtype=torch.uint8, device=device)
    for section, of_kind in zip(
        _sections(packed, kinds, of_ranks[transport.rank]),
        zip(*tensors.values(), strict=True),
        strict=bool(tensors),
    ):
        torch.cat([t.detach() for t in of_kind], out=section)
    everyone = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    transport.all_gather(packed, everyone, counts)
    places, num_rows = {}, 0
    for one in known:
        places[one.microbatch] = Range(num_rows, num_rows + one.num_rows)
        num_rows += one.num_rows
    whole = [
        torch.empty((num_rows, *kind.shape), dtype=kind.torch_dtype, device=device)
        for kind in kinds
    ]
    for part, of in zip(torch.split(everyone, counts), of_ranks, strict=True):
        for tensor, section in zip(whole, _sections(part, kinds, of), strict=True):
            sizes = [one.num_rows for one in of]
            for one, rows in zip(of, torch.split(section, sizes), strict=True):
                tensor[places[one.microbatch].slice] = rows
    for i, tensor in enumerate(whole):
        tensor.requires_grad_(any(one.has_gradient[i] for one in known))
    return Gathered(whole, places)


class _Known(NamedTuple):
    """What a rank says of a microbatch."""

    microbatch: int
    num_rows: int
    kinds: list[RowKind]
    has_gradient: list[bool]

    @classmethod
    def of(cls, values: list[Any]) -> _Known:
        microbatch, num_rows, kinds = values
        return cls(microbatch, num_rows, [RowKind(*k[:2]) for k in kinds], [k[2] for k in kinds])


def _common(known: Sequence[_Known], names: Sequence[str]) -> list[RowKind]:
    """The kinds of rows that all microbatches have.

    Raises:
        TaskError: they have different ones.
    """
    first = known[0]
    for one in known[1:]:
        for name, here, there in zip(names, first.kinds, one.kinds, strict=True):
            if here != there:
                raise TaskError(
                    f"Task.batch_loss: a row of {name} is {here} in microbatch "
                    f"{first.microbatch} and {there} in microbatch {one.microbatch}; rows of all "
                    "samples must have one shape and dtype: pad them to a fixed length"
                )
    return first.kinds


def _sections(packed: Tensor, kinds: Sequence[RowKind], of: Sequence[_Known]) -> list[Tensor]:
    """The tensors that lie one behind the other in the bytes of a rank."""
    num_rows = sum(one.num_rows for one in of)
    sizes = [kind.num_bytes(num_rows) for kind in kinds]
    return [
        part[: kind.torch_dtype.itemsize * torch.Size(kind.shape).numel() * num_rows]
        .view(kind.torch_dtype)
        .view(num_rows, *kind.shape)
        for kind, part in zip(kinds, torch.split(packed, sizes), strict=True)
    ]
