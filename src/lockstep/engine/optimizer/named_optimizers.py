"""Optimizers of parts of a model, each by its name: all of them step, or that of the phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim

from lockstep.errors import TaskError


class NamedOptimizers(optim.Optimizer):
    """Several optimizers, whose parameter groups are the groups of this one.

    Attributes:
        by_name: optimizers of parts of the model, or of the phases, by name, in their order.
    """

    def __init__(self, by_name: dict[str, optim.Optimizer]) -> None:
        groups = [group for one in by_name.values() for group in one.param_groups]
        super().__init__([{"params": [p for group in groups for p in group["params"]]}], {})
        # The very dicts that the optimizers step by, also where some of them name parameters.
        self.param_groups = groups
        self.by_name = by_name


def named_optimizers(made: Mapping[Any, Any], where: str) -> NamedOptimizers:
    """One optimizer of those that a task names.

    Args:
        made: what the task has returned.
        where: by which method, for messages.

    Raises:
        TaskError: there is none, a name is no identifier, something is no optimizer, or two of them
            have the same parameter.
    """
    if not made:
        raise TaskError(
            f"{where}: returned no optimizer; return one by the name of each part of the model, or "
            "None for the one that config.optimizer names"
        )
    owners: dict[int, str] = {}
    for name, optimizer in made.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TaskError(f"{where}: the name {name!r}: must be an identifier, as 'encoder' is")
        if not isinstance(optimizer, optim.Optimizer):
            raise TaskError(
                f"{where}: {name!r} is a {type(optimizer).__name__}; must be an optimizer"
            )
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        other = next((owners[one] for one in ids if one in owners), None)
        if other is not None:
            raise TaskError(
                f"{where}: the optimizers of {other!r} and {name!r} have the same parameter; "
                "a parameter belongs to one of them"
            )
        owners |= dict.fromkeys(ids, name)
    return NamedOptimizers(dict(made))


def parts_of(optimizer: optim.Optimizer) -> dict[str, optim.Optimizer]:
    """The optimizers that a task has named; a single one under the name ""."""
    return dict(optimizer.by_name) if isinstance(optimizer, NamedOptimizers) else {"": optimizer}
