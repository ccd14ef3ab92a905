"""Tensors and parameters of which this rank knows the shape, and not the content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.errors import TaskError

_KNOWN = frozenset({"__get__", "__len__", "dim", "numel", "size"})


class RemoteTensor(Tensor):
    """What a `state_dict` has for a parameter that this rank has not, or has some shards of."""

    _name = "a parameter"

    @staticmethod
    def of(name: str, shape: torch.Size, dtype: torch.dtype) -> RemoteTensor:
        """Stand for a whole tensor.

        Args:
            name: its name in the module's `state_dict`.
            shape: shape of the whole tensor.
            dtype: its dtype.
        """
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(RemoteTensor)
        made._name = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give shape, dtype and the like.

        Raises:
            TaskError: the content is asked for.
        """
        if getattr(func, "__name__", "") in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                known = func(*args, **(kwargs or {}))
            if not isinstance(known, Tensor):
                return known
        leaves = pytree.tree_leaves((args, kwargs))
        own = next((leaf for leaf in leaves if isinstance(leaf, RemoteTensor)), cls)
        raise TaskError(
            f"state_dict: {own._name} lies on other ranks, or some of its shards or slices do "
            "(mesh.tp, mesh.pp, sharding=parameters); in a loss, compute with what the model gives "
            "rather than with its parameters; in a hook, set both to 1 and sharding=gradients; "
            "lockstep.load gives a run's whole model"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Its name and shape."""
        return f"RemoteTensor({self._name}, {tuple(self.shape)})"


def release(piece: Tensor) -> None:
    """Keep the shape of a tensor, and free its memory; computing with it gives NaN."""
    # Strides of 0 mark it: no tensor with content has them.
    piece.data = torch.full((), float("nan"), dtype=piece.dtype, device=piece.device).expand(
        piece.shape
    )


def is_held(piece: Tensor) -> bool:
    """Whether this rank has the content of a shard's tensor, not only its shape."""
    return piece.numel() == 0 or any(piece.stride()) or piece.dim() == 0


def is_released(parameter: Tensor) -> bool:
    """Whether `release` has freed a parameter's memory."""
    # A number has no strides that could be 0.
    is_number = parameter.dim() == 0
    return not is_held(parameter) or (is_number and bool(parameter.isnan()))


def say_what_is_held(model: nn.Module) -> None:
    """Make `state_dict` give a `RemoteTensor` for each parameter that other ranks have."""
    for module in model.modules():
        module.register_state_dict_post_hook(_without_content)  # type: ignore[no-untyped-call]


def _without_content(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key, parameter in module._parameters.items():
        name = prefix + key
        if parameter is None or name not in state:
            continue
        if is_released(parameter):
            state[name] = RemoteTensor.of(name, parameter.shape, parameter.dtype)
