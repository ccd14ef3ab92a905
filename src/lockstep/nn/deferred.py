"""Models built without numbers, each tensor of which is computed later, where it is needed.

What a model's code asks torch for while the model is built is noted instead of computed, and a
tensor is made by doing again what led to it. Each operation that draws random numbers has a key of
its own, of the seed and of the name of the parameter that it is for; so the bits of a tensor do not
depend on which others a process makes. Code that looks at numbers which it has drawn gets them at
once; their key is of the seed, and of how many were drawn so before.

Deferred initialisation as in torchdistX, with the random numbers keyed by names.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import LockstepError, TaskError
from lockstep.nn.holding import release
from lockstep.nn.tape import ADVICE, CPU, META, Place, Tape, raised_at, storage_of

_Model = TypeVar("_Model")
_UNNAMED = "a tensor"

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
_NO_VALUES = re.compile(
    r"\bmeta\b|incompatible tensor type|not allocated yet|destination is read-only", re.IGNORECASE
)
"""Parts of the messages of torch and numpy where values are missing, or would be lost."""
_KNOWN: Mapping[Any, Callable[[Tensor], Any]] = {
    Tensor.data_ptr: lambda tensor: storage_of(tensor) + tensor.storage_offset() * tensor.itemsize,
    Tensor.device.__get__: lambda tensor: CPU,
    Tensor.is_cpu.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
}
"""What code may ask of a tensor that it takes for one with values."""


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
        self._places = {id(tensor): Place.of(tensor) for _, tensor in named}
        self._slices: dict[int, list[int]] = {}
        for name, tensor in named:
            numbers = self._slices[id(tensor)] = tape.leading_to([storage_of(tensor)])
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
        places = [Place.of(tensor) for tensor in tensors]
        memories = dict.fromkeys(place.memory for place in places)
        return self._tape.replayed(places, self._tape.leading_to(memories))


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
        if not _NO_VALUES.search(str(error)):
            raise
        reason, where = str(error).splitlines()[0], raised_at(error.__traceback__)
        raise TaskError(
            f"init=by_name: build_model needs the values of a tensor in {where}, which is built "
            f"without numbers ({type(error).__name__}: {reason}); compute it with "
            f"numpy or on `device='cpu'`, {ADVICE}"
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
        name = names.setdefault(id(tensor), _attribute_of(model, tensor))
        _check_given(tensor, name)
    draws = ParameterDraws(tape, named, there)
    left = {id(p) for p in model.parameters() if lean_on is not None and p.requires_grad}
    _check_own_memory(alive, left, names)
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []  # weak references, which torch does not follow
    given = [tensor for tensor in alive if id(tensor) not in left]
    for tensor, values in zip(given, draws.make_all(given), strict=True):
        _give(tensor, values, names[id(tensor)])
    for tensor in alive:
        if id(tensor) in left:
            empty = torch.empty((), dtype=tensor.dtype, device=lean_on).expand(tensor.shape)
            _give(tensor, empty, names[id(tensor)])
            release(tensor)
    for rnn in rnns:
        rnn._init_flat_weights()
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
    return f"{_UNNAMED} of shape {tuple(tensor.shape)}"


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
            f"Task.build_optimizer, compute with parameters in each forward pass, {ADVICE}"
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
            other = homes.setdefault(storage_of(tensor), tensor)
            if other is not tensor:
                raise TaskError(_shared(names[id(other)], names[id(tensor)]))
    for tensor in sorted(alive, key=lambda t: names[id(t)].startswith(_UNNAMED)):
        home = homes.get(storage_of(tensor))
        if home is not None and id(tensor) not in left:
            raise TaskError(_shared(names[id(home)], names[id(tensor)]))


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
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TaskError(
            f"init=by_name: build_model: {name} cannot be given values where it is held "
            f"({reason}); keep no view of it and no weak reference to it, {ADVICE}"
        ) from None


class _Asks(TorchFunctionMode):
    """Has tensors made on the meta device, and answers what reads values."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and _is_on_cpu(args, kwargs):
            kwargs["device"] = META
        elif func in _READS:
            is_known = any(isinstance(a, Tensor) and self._tape.knows(a) for a in args)
            read = func(*map(self._tape.with_value, args), **kwargs)
            if is_known and isinstance(read, np.ndarray):
                read.flags.writeable = False  # what is written into it would be lost
            return read
        elif func in _KNOWN and self._tape.knows(args[0]):
            return _KNOWN[func](args[0])  # else code would leave out what it does on this device
        return func(*args, **kwargs)


def _is_on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of a factory makes a tensor in this process's memory, of nothing else."""
    device = kwargs.get("device")
    is_cpu = device is None or torch.device(device).type == "cpu"
    # `torch.normal` may have tensors.
    return is_cpu and "out" not in kwargs and not any(isinstance(arg, Tensor) for arg in args)


_WITHOUT_VALUES = frozenset(
    {
        "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros", "ones_like", "rand_like", "randn_like", "zeros_like",
    }
)  # fmt: skip
"""Operations that ask for a tensor's shape only."""


class RefusedReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that read parameters which are not in memory.

    Args:
        absent: names of parameters by the number of their memory (`storage_of`).
        message: what to say, of a name.
    """

    def __init__(self, absent: Mapping[int, str], message: Callable[[str], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._absent, self._message = absent, message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation.

        Raises:
            TaskError: naming the parameter that it reads.
        """
        schema = func._schema
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if not is_view and schema.name.partition("::")[2] not in _WITHOUT_VALUES:
            for leaf in pytree.arg_tree_leaves(*args, **(kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    name = self._absent.get(storage_of(leaf))
                    if name is not None:
                        raise TaskError(self._message(name))
        return func(*args, **(kwargs or {}))
