"""What kind an optimizer is: element-wise or not, drawing or not, alone or around others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim

from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.optimizer.named_optimizers import NamedOptimizers

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.RAdam, optim.NAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip


_TORCHS = frozenset(kind for kind in vars(optim).values() if isinstance(kind, type))


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it may step flat tensors: torch's own, or one with `elementwise = True`.

    Of named optimizers all must be.
    """
    if isinstance(optimizer, NamedOptimizers):
        return all(map(is_elementwise, optimizer.by_name.values()))
    declared = getattr(optimizer, "elementwise", None)
    if declared is None and (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    ):
        return False  # hooks may look at whole parameters
    return type(optimizer) in ELEMENTWISE if declared is None else bool(declared)


def may_draw(optimizer: optim.Optimizer) -> bool:
    """Whether its steps may draw random numbers; those of torch's own do not."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    patched = "step" in vars(optimizer) or any(getattr(optimizer, h, None) for h in hooks)
    return patched or type(optimizer) not in _TORCHS


def stepping_in(optimizer: optim.Optimizer) -> dict[str, optim.Optimizer]:
    """The optimizers that step, by path: this one and those in it, but for one that holds names."""
    return {
        path: inner
        for path, inner in optimizers_in(optimizer).items()
        if not isinstance(inner, NamedOptimizers)
    }


def own_groups(optimizers: Mapping[str, optim.Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Each optimizer's groups, but for those that one before it has too."""
    seen: set[int] = set()
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, optimizer in optimizers.items():
        groups[path] = [g for g in optimizer.param_groups if id(g) not in seen]
        seen |= {id(g) for g in optimizer.param_groups}
    return groups
