"""Notes what a model's code asks torch for while it is built, to do it later.

Tensors are on the meta device meanwhile: they have shapes, and no values. Code that looks at values
gets them at once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lockstep.errors import TaskError

META, CPU = torch.device("meta"), torch.device("cpu")
_OVERWRITES = frozenset(
    {
        "bernoulli_", "copy_", "exponential_", "fill_", "log_normal_", "normal_", "random_",
        "uniform_", "zero_",
    }
)  # fmt: skip
"""Operations in place that do not depend on what was there."""
ADVICE = "or set init=in_order, with which each process builds the whole model"
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor on the meta device: where it lies in its memory."""

    memory: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Place:
        """That of a tensor."""
        layout = tensor.dtype, tensor.shape, tensor.stride()
        return Place(storage_of(tensor), *layout, int(tensor.storage_offset()))


@dataclass
class _Memory:
    """Memory of tensors on the meta device.

    Attributes:
        storage: it, kept so that its number is no other's.
        made: number of the operation that made it.
        writes: numbers of those that changed it.
    """

    storage: torch.UntypedStorage
    made: int
    writes: list[int] = field(default_factory=list)


@dataclass
class _Operation:
    """An operation, with a `Place` for each tensor without values.

    Attributes:
        made: places of what it returns, None for what is no new memory.
        reads: memory whose content it needs.
        writes: memory that it changes.
        overwrites: whether it changes all of that, whatever was there.
        given: tensors with values among the arguments, and checksums of these then.
        is_random: whether it draws random numbers.
        key: seed of these, once its name is known.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Place | None]
    reads: list[int]
    writes: list[int]
    overwrites: bool
    given: list[tuple[Tensor, int]]
    is_random: bool
    key: int | None = None


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that make tensors without values, and change them.

    Attributes:
        operations: all of them, in order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._seed, self._num_unnamed = seed, 0
        self._memories: dict[int, _Memory] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor has no values yet, and can be made."""
        return tensor.is_meta and storage_of(tensor) in self._memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation, or compute it where all values are there.

        Raises:
            TaskError: it needs values that cannot be there yet.
        """
        with torch._C.DisableTorchFunction():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        if not any(t.is_meta for t in tensors) and kwargs.get("device") != META:
            return func(*args, **kwargs)
        for tensor in tensors:
            if tensor.is_meta and not self.knows(tensor):
                raise TaskError(
                    f"init=by_name: build_model: {_here()} computes with a tensor on the meta "
                    f"device that was there before; make it in build_model, {ADVICE}"
                )
        written = list(_written(func, args, kwargs))
        if any(not tensor.is_meta for tensor in written):
            return self._computed(func, args, kwargs)
        self._check(func, args, kwargs)
        try:
            if _name_of(func) in _OVERWRITES and len(tensors) == 1:
                # Torch would import its compiler for some of them; their shapes are known.
                func(args[0].new_empty(0, device=CPU), *args[1:], **kwargs)
                result = args[0]
            else:
                shapes, options = pytree.tree_map(_shape_of, (args, kwargs))
                result = func(*shapes, **_on(META, options))
        except NotImplementedError:  # the shape of what it gives depends on values
            return self._computed(func, args, kwargs)
        made = pytree.tree_leaves(result)
        if not all(isinstance(r, Tensor) for r in made):
            return self._computed(func, args, kwargs)
        self._note(func, args, kwargs, tensors, written, made)
        return result

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse what would not come out the same later.

        Raises:
            TaskError: naming the operation.
        """
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise TaskError(
                f"init=by_name: build_model: {_here()} draws from a generator of its own; draw "
                f"from torch's, which is set by seed and name for each tensor, {ADVICE}"
            )
        name = _name_of(func)
        if name in ("set_", "resize_"):
            raise TaskError(
                f"init=by_name: build_model: {_here()} calls {name} of a tensor; make one of "
                f"the right size, {ADVICE}"
            )

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        made: Sequence[Tensor],
    ) -> None:
        number, places = len(self.operations), list[Place | None]()
        for tensor in made:
            key = storage_of(tensor)
            is_new = key not in self._memories
            if is_new:
                self._memories[key] = _Memory(tensor.untyped_storage(), number)
            places.append(Place.of(tensor) if self._memories[key].made == number else None)
        if not any(places) and not written:
            return  # a view, which says by itself where it lies
        reads = [storage_of(t) for t in tensors if t.is_meta]
        writes = [storage_of(t) for t in written]
        overwrites = _name_of(func) in _OVERWRITES and _is_whole(written[0])
        overwrites = overwrites and writes[0] not in reads[1:]
        if overwrites:
            reads = reads[1:]
        for memory in writes:
            self._memories[memory].writes.append(number)
        self.operations.append(
            _Operation(
                func,
                pytree.tree_map(_noted, args),
                _on(CPU, pytree.tree_map(_noted, kwargs)),
                places,
                reads,
                writes,
                overwrites,
                [(t, _content(t)) for t in tensors if not t.is_meta],
                torch.Tag.nondeterministic_seeded in func.tags,
            )
        )

    def draw_for(self, name: str, numbers: Sequence[int]) -> None:
        """Give those of some operations that draw, and have no key yet, one of a name."""
        drawing = [op for op in map(self.operations.__getitem__, numbers) if op.is_random]
        for count, operation in enumerate(drawing):
            if operation.key is None:
                operation.key = _key(self._seed, count, name)

    def draw_now(self, numbers: Sequence[int]) -> None:
        """Give those of some operations that draw, and have no key yet, one without a name."""
        for operation in map(self.operations.__getitem__, numbers):
            if operation.is_random and operation.key is None:
                operation.key = _key(self._seed, self._num_unnamed, "")
                self._num_unnamed += 1

    def leading_to(self, memories: Iterable[int]) -> list[int]:
        """Numbers of the operations that it takes to make memory as it is now, in order."""
        needed: set[int] = set()
        waiting = [(memory, len(self.operations)) for memory in memories]
        seen: set[tuple[int, int]] = set()
        while waiting:
            memory, before = waiting.pop()
            if (memory, before) in seen:
                continue
            seen.add((memory, before))
            for number in self._last_writes(memory, before):
                if number not in needed:
                    needed.add(number)
                    others = (r for r in self.operations[number].reads if r != memory)
                    waiting += [(other, number) for other in others]
        return sorted(needed)

    def _last_writes(self, memory: int, before: int) -> Iterator[int]:
        """Numbers of the operations that the content of memory depends on, by themselves."""
        yield self._memories[memory].made
        for number in reversed(self._memories[memory].writes):
            if number < before:
                yield number
                if self.operations[number].overwrites:
                    return

    def with_value(self, leaf: Any) -> Any:
        """A tensor with its values, while the model is built; anything else as it is."""
        if not isinstance(leaf, Tensor) or not self.knows(leaf):
            return leaf
        numbers = self.leading_to([storage_of(leaf)])
        self.draw_now(numbers)
        [made] = self.replayed([Place.of(leaf)], numbers)
        return made

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that needs values."""
        args, kwargs = pytree.tree_map(self.with_value, (args, kwargs))
        return func(*args, **_on(CPU, kwargs))

    def replayed(self, wanted: Sequence[Place], numbers: Sequence[int]) -> list[Tensor]:
        """Tensors, made by doing operations again.

        Args:
            wanted: places of the tensors.
            numbers: what `leading_to` gave for them.
        """
        last: dict[int, int] = {}
        for number in numbers:
            operation = self.operations[number]
            made = (place.memory for place in operation.made if place is not None)
            last |= dict.fromkeys([*operation.reads, *operation.writes, *made], number)
        kept = {place.memory for place in wanted}
        over: dict[int, list[int]] = {}
        for memory, number in last.items():
            if memory not in kept:
                over.setdefault(number, []).append(memory)
        there: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes(), torch.no_grad():
            for number in numbers:
                self._do_again(self.operations[number], there)
                for memory in over.get(number, ()):
                    del there[memory]
            return [_tensor_at(place, there) for place in wanted]

    def _do_again(self, operation: _Operation, there: dict[int, torch.UntypedStorage]) -> None:
        for tensor, content in operation.given:
            if _content(tensor) != content:
                raise TaskError(
                    f"init=by_name: build_model changes a tensor of shape {tuple(tensor.shape)} "
                    f"after it was copied into another; copy it (`.clone()`), {ADVICE}"
                )

        def with_values(leaf: Any) -> Any:
            return _tensor_at(leaf, there) if isinstance(leaf, Place) else leaf

        args, kwargs = pytree.tree_map(with_values, (operation.args, operation.kwargs))
        if operation.is_random:
            assert operation.key is not None, "all have one when the model is built"
            made = _drawn(operation.function, args, kwargs, operation.key)
        else:
            made = operation.function(*args, **kwargs)
        results = pytree.tree_leaves(made)
        taken = {storage._cdata for storage in there.values()}
        for place, result in zip(operation.made, results, strict=True):
            if place is None or place.memory in there:
                continue
            is_alike = (result.stride(), result.storage_offset()) == (place.stride, place.offset)
            if not is_alike or storage_of(result) in taken:
                size = self._memories[place.memory].storage.nbytes()
                there[place.memory] = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
                _tensor_at(place, there).copy_(result)
            else:
                there[place.memory] = result.untyped_storage()


def _content(tensor: Tensor) -> int:
    """A checksum of values: a change by numpy leaves the tensor's version as it is."""
    with _disable_current_modes():
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        return zlib.crc32(whole.view(-1).view(torch.uint8).numpy().data) if whole.numel() else 0


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], key: int) -> Any:
    """What an operation makes that draws random numbers, by a generator with a seed."""
    own = {argument.name for argument in func._schema.arguments}
    form = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    other = func if "generator" in own else getattr(func.overloadpacket, form, None)
    if other is not None:
        return other(*args, **kwargs | {"generator": torch.Generator().manual_seed(key)})
    with torch.random.fork_rng(devices=[]):  # such as dropout
        torch.default_generator.manual_seed(key)
        return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, which others have that share it."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _tensor_at(place: Place, there: dict[int, torch.UntypedStorage]) -> Tensor:
    made = torch.empty(0, dtype=place.dtype)
    return made.set_(there[place.memory], place.offset, place.shape, place.stride)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    is_as_large = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    return is_as_large and tensor.is_contiguous()


def _noted(leaf: Any) -> Any:
    return Place.of(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf


def _shape_of(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _on(device: torch.device, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same keyword arguments for another device."""
    return kwargs | {"device": device} if kwargs.get("device") is not None else kwargs


def _where(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Where the model's code is, of frames and lines with the innermost first."""
    for frame, line in frames:
        code, owner = frame.f_code, frame.f_locals.get("self")
        if not code.co_filename.startswith(_OURS):
            kind = f"{type(owner).__name__}." if isinstance(owner, nn.Module) else ""
            return f"{kind}{code.co_name} ({Path(code.co_filename).name}, line {line})"
    return "its code"


def _here() -> str:
    return _where(walk_stack(None))


def raised_at(traceback: TracebackType | None) -> str:
    """Where the model's code has raised an error."""
    return _where(reversed(list(walk_tb(traceback))))


def _name_of(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation changes."""
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _key(seed: int, count: int, name: str) -> int:
    """63 bits of a seed, a name, and the number of a draw for this name."""
    sha = hashlib.sha256(f"{seed} {count} {name}".encode())
    return int.from_bytes(sha.digest()[:8], "little") >> 1
