"""Checks of arguments that all of `quantum` shares."""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import ConfigError


def as_integer(value: object, name: str) -> int:
    """An integer of any type but bool, as an int.

    Raises:
        ConfigError: the value is not one.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise ConfigError(f"{name}: must be an integer, not {value!r}")
    return int(value.__index__())


def kind_of(value: object) -> str:
    """The type of a value, for a message that another one is needed."""
    if isinstance(value, Tensor):
        return f"one of {value.dtype} {list(value.shape)}"
    return type(value).__name__
