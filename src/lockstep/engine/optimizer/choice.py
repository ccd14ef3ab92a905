"""The optimizer of a run: the one that the config names, or a task's, if it can work."""

from __future__ import annotations

from collections.abc import Mapping, Set
from inspect import Parameter, signature
from typing import Any

from torch import nn, optim

from lockstep.config import TrainConfig
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.cutting import shards_of
from lockstep.optim.gradient_based import is_step_replaced

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
    if has_modes(optimizer):
        return False  # it moves all parameters when it is to be evaluated
    if needs_closure(optimizer):
        return False  # it compares losses, and moves all parameters by the same numbers
    declared = getattr(optimizer, "elementwise", None)
    if declared is None and (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    ):
        return False  # hooks may look at whole parameters
    return type(optimizer) in ELEMENTWISE if declared is None else bool(declared)


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Whether its steps evaluate the loss again, by a closure.

    Those do whose `step` takes one that is not optional, and those with `needs_closure = True`.
    """
    declared = getattr(optimizer, "needs_closure", None)
    if declared is not None:
        return bool(declared)
    takes = signature(type(optimizer).step).parameters.get("closure")
    return takes is not None and takes.default is Parameter.empty


def takes_closure(optimizer: optim.Optimizer) -> bool:
    """Whether its `step` takes a closure, optional or not."""
    return "closure" in signature(type(optimizer).step).parameters


def has_modes(optimizer: optim.Optimizer) -> bool:
    """Whether it has parameters of other values to be evaluated than to be trained."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def may_draw(optimizer: optim.Optimizer) -> bool:
    """Whether its steps may draw random numbers; those of torch's own do not."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    patched = is_step_replaced(optimizer) or any(getattr(optimizer, h, None) for h in hooks)
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
        TaskError: it is not an optimizer, holds foreign parameters or some shards of one, or needs
            a closure beside other optimizers; so for each one, if there are several.
        ConfigError: it is to be sharded but is not element-wise, or a key does not go with its
            closure.
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
    _check_closure(optimizer, config)
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
    if any(id(p) not in known for group in part.param_groups for p in group["params"]):
        raise TaskError(
            f"build_optimizer: the {called} holds parameters that are not the model's; build it "
            "over the model.parameters() it is given"
        )
    for path, inner in optimizers_in(part).items():
        _check_groups(part, inner, f"{called} {path}".rstrip())


def check_none_attached(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer with a learning-rate scheduler that nothing would step.

    Raises:
        TaskError: naming it.
    """
    for name, part in parts_of(optimizer).items():
        for path, inner in optimizers_in(part).items():
            if any("initial_lr" in group for group in inner.param_groups):
                called = f"{_called(part, name)} {path}".rstrip()
                raise TaskError(
                    f"build_optimizer: a learning-rate scheduler is attached to the {called}, "
                    "which nothing would step; return it by Task.build_scheduler, or set "
                    "schedule.name and the other keys of `schedule` in the config"
                )


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


def _check_closure(optimizer: optim.Optimizer, config: TrainConfig) -> None:
    """Refuse an optimizer that evaluates the loss again where that cannot be.

    Raises:
        ConfigError: naming the key.
        TaskError: it is one of several.
    """
    several = parts_of(optimizer)
    searching = [_called(one, name) for name, one in several.items() if needs_closure(one)]
    if not searching:
        return
    called = searching[0]
    if isinstance(optimizer, NamedOptimizers):
        raise TaskError(
            f"build_optimizer: {called} evaluates the loss again when it steps, at parameters that "
            "other optimizers would have stepped; return it alone, without a name"
        )
    groups = [group for one in several.values() for group in one.param_groups]
    if any(not p.requires_grad for group in groups for p in group["params"]):
        raise TaskError(
            f"build_optimizer: {called} holds parameters that require no gradient, and keeps its "
            "state with the first one; give it those that do: [p for p in model.parameters() if "
            "p.requires_grad]"
        )
    keys = {
        f"clip_norm={config.clip_norm}": (config.clip_norm is not None, "clip_norm=null"),
        f"precision.dtype={config.precision.dtype}": (
            config.precision.dtype == "fp16",
            "another precision",
        ),
        f"compression.name={config.compression.name}": (
            config.compression.name != "none",
            "compression.name=none",
        ),
        f"local.steps={config.local.steps}": (config.local.steps > 1, "local.steps=1"),
    }
    for key, (is_set, instead) in keys.items():
        if is_set:
            raise ConfigError(
                f"{key}: {called} evaluates the loss again when it steps, at parameters that it "
                f"tries, where this does not apply; set {instead}"
            )


def _check_groups(optimizer: optim.Optimizer, inner: optim.Optimizer, name: str) -> None:
    """Refuse groups of an optimizer, or of one in it, that the engine cannot step."""
    outer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in inner.param_groups:
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
