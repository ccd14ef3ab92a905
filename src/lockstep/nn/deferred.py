"""Models built without numbers, each tensor of which is computed later, where it is needed.

What a model's code asks torch for while the model is built is noted instead of computed: tensors
are on the meta device, and have shapes only. A tensor is made by doing again what led to it. Each
operation that draws random numbers has a key of its own, of the seed and of the name of the
parameter that it is for; so the bits of a tensor do not depend on which others a process makes.
Code that looks at numbers which it has drawn gets them at once; their key is of the seed, and of
how many were drawn so before.

Deferred initialisation as in torchdistX, with the random numbers keyed by names.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lockstep.errors import LockstepError, TaskError
from lockstep.nn.holding import release

_Model = TypeVar("_Model")

_META, _CPU = torch.device("meta"), torch.device("cpu")
_FACTORIES = frozenset(
    {
        torch.arange, torch.empty, torch.empty_permuted, torch.empty_strided, torch.eye, torch.full,
        torch.linspace, torch.logspace, torch.normal, torch.ones, torch.rand, torch.randint,
        torch.randn, torch.randperm, torch.tril_indices, torch.triu_indices, torch.zeros,
    }
)  # fmt: skip
"""Functions that need nothing but numbers to make a tensor. What others make has its values."""
_READS = frozenset(
    {
        Tensor.__array__, Tensor.__bool__, Tensor.__complex__, Tensor.__contains__,
        Tensor.__float__, Tensor.__format__, Tensor.__index__, Tensor.__int__, Tensor.__repr__,
        Tensor.allclose, Tensor.equal, Tensor.is_nonzero, Tensor.item, Tensor.numpy, Tensor.tolist,
        torch.allclose, torch.equal, torch.is_nonzero,
    }
)  # fmt: skip
"""Functions that read values without an operation of torch."""
_KNOWN: Mapping[Any, Callable[[Tensor], Any]] = {
    Tensor.data_ptr: lambda tensor: _memory_of(tensor) + tensor.storage_offset() * tensor.itemsize,
    Tensor.device.__get__: lambda tensor: _CPU,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
}
"""What code may ask of a tensor that it takes for one with values."""
_OVERWRITES = frozenset(
    {
        "bernoulli_", "copy_", "exponential_", "fill_", "log_normal_", "normal_", "random_",
        "uniform_", "zero_",
    }
)  # fmt: skip
"""Operations in place that do not depend on what was there."""
_ADVICE = "or set init=in_order, with which each process builds the whole model"
_OURS = (str(Path(torch.__file__).parent), __file__)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor on the meta device: where it lies in its memory."""

    memory: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> _Place:
        return _Place(
            _memory_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        )


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
    """An operation, with a `_Place` for each tensor without values.

    Attributes:
        made: places of what it returns, None for what is no new memory.
        reads: memory that it needs.
        overwrites: memory all of which it changes, whatever was there.
        versions: tensors with values among the arguments, and their versions then.
        is_random: whether it draws random numbers.
        key: seed of these, once its name is known.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[_Place | None]
    reads: list[int]
    overwrites: int | None
    versions: list[tuple[Tensor, int]]
    is_random: bool
    key: int | None = None


class ParameterDraws:
    """How to make each tensor of a model that was built without numbers.

    Tensors are made on the CPU, so their bits do not depend on the device either.
    """

    def __init__(
        self, tape: Tape, named: Sequence[tuple[str, Tensor]], there: Iterable[Tensor] = ()
    ) -> None:
        """Give each operation that draws its key.

        Args:
            tape: what was done while the model was built.
            named: its tensors by name, of which an operation belongs to the first that needs it.
            there: parameters that have their values already.
        """
        self._tape = tape
        self._there = {id(tensor): tensor.detach() for tensor in there}
        self._places = {id(tensor): _Place.of(tensor) for _, tensor in named}
        self._slices: dict[int, list[int]] = {}
        for name, tensor in named:
            numbers = self._slices[id(tensor)] = tape.leading_to([_memory_of(tensor)])
            tape.draw_for(name, numbers)
        tape.draw_now(range(len(tape.operations)))

    def make(self, parameter: Tensor) -> Tensor:
        """The values of a parameter, in memory of their own: [*parameter.shape]."""
        if id(parameter) in self._there:
            return self._there[id(parameter)]
        place = self._places[id(parameter)]
        [made] = self._tape.replayed([place], self._slices[id(parameter)])
        return made

    def make_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of tensors, which share memory where the given ones do."""
        places = [_Place.of(tensor) for tensor in tensors]
        memories = dict.fromkeys(place.memory for place in places)
        return self._tape.replayed(places, self._tape.leading_to(memories))


def _key(seed: int, count: int, name: str) -> int:
    """63 bits of a seed, a name, and the number of a draw for this name."""
    sha = hashlib.sha256(f"{seed} {count} {name}".encode())
    return int.from_bytes(sha.digest()[:8], "little") >> 1


def build_without_numbers(build: Callable[[], _Model], seed: int) -> tuple[_Model, Tape]:
    """What `build` returns, with tensors on the meta device, and what it has asked for.

    Args:
        build: builds a model.
        seed: seed of its random numbers.

    Raises:
        TaskError: it asks for something that takes numbers which are not there.
    """
    tape = Tape(seed)
    try:
        with _Asks(tape), tape:
            return build(), tape
    except LockstepError:
        raise
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if "meta" not in str(error).lower():
            raise
        reason, where = str(error).splitlines()[0], _raised_at(error.__traceback__)
        raise TaskError(
            f"init=by_name: build_model needs the values of a tensor in {where}, which is built "
            f"without numbers ({type(error).__name__}: {reason}); compute it with "
            f"numpy or on `device='cpu'`, {_ADVICE}"
        ) from None


def numbers_given(
    model: nn.Module, tape: Tape, lean_on: torch.device | None = None
) -> ParameterDraws | None:
    """Give the tensors of a model that was built without numbers their values.

    Args:
        model: the model.
        tape: what was done while it was built.
        lean_on: leave parameters that get gradients released, on this device
            (`lockstep.nn.holding.release`); None for giving values to all.

    Returns:
        How to make the parameters, if they were left released.

    Raises:
        TaskError: a tensor cannot be given values in place.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    there = [tensor for _, tensor in named if lean_on is not None and not tape.knows(tensor)]
    named = [(name, tensor) for name, tensor in named if tape.knows(tensor)]
    names = {id(tensor): name for name, tensor in named}
    alive = [t for t in _all_tensors() if tape.knows(t)]
    for tensor in alive:
        _check_given(tensor, names.get(id(tensor), _attribute_of(model, tensor)))
    draws = ParameterDraws(tape, named, there)
    left = {id(p) for p in model.parameters() if lean_on is not None and p.requires_grad}
    _check_own_memory(alive, left, names)
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []  # weak references, which torch does not follow
    given = [tensor for tensor in alive if id(tensor) not in left]
    for tensor, values in zip(given, draws.make_all(given), strict=True):
        _give(tensor, values, names.get(id(tensor), "a tensor"))
    for tensor in alive:
        if id(tensor) in left:
            empty = torch.empty((), dtype=tensor.dtype, device=lean_on).expand(tensor.shape)
            _give(tensor, empty, names[id(tensor)])
            release(tensor)
    for rnn in rnns:
        rnn._init_flat_weights()  # type: ignore[no-untyped-call]
    return None if lean_on is None else draws


def _all_tensors() -> list[Tensor]:
    """All tensors on the meta device that Python knows of in this process."""
    # By type: an object's `__class__` may be computed, and answer anything.
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return [tensor for tensor in found if tensor.is_meta]


def _attribute_of(model: nn.Module, tensor: Tensor) -> str:
    """The name of a tensor that is no parameter and no buffer."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if value is tensor:
                return f"{prefix}.{key}" if prefix else key
    return f"a tensor of shape {tuple(tensor.shape)}"


def _check_given(tensor: Tensor, name: str) -> None:
    """Refuse what would not be the same tensor with values.

    Raises:
        TaskError: naming it.
    """
    hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    problem = "has hooks" if any(hooks) else ""
    if tensor.grad_fn is not None:
        problem = "was computed from parameters, with gradients"
    if problem:
        raise TaskError(
            f"init=by_name: build_model: {name} {problem} before it has its values; add hooks in "
            f"Task.build_optimizer, compute with parameters in each forward pass, {_ADVICE}"
        )


def _check_own_memory(alive: Iterable[Tensor], left: set[int], names: dict[int, str]) -> None:
    """Refuse what shares memory with a parameter that is left without values.

    Raises:
        TaskError: naming the parameter.
    """
    alive = list(alive)
    homes: dict[int, Tensor] = {}
    for tensor in alive:
        if id(tensor) in left:
            other = homes.setdefault(_memory_of(tensor), tensor)
            if other is not tensor:
                raise TaskError(_shared(names[id(other)], names[id(tensor)]))
    for tensor in alive:
        home = homes.get(_memory_of(tensor))
        if home is not None and id(tensor) not in left:
            raise TaskError(_shared(names[id(home)], names.get(id(tensor), "another tensor")))


def _shared(name: str, other: str) -> str:
    return (
        f"build_model: {other} shares memory with the parameter {name}, whose memory moves; let "
        f"both be one parameter (b.weight = a.weight), or take it from {name} in each forward pass"
    )


def _give(tensor: Tensor, values: Tensor, name: str) -> None:
    """Have a tensor be another one, wherever it is held.

    Raises:
        TaskError: something in torch holds it.
    """
    new = torch.Tensor._make_subclass(type(tensor), values, tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TaskError(
            f"init=by_name: build_model: {name} cannot be given values where it is held "
            f"({reason}); keep no view of it and no weak reference to it, {_ADVICE}"
        ) from None


class _Asks(TorchFunctionMode):
    """Has tensors made on the meta device, and answers what reads values."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and _is_on_cpu(args, kwargs):
            kwargs["device"] = _META
        elif func in _READS:
            args = tuple(map(self._tape.with_value, args))
        elif func in _KNOWN and self._tape.knows(args[0]):
            return _KNOWN[func](args[0])  # else code would leave out what it does on this device
        return func(*args, **kwargs)


def _is_on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of a factory makes a tensor in this process's memory, of nothing else."""
    device = kwargs.get("device")
    is_cpu = device is None or torch.device(device).type == "cpu"
    # `torch.normal` may have tensors.
    return is_cpu and "out" not in kwargs and not any(isinstance(arg, Tensor) for arg in args)


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
        return tensor.is_meta and _memory_of(tensor) in self._memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation, or compute it where all values are there.

        Raises:
            TaskError: it needs values that cannot be there yet.
        """
        with torch._C.DisableTorchFunction():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        if not any(t.is_meta for t in tensors) and kwargs.get("device") != _META:
            return func(*args, **kwargs)
        for tensor in tensors:
            if tensor.is_meta and not self.knows(tensor):
                raise TaskError(
                    f"init=by_name: build_model: {_here()} computes with a tensor on the meta "
                    f"device that was there before; make it in build_model, {_ADVICE}"
                )
        written = [tensor for tensor, name in _written(func, args, kwargs)]
        if any(not tensor.is_meta for tensor in written):
            return self._computed(func, args, kwargs)
        self._check(func, args, kwargs)
        try:
            shapes, options = pytree.tree_map(_shape_of, (args, kwargs))
            result = func(*shapes, **_on(_META, options))
        except (NotImplementedError, torch._subclasses.fake_tensor.DynamicOutputShapeException):
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
                f"from torch's, which is set by seed and name for each tensor, {_ADVICE}"
            )
        name = _name_of(func)
        if name in ("set_", "resize_"):
            raise TaskError(
                f"init=by_name: build_model: {_here()} calls {name} of a tensor; make one of "
                f"the right size, {_ADVICE}"
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
        number, places = len(self.operations), list[_Place | None]()
        for tensor in made:
            key = _memory_of(tensor)
            is_new = key not in self._memories
            if is_new:
                self._memories[key] = _Memory(tensor.untyped_storage(), number)
            places.append(_Place.of(tensor) if self._memories[key].made == number else None)
        if not any(places) and not written:
            return  # a view, which says by itself where it lies
        overwrites = None
        if len(written) == 1 and _name_of(func) in _OVERWRITES and _is_whole(written[0]):
            overwrites = _memory_of(written[0])
        for tensor in written:
            self._memories[_memory_of(tensor)].writes.append(number)
        reads = [_memory_of(t) for t in tensors if t.is_meta]
        if overwrites is not None:
            reads = [_memory_of(t) for t in tensors[1:] if t.is_meta]
        self.operations.append(
            _Operation(
                func,
                pytree.tree_map(_noted, args),
                _on(_CPU, pytree.tree_map(_noted, kwargs)),
                places,
                reads,
                overwrites,
                [(t, t._version) for t in tensors if not t.is_meta],
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
        seen: dict[int, int] = {}
        while waiting:
            memory, before = waiting.pop()
            if seen.get(memory, -1) >= before:
                continue
            seen[memory] = before
            found = []
            for number in reversed(self._memories[memory].writes):
                if number < before:
                    found.append(number)
                    if self.operations[number].overwrites == memory:
                        break
            for number in [self._memories[memory].made, *found]:
                if number not in needed:
                    needed.add(number)
                    waiting += [(read, number) for read in self.operations[number].reads]
        return sorted(needed)

    def with_value(self, leaf: Any) -> Any:
        """A tensor with its values, while the model is built; anything else as it is."""
        if not isinstance(leaf, Tensor) or not self.knows(leaf):
            return leaf
        numbers = self.leading_to([_memory_of(leaf)])
        self.draw_now(numbers)
        [made] = self.replayed([_Place.of(leaf)], numbers)
        return made

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that needs values."""
        args, kwargs = pytree.tree_map(self.with_value, (args, kwargs))
        return func(*args, **_on(_CPU, kwargs))

    def replayed(self, wanted: Sequence[_Place], numbers: Sequence[int]) -> list[Tensor]:
        """Tensors, made by doing operations again.

        Args:
            wanted: places of the tensors.
            numbers: what `leading_to` gave for them.
        """
        last: dict[int, int] = {}
        for number in numbers:
            operation = self.operations[number]
            for memory in [*operation.reads, *(p.memory for p in operation.made if p is not None)]:
                last[memory] = number
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
        for tensor, version in operation.versions:
            if tensor._version != version:
                raise TaskError(
                    f"init=by_name: build_model changes a tensor of shape {tuple(tensor.shape)} "
                    f"after it was copied into another; copy it (`.clone()`), {_ADVICE}"
                )

        def with_values(leaf: Any) -> Any:
            return _tensor_at(leaf, there) if isinstance(leaf, _Place) else leaf

        args, kwargs = pytree.tree_map(with_values, (operation.args, operation.kwargs))
        if operation.is_random:
            assert operation.key is not None, "all have one when the model is built"
            made = _drawn(operation.function, args, kwargs, operation.key)
        else:
            made = operation.function(*args, **kwargs)
        results = pytree.tree_leaves(made)
        for place, result in zip(operation.made, results, strict=True):
            if place is None or place.memory in there:
                continue
            if (result.stride(), result.storage_offset()) != (place.stride, place.offset):
                size = self._memories[place.memory].storage.nbytes()
                there[place.memory] = torch.UntypedStorage(size)
                _tensor_at(place, there).copy_(result)
            else:
                there[place.memory] = result.untyped_storage()


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], key: int) -> Any:
    """What an operation makes that draws random numbers, by a generator with a seed."""
    own = {argument.name for argument in func._schema.arguments}
    other = func if "generator" in own else getattr(func.overloadpacket, "generator", None)
    if other is not None:
        return other(*args, **kwargs | {"generator": torch.Generator().manual_seed(key)})
    with torch.random.fork_rng(devices=[]):  # such as dropout
        torch.default_generator.manual_seed(key)
        return func(*args, **kwargs)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensor_at(place: _Place, there: dict[int, torch.UntypedStorage]) -> Tensor:
    made = torch.empty(0, dtype=place.dtype)
    return made.set_(there[place.memory], place.offset, place.shape, place.stride)  # type: ignore[call-overload,no-any-return]


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _noted(leaf: Any) -> Any:
    return _Place.of(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf


def _shape_of(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _on(device: torch.device, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same keyword arguments for another device."""
    return kwargs | {"device": device} if kwargs.get("device") is not None else kwargs


def _where(frames: Iterable[FrameType]) -> str:
    """Where the model's code is, of frames with the innermost first."""
    for frame in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            line = f"{Path(code.co_filename).name}, line {frame.f_lineno}"
            owner = frame.f_locals.get("self")
            kind = f"{type(owner).__name__}." if isinstance(owner, nn.Module) else ""
            return f"{kind}{code.co_name} ({line})"
    return "its code"


def _here() -> str:
    """Where the model's code is now."""
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _where(frames)


def _raised_at(traceback: TracebackType | None) -> str:
    """Where the model's code has raised an error."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return _where(reversed(frames))


def _name_of(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, str]]:
    """The tensors that an operation changes, and the names of these arguments."""
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf, argument.name
