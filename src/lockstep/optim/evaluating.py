"""Functions of a model, evaluated at other values of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError

Function = Callable[[Any], Tensor]
"""A function of a model: a scalar, such as the sum of the losses of a batch."""


def value_at(model: nn.Module, values: Mapping[str, Tensor], function: Function) -> Tensor:
    """A function of a model that has other values in place of some of its parameters.

    Args:
        model: model; it is left as it is.
        values: value of each parameter that is replaced, by its name in the model.
        function: function of the model.

    Returns:
        Its value, a scalar.

    Raises:
        ConfigError: the function's value is no real scalar.
    """
    replaced = {f"model.{name}": value for name, value in values.items()}
    value = torch.func.functional_call(_Evaluated(model, function), replaced, ())
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the function of a model must be a real scalar tensor, not {what}")
    return value


class _Evaluated(nn.Module):
    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self) -> Tensor:
        return self._function(self.model)
