"""Parameters that this rank has the shapes of, and not the content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.nn.elsewhere import Elsewhere


def let_go(piece: Tensor) -> None:
    """Keep the shape of a tensor, and free its memory; computing with it gives NaN."""
    # Strides of 0 are what tells it from a tensor with content.
    piece.data = torch.full((), float("nan"), dtype=piece.dtype, device=piece.device).expand(
        piece.shape
    )


def is_held(piece: Tensor) -> bool:
    """Whether this rank has the content of a shard's tensor, not only its shape."""
    return piece.numel() == 0 or any(piece.stride()) or piece.dim() == 0


def is_let_go(parameter: Tensor) -> bool:
    """Whether `let_go` has freed a parameter's memory."""
    # A number has no strides to tell by.
    is_number = parameter.dim() == 0
    return not is_held(parameter) or (is_number and bool(parameter.isnan()))


def say_what_is_held(model: nn.Module) -> None:
    """Have `state_dict`, of the model or of a module in it, tell which parameters are elsewhere."""
    for module in model.modules():
        module.register_state_dict_post_hook(_without_content)  # type: ignore[no-untyped-call]


def _without_content(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key, parameter in module._parameters.items():
        name = prefix + key
        if parameter is None or name not in state:
            continue
        if is_let_go(parameter):
            state[name] = Elsewhere.of(name, parameter.shape, parameter.dtype)
