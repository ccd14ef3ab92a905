"""Which optimizers keep state of what is stepped, and what it is called in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import optim

from lockstep.engine.optimizer.stepped import Stepped, check_savable
from lockstep.errors import CheckpointError, TaskError, shared


class Keepers:
    """The optimizers that step, as keepers of state by name."""

    def __init__(
        self,
        is_flat: bool,
        optimizers: Mapping[str, optim.Optimizer],
        part_of_group: Sequence[optim.Optimizer],
    ) -> None:
        """Take note of them.

        Args:
            is_flat: whether all are element-wise, so that they step flat tensors.
            optimizers: those that step, by path.
            part_of_group: for each group, the one of those that the task has named.
        """
        self._is_flat = is_flat
        self._optimizers = optimizers
        self._part_of_group = part_of_group

    def states(self, stepped: Iterable[Stepped]) -> Iterator[tuple[Stepped, str, Any]]:
        """All state of what is stepped, by name.

        Raises:
            TaskError: something cannot be saved.
        """
        for part in stepped:
            for prefix, inner in self.of(part).items():
                kept_here = inner.state.get(part.tensor, {})
                if not isinstance(kept_here, Mapping):
                    raise TaskError(
                        f"build_optimizer: {type(inner).__name__} keeps a "
                        f"{type(kept_here).__name__} as state of a parameter; it must be a dict"
                    )
                for key, value in kept_here.items():
                    check_savable(inner, part.tensor, self._is_flat, key, value)
                    yield part, prefix + key, value

    def of(self, part: Stepped) -> dict[str, optim.Optimizer]:
        """Those that may keep state of what is stepped, by what the names of it begin with.

        Element-wise ones hold no others, and no two have the same parameter. So they need no
        prefix, and what is stepped by several has one flat tensor for each key that they share.
        """
        if self._is_flat:
            return {"": self._part_of_group[part.group]}
        return {f"{path}." if path else "": inner for path, inner in self._optimizers.items()}

    def find(self, part: Stepped, name: str) -> tuple[optim.Optimizer, str]:
        """The optimizer that keeps a state, and its key there, by the name that `states` gave.

        Raises:
            CheckpointError: there is no such optimizer.
        """
        keepers = self.of(part)
        prefixes = [prefix for prefix in keepers if name.startswith(prefix)]
        if not prefixes:
            raise shared(
                CheckpointError(f"the optimizer's state is damaged: {name} is no optimizer's")
            )
        prefix = max(prefixes, key=len)
        return keepers[prefix], name.removeprefix(prefix)
