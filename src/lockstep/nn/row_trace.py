"""Notes in which order a model calls its units, and where between them parameters are used.

A forward pass has positions: 2 k + 1 is the call of the k-th unit, 2 k what the model computes
before it, and the last one what it computes behind all units.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import TaskError
from lockstep.nn.row import check_passed

_PLAIN = (bool, int, float, str, type(None))


class Structure(NamedTuple):
    """What a unit returns, without the content of tensors.

    Attributes:
        tree: lists, tuples and the like.
        leaves: what is in them; `Tensor` in place of each tensor.
    """

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(outputs: Any, unit: str) -> tuple[Structure, tuple[Tensor, ...]]:
        """The structure of what a unit has returned, and its tensors.

        Raises:
            TaskError: there is something in it that cannot go to another stage.
        """
        leaves, tree = pytree.tree_flatten(outputs)
        tensors = tuple(leaf for leaf in leaves if not isinstance(leaf, _PLAIN))
        check_passed(tensors, f"stages: {unit}", True)
        kept = (leaf if isinstance(leaf, _PLAIN) else Tensor for leaf in leaves)
        return Structure(tree, tuple(kept)), tensors

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The same with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.tree)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches forward passes of a model.

    Attributes:
        position: where the pass is now.
        passes: of each pass, the units in the order of their calls.
        uses: positions in which each parameter is used, by its id.
        structures: what each unit returns.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position = 0
        self.passes: list[list[int]] = []
        self.uses: defaultdict[int, set[int]] = defaultdict(set)
        self.structures: dict[int, Structure] = {}
        self._places: defaultdict[str, set[int]] = defaultdict(set)
        named = list(model.named_parameters(remove_duplicate=False))
        self._parameters = {id(parameter): parameter for _, parameter in named}
        # Only where a parameter has several names, since a hook may change how torch computes.
        counts = Counter(id(parameter) for _, parameter in named)
        holders = {name.rpartition(".")[0] for name, p in named if counts[id(p)] > 1}
        self._handles = [
            model.get_submodule(name).register_forward_pre_hook(self._noting(name))
            for name in sorted(holders)
            if name and not any(f"{name}.".startswith(f"{unit}.") for unit in units)
        ]

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any) -> None:
            self._places[name].add(self.position)

        return note

    def begin(self) -> None:
        """Begin a pass."""
        self.passes.append([])
        self.position = 0

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the parameters among the arguments of an operation."""
        for leaf in pytree.arg_tree_leaves(*args, **(kwargs or {})):
            if id(leaf) in self._parameters:
                self.uses[id(leaf)].add(self.position)
        return func(*args, **(kwargs or {}))

    def place(self, name: str, parameter: nn.Parameter) -> int:
        """The first position in which a parameter is used by this name."""
        used = self.uses.get(id(parameter), set())
        called = self._places.get(name.rpartition(".")[0], set())
        return min(used & called or used or {0})

    def irregular(self, num_units: int) -> set[int]:
        """Units that are not called once in each pass."""
        return {
            unit
            for unit in range(num_units)
            if not self.passes or any(calls.count(unit) != 1 for calls in self.passes)
        }

    def order(self, units: Sequence[str]) -> list[int]:
        """The units in the order of their calls, which is the same in all passes.

        Raises:
            TaskError: it is not, or a unit is not called once.
        """
        remedy = "name other units (lockstep.nn.units), or set mesh.pp=1 and sharding=optimizer"
        if not self.passes:
            raise TaskError(
                "Task.loss: did not call the model it was given, so it is not known when its units "
                f"are computed; call the whole model, once, or {remedy}"
            )
        for unit in sorted(self.irregular(len(units))):
            counts = sorted({calls.count(unit) for calls in self.passes})
            raise TaskError(
                f"build_model: {units[unit]} is a unit, and a forward pass of the model calls it "
                f"{' or '.join(map(str, counts))} times; it must be called once: {remedy}"
            )
        first = self.passes[0]
        for calls in self.passes:
            if calls != first:
                one, other = next((a, b) for a, b in zip(first, calls, strict=True) if a != b)
                raise TaskError(
                    f"build_model: a forward pass calls {units[other]} where an earlier one has "
                    f"called {units[one]}; the order of units must always be the same: {remedy}"
                )
        return first

    def check_structures(self, units: Sequence[str]) -> None:
        """Refuse units that return different kinds of things.

        Raises:
            TaskError: naming the first that differs from the one before.
        """
        for number in range(1, len(units)):
            if self.structures[number] != self.structures[number - 1]:
                raise TaskError(
                    f"stages: {units[number]} returns something of another structure than "
                    f"{units[number - 1]}, and the blocks of a row must be alike; write the model "
                    "as a lockstep.nn.Pipeline, or set mesh.pp=1"
                )
