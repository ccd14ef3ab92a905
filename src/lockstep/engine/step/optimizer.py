"""Which optimizers can be used, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn, optim

from lockstep.config import TrainConfig
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.passes.phases import PhaseOptimizers
from lockstep.errors import ConfigError, TaskError

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.RAdam, optim.NAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip


_TORCHS = frozenset(kind for kind in vars(optim).values() if isinstance(kind, type))


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it may step flat tensors: torch's own, or one with `elementwise = True`."""
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


def own_groups(optimizers: Mapping[str, optim.Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Each optimizer's groups, but for those that one before it has too."""
    seen: set[int] = set()
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, optimizer in optimizers.items():
        groups[path] = [g for g in optimizer.param_groups if id(g) not in seen]
        seen |= {id(g) for g in optimizer.param_groups}
    return groups


def default_optimizer(model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer that `config.optimizer` names, over all trainable parameters."""
    o = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    if o.name == "sgd":
        return optim.SGD(
            parameters,
            lr=config.lr,
            momentum=o.momentum,
            nesterov=o.nesterov,
            weight_decay=o.weight_decay,
        )
    kind = optim.Adam if o.name == "adam" else optim.AdamW
    return kind(parameters, lr=config.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)


def check_optimizer(optimizer: object, model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer, if it can work.

    Raises:
        TaskError: it is not an optimizer, needs a closure, holds foreign parameters, or has a
            learning-rate scheduler.
        ConfigError: it is to be sharded but is not element-wise.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, optim.Optimizer):
        raise TaskError(f"build_optimizer: must return a torch.optim.Optimizer, not a {name}")
    if isinstance(optimizer, optim.LBFGS):
        raise TaskError("build_optimizer: LBFGS needs a closure, which training steps do not have")
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for g in optimizer.param_groups for p in g["params"]):
        raise TaskError(
            f"build_optimizer: the {name} holds parameters that are not the model's; build it "
            "over the model.parameters() it is given"
        )
    for path, inner in optimizers_in(optimizer).items():
        _check_groups(optimizer, inner, f"{name} {path}".rstrip())
    is_set, other = f"sharding={config.sharding}", "sharding=none"
    if config.sharding == "none":
        is_set, other = "optimizer.sharded=True", "optimizer.sharded=false"
    if config.shards_optimizer and isinstance(optimizer, PhaseOptimizers):
        raise ConfigError(
            f"{is_set}: a task with an optimizer for each phase steps whole parameters; set "
            f"{other}, or give one optimizer for all phases"
        )
    if config.shards_optimizer and not is_elementwise(optimizer):
        raise ConfigError(
            f"{is_set}: {name} is not known to be element-wise, so it cannot step slices; set "
            f"{other}, or `elementwise = True` on its class"
        )
    sizes = {"mesh.pp": config.mesh.pp, "mesh.tp": config.mesh.tp}
    for key, size in sizes.items():
        if size > 1 and isinstance(optimizer, PhaseOptimizers):
            raise ConfigError(
                f"{key}={size}: a task with an optimizer for each phase steps the whole model; "
                f"set {key}=1, or give one optimizer for all phases"
            )
        if size > 1 and not is_elementwise(optimizer):
            raise ConfigError(
                f"{key}={size}: {name} is not known to be element-wise, so it cannot step a model "
                f"that is shared out over several ranks; set {key}=1, or `elementwise = True` on "
                "its class"
            )
    return optimizer


def _check_groups(optimizer: optim.Optimizer, inner: optim.Optimizer, name: str) -> None:
    """Refuse groups of an optimizer, or of one in it, that the engine cannot step."""
    outer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in inner.param_groups:
        if "initial_lr" in group:
            raise TaskError(
                f"build_optimizer: a learning-rate scheduler is attached to the {name}, which "
                "nothing would step; leave it out and set schedule.name and the other keys of "
                "`schedule` in the config"
            )
        if "lr" not in group:
            raise TaskError(f"build_optimizer: a group of the {name} has no 'lr'")
        if any(id(p) not in outer for p in group["params"]):
            raise TaskError(
                f"build_optimizer: the {name} steps parameters that are in no group of the "
                f"{type(optimizer).__name__} around it; give this one all groups"
            )
    if inner is not optimizer and is_elementwise(optimizer):
        raise TaskError(
            f"build_optimizer: a {type(optimizer).__name__} that holds other optimizers cannot be "
            "element-wise; leave out `elementwise = True`"
        )
