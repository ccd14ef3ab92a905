"""What microbatches carry from step to step: trees of tensors, and how they are sent and saved."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.ahead import moved
from lockstep.comm.transport import Transport, offsets
from lockstep.engine.digests import tensors_digest
from lockstep.engine.optimizer.optimizer_state import DTYPES, dtype_name, is_savable
from lockstep.errors import TaskError

_MOST_LEVELS = 32
T = TypeVar("T")


@dataclass(frozen=True)
class Carry:
    """What a microbatch carries from one step to the next.

    Nobody changes it: a task is given a copy, and what it returns is copied.

    Attributes:
        structure: the tree as JSON, with the names of tensors in place of these.
        tensors: contiguous tensors by name: the keys and indices on the way there, joined by "/".
    """

    structure: Any
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, tree: Any, where: str) -> Carry:
        """Take a copy of a tree, without the graph that computed it.

        Args:
            tree: tensor, or dicts, lists and tuples of tensors, numbers, text and None.
            where: what returned it, for errors.

        Raises:
            TaskError: something in it cannot be kept.
        """
        tensors: dict[str, Tensor] = {}
        return cls(_taken(tree, (), where, tensors), tensors)

    @property
    def tree(self) -> Any:
        """The tree again, with copies of its tensors."""
        return _rebuilt(self.structure, {n: tensor.clone() for n, tensor in self.tensors.items()})

    def read(self, reader: Callable[[Any], T], where: str) -> T:
        """What a function makes of the tree, which it is given without copies.

        Args:
            reader: must not change it.
            where: what it is called, for errors.

        Raises:
            TaskError: it has changed a tensor.
        """
        before = [tensor._version for tensor in self.tensors.values()]
        made = reader(_rebuilt(self.structure, self.tensors))
        if [tensor._version for tensor in self.tensors.values()] != before:
            raise TaskError(f"{where}: changes the carry, which it may only read; take a copy")
        return made

    @property
    def digest(self) -> str:
        """SHA-256 of the structure and all tensors."""
        text = json.dumps(self.structure, sort_keys=True) + tensors_digest(self.tensors)
        return hashlib.sha256(text.encode()).hexdigest()


CarryByNumber = Mapping[int, Carry | None]
"""Carries by the number of their microbatch; None for a microbatch that has none yet."""


class Carries:
    """Carries of some microbatches; what a step makes of them counts once it is committed.

    Until then the step can be given up, and repeated from the committed ones.

    Attributes:
        pending: what they carry to the next one, as far as it is computed.
    """

    def __init__(self) -> None:
        self._committed: dict[int, Carry | None] = {}
        self.pending: dict[int, Carry | None] = {}

    @property
    def committed(self) -> Mapping[int, Carry | None]:
        """What microbatches carry into the present step."""
        return self._committed

    def begin(self) -> None:
        """Forget what another step, or another try of this one, has computed."""
        self.pending = {}

    def of(self, microbatch: int) -> Carry | None:
        """What a microbatch carries from the step before; None if it has nothing yet."""
        return self._committed.get(microbatch)

    def make(self, microbatch: int, carry: Carry | None) -> None:
        """Note what a microbatch carries to the next step."""
        self.pending[microbatch] = carry

    def commit(self) -> None:
        """Go on from what this step has computed."""
        self._committed |= self.pending

    def skip(self) -> None:
        """Go on from the committed carries after a step that changes nothing."""
        self._committed = dict.fromkeys(self.pending) | self._committed

    def replace(self, carries: CarryByNumber) -> None:
        """Commit these and no others."""
        self._committed = dict(carries)
        self.begin()

    def digests(self) -> dict[str, str]:
        """SHA-256 of each carry, by a name for people."""
        return {
            self._describe(number): carry.digest if carry else ""
            for number, carry in sorted(self.committed.items())
        }

    def _describe(self, number: int) -> str:
        return f"the carry of microbatch {number}"


_WORD = 8
"""Bytes of an element: transports count elements, of which there may be 2 GiB."""


def num_words(carries: CarryByNumber) -> int:
    """The length of what `pack` returns, which does not depend on values."""
    sizes = [tensor.nbytes for tensor in _tensors(carries)]
    return 1 + sum(map(_words, [len(_index(carries)), *sizes]))


def pack(carries: CarryByNumber, device: torch.device) -> Tensor:
    """Carries in one tensor [words] of int64.

    Args:
        carries: carries.
        device: device of the tensor.
    """
    text, pieces = _index(carries), [*map(_bytes, _tensors(carries))]
    sizes = [_words(len(piece)) for piece in pieces]
    head = np.zeros(1 + _words(len(text)), dtype=np.int64)
    head[0] = len(text)
    head[1:].view(np.uint8)[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    packed = torch.zeros(len(head) + sum(sizes), dtype=torch.int64, device=device)
    packed[: len(head)] = moved(torch.from_numpy(head), device)
    first = len(head)
    for piece, size in zip(pieces, sizes, strict=True):
        packed[first : first + size].view(torch.uint8)[: len(piece)] = piece
        first += size
    return packed


def unpack(packed: Tensor) -> dict[int, Carry | None]:
    """The inverse of `pack`; tensors have memory of their own."""
    length = int(packed[0])
    first = 1 + _words(length)
    text = packed[1:first].view(torch.uint8)[:length].cpu().numpy().tobytes()
    carries: dict[int, Carry | None] = {}
    for number, described in json.loads(text):
        if described is None:
            carries[number] = None
            continue
        structure, rows = described
        tensors = {}
        for name, dtype, shape in rows:
            num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
            raw = packed[first : first + _words(num_bytes)].view(torch.uint8)[:num_bytes].clone()
            tensors[name] = raw.view(DTYPES[dtype]).view(shape)
            first += _words(num_bytes)
        carries[number] = Carry(structure, tensors)
    return carries


def exchanged(
    transport: Transport, carries: CarryByNumber, wanted: Collection[int], device: torch.device
) -> tuple[dict[int, Carry | None], list[int]]:
    """Bring carries to the ranks that need them, from those that have them; a collective.

    Args:
        transport: the group of ranks.
        carries: the carries of this rank.
        wanted: numbers of those that this rank needs.
        device: device that they are on.

    Returns:
        Those that this rank needs, and the numbers of those that some rank needs and none has, the
        same on all ranks.

    Raises:
        GroupBroken: a rank was lost.
    """
    everyone = transport.gather_json([sorted(carries), sorted(wanted)])
    source: dict[int, int] = {}
    for rank, (there, _) in enumerate(everyone):
        for number in there:
            source.setdefault(number, rank)
    lost = sorted({n for _, numbers in everyone for n in numbers if n not in source})
    rank = transport.rank
    missing = [set(numbers) - set(there) for there, numbers in everyone]
    packages = [
        pack({n: c for n, c in carries.items() if n in numbers and source[n] == rank}, device)
        for numbers in missing
    ]
    lengths = transport.gather_json([len(package) for package in packages])
    sent, counts = lengths[rank], [theirs[rank] for theirs in lengths]
    received = torch.empty(sum(counts), dtype=torch.int64, device=device)
    transport.all_to_all(torch.cat(packages), sent, offsets(sent), received, counts)
    arrived = {number: carries[number] for number in wanted if number in carries}
    for first, count in zip(offsets(counts), counts, strict=True):
        arrived |= unpack(received[first : first + count])
    return arrived, lost


def indexed(carries: CarryByNumber) -> list[list[Any]]:
    """For each carry its number, structure, and name, dtype and shape of each tensor; as JSON."""
    return [
        [number, carry and [carry.structure, _described(carry.tensors)]]
        for number, carry in carries.items()
    ]


def _index(carries: CarryByNumber) -> bytes:
    return json.dumps(indexed(carries)).encode()


def _tensors(carries: CarryByNumber) -> list[Tensor]:
    return [t for carry in carries.values() if carry for t in carry.tensors.values()]


def _described(tensors: Mapping[str, Tensor]) -> list[list[object]]:
    return [[name, dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD)


def check_named(tensors: Mapping[str, Tensor], structures: object, num_carries: int) -> None:
    """Refuse what `DistributedCarries.scattered` cannot have made of so many carries.

    Raises:
        ValueError: says what is wrong.
    """
    numbers = [str(number) for number in range(num_carries)]
    if not isinstance(structures, dict) or sorted(structures) != sorted(numbers):
        raise ValueError(f"must be an object with the keys 0 to {num_carries - 1}")
    left = dict(tensors)
    for number, structure in structures.items():
        own = [name for name in left if name.partition("/")[0] == number]
        try:
            check_carry(structure, {name.partition("/")[2]: left.pop(name) for name in own})
        except ValueError as error:
            raise ValueError(f"microbatch {number}: {error}") from None
    if left:
        raise ValueError(f"tensor {min(left)!r} is of no microbatch")


def from_named(
    tensors: Mapping[str, Tensor],
    structures: Mapping[str, Any],
    wanted: Collection[int],
    device: torch.device,
) -> dict[int, Carry | None]:
    """Some carries of a checkpoint, in memory of their own, by number."""
    by_number: dict[str, dict[str, Tensor]] = {str(number): {} for number in wanted}
    for name, tensor in tensors.items():
        number, _, path = name.partition("/")
        if number in by_number:
            by_number[number][path] = tensor.to(device, copy=True)
    return {
        number: Carry(structures[str(number)], by_number[str(number)])
        if structures[str(number)] is not None
        else None
        for number in wanted
    }


def check_carry(structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a structure that `Carry.of` does not make, or that does not match these tensors.

    Raises:
        ValueError: says what is wrong.
    """
    names = list(_named(structure, 0))
    for name in dict.fromkeys([*names, *tensors]):
        if names.count(name) != 1 or name not in tensors:
            raise ValueError(f"tensor {name!r} is not there exactly once")


def _taken(value: Any, path: tuple[str, ...], where: str, tensors: dict[str, Tensor]) -> Any:
    """The structure of a part of a tree; its tensors are added to `tensors`."""
    place = f"{where}: {'/'.join(path)}" if path else where
    if len(path) > _MOST_LEVELS:
        raise TaskError(f"{place}: more than {_MOST_LEVELS} levels; give a flatter tree")
    if isinstance(value, Tensor):
        if not is_savable(value):
            raise TaskError(
                f"{place}: a tensor of dtype {value.dtype} and layout {value.layout} cannot be "
                "kept from step to step; give a dense tensor of real numbers"
            )
        # Contiguous, as it would come back from a checkpoint: kernels may go by strides.
        tensors["/".join(path)] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": "/".join(path)}
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (float, str)):
        _check_leaf(value, place)
        return value
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str) or "/" in key:
                raise TaskError(f"{place}: the key {key!r} must be text without '/'")
            _check_leaf(key, place)
        return {"dict": {k: _taken(v, (*path, k), where, tensors) for k, v in value.items()}}
    if type(value) in (list, tuple):
        items = [_taken(v, (*path, str(i)), where, tensors) for i, v in enumerate(value)]
        return {type(value).__name__: items}
    raise TaskError(
        f"{place}: a {type(value).__name__} cannot be kept from step to step; give tensors, or "
        "dicts, lists and tuples of tensors, finite numbers, text and None"
    )


def _check_leaf(value: float | str, place: str) -> None:
    """Refuse numbers and text that no file could hold.

    Raises:
        TaskError: it is such.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(
            f"{place}: {value} is not finite, so it cannot be kept as a number; give a tensor"
        )
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TaskError(f"{place}: {value!r} is no text that UTF-8 can hold") from None


def _rebuilt(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    match structure:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": values}:
            return {key: _rebuilt(value, tensors) for key, value in values.items()}
        case {"list": values}:
            return [_rebuilt(value, tensors) for value in values]
        case {"tuple": values}:
            return tuple(_rebuilt(value, tensors) for value in values)
    return structure


def _named(structure: Any, level: int) -> Iterator[str]:
    """The names of the tensors in a structure.

    Raises:
        ValueError: it is no structure.
    """
    match structure:
        case _ if level > _MOST_LEVELS:
            raise ValueError("too many levels")
        case None | bool() | int() | float() | str():
            return
        case {"tensor": str(name), **rest} if not rest:
            yield name
        case {"dict": dict(values), **rest} if not rest:
            for value in values.values():
                yield from _named(value, level + 1)
        case {"list": list(items), **rest} | {"tuple": list(items), **rest} if not rest:
            for value in items:
                yield from _named(value, level + 1)
        case _:
            raise ValueError(f"{str(structure)[:60]} is no part of a carry")
