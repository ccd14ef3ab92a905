"""What a layer must not have if it is to be cut: code that counts on its whole parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from lockstep.errors import ConfigError, TaskError
from lockstep.nn.sharded.sharded_tensor import ShardedTensor


def check_layer(module: nn.Module, keys: Iterable[str], name: str, num_shards: int) -> None:
    """Refuse a layer whose parameters or gradients other code changes or looks at.

    Args:
        module: layer that is to be cut.
        keys: names of its parameters that are cut.
        name: name of the layer, for messages.
        num_shards: number of shards.

    Raises:
        ConfigError: naming the layer or its parameter.
    """
    begin = f"num_shards={num_shards}: {name}"
    if parametrize.is_parametrized(module):
        parametrized = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        raise ConfigError(
            f"{begin}: {parametrized} is parametrized (torch.nn.utils.parametrize), which needs "
            "the whole parameter; leave the layer out of the plan of lockstep.nn.shard, or the "
            "parametrization out of the layer"
        )
    for key in keys:
        if key not in module._parameters:
            raise ConfigError(
                f"{begin}.{key} is no parameter but computed from others, as weight_norm, "
                "spectral_norm and pruning do; leave the layer out of the plan of "
                "lockstep.nn.shard, or that out of the layer"
            )
        parameter = module._parameters[key]
        if parameter is not None and has_gradient_hook(parameter):
            raise ConfigError(
                f"{begin}.{key} has a hook on its gradient (register_hook or "
                "register_post_accumulate_grad_hook), which would be lost when it is cut; remove "
                "the hook, or leave the layer out of the plan of lockstep.nn.shard"
            )
    if _has_backward_hooks(module):
        raise ConfigError(
            f"{begin} {_HAS_HOOK}, which would not see its gradients when it is cut; {_REMEDY}"
        )


_HAS_HOOK = "has a backward hook (register_full_backward_hook or register_full_backward_pre_hook)"
_REMEDY = "remove the hook, or leave the layer out of the plan of lockstep.nn.shard"


def watch_backward_hooks(model: nn.Module) -> None:
    """Have modules with backward hooks refuse tensors in shards, for which torch calls none."""
    for name, module in model.named_modules():
        if _has_backward_hooks(module):
            module.register_forward_hook(_Refusal(name), with_kwargs=True)


class _Refusal:
    """A forward hook that refuses inputs and outputs in shards."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for value in pytree.tree_leaves((args, kwargs, output)):
            if isinstance(value, ShardedTensor):
                raise TaskError(
                    f"{self._name or type(module).__name__} {_HAS_HOOK}, and its input or output "
                    "is cut into shards (num_shards), which torch calls no backward hooks for; "
                    "remove the hook, or leave the layers that cut out of the plan of "
                    "lockstep.nn.shard"
                )


def has_gradient_hook(parameter: Any) -> bool:
    """Whether code of others sees the gradient of a parameter, and may change it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
