"""The optimizer of a run: the one that the config names, or a task's, if it can work."""

from __future__ import annotations

from collections.abc import Set

from torch import nn, optim

from lockstep.config import TrainConfig
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.optimizer.kinds import is_elementwise
from lockstep.engine.optimizer.named_optimizers import NamedOptimizers, parts_of
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.cutting import shards_of


def default_optimizer(model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer that `config.optimizer` names, over all trainable parameters.

    Raises:
        TaskError: there are none.
    """
    o = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TaskError(
            "build_model: the model has no parameter to train; rows of a SparseEmbedding are none, "
            "so give it one more, such as a bias"
        )
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
        TaskError: it is not an optimizer, needs a closure, holds foreign parameters or some shards
            of one, or has a learning-rate scheduler; so for each one, if there are several.
        ConfigError: it is to be sharded but is not element-wise.
    """
    if not isinstance(optimizer, optim.Optimizer):
        name = type(optimizer).__name__
        raise TaskError(f"build_optimizer: must return a torch.optim.Optimizer, not a {name}")
    known = {id(p) for p in model.parameters()}
    for name, part in parts_of(optimizer).items():
        _check_part(part, known, _called(part, name))
    if isinstance(optimizer, NamedOptimizers):
        _check_shards(optimizer, model)
    _check_elementwise(optimizer, config)
    return optimizer


def _called(part: optim.Optimizer, name: str) -> str:
    """What messages call an optimizer."""
    return f"{type(part).__name__} of {name!r}" if name else type(part).__name__


def _check_part(part: optim.Optimizer, known: Set[int], called: str) -> None:
    """Refuse an optimizer that cannot work, whatever the mesh.

    Args:
        part: the optimizer, or one of those that the task has named.
        known: ids of the model's parameters.
        called: what messages call it.

    Raises:
        TaskError: naming it.
    """
    if isinstance(part, optim.LBFGS):
        raise TaskError(
            f"build_optimizer: {called} needs a closure, which training steps do not have"
        )
    if any(id(p) not in known for group in part.param_groups for p in group["params"]):
        raise TaskError(
            f"build_optimizer: the {called} holds parameters that are not the model's; build it "
            "over the model.parameters() it is given"
        )
    for path, inner in optimizers_in(part).items():
        _check_groups(part, inner, f"{called} {path}".rstrip())


def _check_shards(optimizer: NamedOptimizers, model: nn.Module) -> None:
    """Refuse shards of one parameter in several optimizers.

    In a phase that trains some of them, not all ranks would go through the region of its layer.

    Raises:
        TaskError: naming the parameter.
    """
    owners = {
        id(p): name
        for name, part in optimizer.by_name.items()
        for group in part.param_groups
        for p in group["params"]
    }
    shards = shards_of(model)
    first: dict[str, str | None] = {}
    for name, parameter in model.named_parameters():
        if name not in shards:
            continue
        whole, owner = shards[name].whole, owners.get(id(parameter))
        if first.setdefault(whole, owner) != owner:
            of = " and ".join("none" if one is None else repr(one) for one in (first[whole], owner))
            raise TaskError(
                f"build_optimizer: shards of {whole} are in the optimizers of {of}; give all of "
                f"them ({whole}_0, {whole}_1, …) to one"
            )


def _check_elementwise(optimizer: optim.Optimizer, config: TrainConfig) -> None:
    """Refuse an optimizer that would have to step parts of parameters and cannot.

    Raises:
        ConfigError: naming it, and the key.
    """
    parts = parts_of(optimizer).items()
    odd = next((_called(part, name) for name, part in parts if not is_elementwise(part)), None)
    if odd is None:
        return
    if config.shards_optimizer:
        is_set, other = f"sharding={config.sharding}", "sharding=none"
        if config.sharding == "none":
            is_set, other = "optimizer.sharded=True", "optimizer.sharded=false"
        raise ConfigError(
            f"{is_set}: {odd} is not known to be element-wise, so it cannot step slices; set "
            f"{other}, or `elementwise = True` on its class"
        )
    for key, size in {"mesh.pp": config.mesh.pp, "mesh.tp": config.mesh.tp}.items():
        if size > 1:
            raise ConfigError(
                f"{key}={size}: {odd} is not known to be element-wise, so it cannot step a model "
                f"that is shared out over several ranks; set {key}=1, or `elementwise = True` on "
                "its class"
            )


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
