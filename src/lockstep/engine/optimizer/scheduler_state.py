"""The state of a learning-rate scheduler as JSON, and back."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.parsing import shown
from lockstep.engine.optimizer.optimizer_state import DTYPES, dtype_name, from_json, to_json
from lockstep.errors import CheckpointError, shared

_MOST_ELEMENTS = 10_000
"""Of a tensor or array that is kept as text."""


def _is_small(value: Any) -> bool:
    name = dtype_name(value.dtype) if isinstance(value, Tensor) else value.dtype.name
    return bool(np.prod(value.shape) <= _MOST_ELEMENTS and name in DTYPES and name != "bfloat16")


def encoded(value: Any) -> Any:
    """A scheduler's state as JSON.

    Numbers, text, small arrays, and lists, tuples, dicts and counters of these are kept. Of
    anything else, such as functions, there is the type's name: `decoded` takes it from the
    scheduler that the task builds.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encoded(v) for v in value]}
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim and _is_small(value):
        is_tensor = isinstance(value, Tensor)
        name = dtype_name(value.dtype) if isinstance(value, Tensor) else value.dtype.name
        return {"tensor" if is_tensor else "array": name, "values": value.tolist()}
    if isinstance(value, deque):
        return {"deque": [encoded(v) for v in value], "most": value.maxlen}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encoded(k), encoded(v)] for k, v in value.items()]}
    try:
        return {"number": to_json(value)}
    except TypeError:
        return {"built": type(value).__qualname__}


def decoded(saved: Any, own: Any) -> Any:
    """The inverse of `encoded`.

    Args:
        saved: an encoded value.
        own: what the scheduler has in its place.

    Raises:
        CheckpointError: it is no such value.
    """
    match saved:
        case None | bool() | int() | float() | str():
            return saved
        case {"float": str(text)} if text in ("inf", "-inf", "nan"):
            return float(text)
        case {"list": list(values)}:
            return _items(values, own)
        case {"tuple": list(values)}:
            return tuple(_items(values, own))
        case {"deque": list(values), "most": None | int() as most}:
            return deque(_items(values, own), most)
        case {"dict": list(pairs)}:
            return _pairs(pairs, own)
        case {"counter": list(pairs)}:
            return Counter(_pairs(pairs, own))
        case {"tensor": str(dtype), "values": list(values)} if dtype in DTYPES:
            device = own.device if isinstance(own, Tensor) else torch.device("cpu")
            return torch.tensor(values, dtype=DTYPES[dtype], device=device)
        case {"array": str(dtype), "values": list(values)} if dtype in DTYPES:
            return np.array(values, dtype=dtype)
        case {"number": number}:
            return from_json(number, own.device if isinstance(own, Tensor) else torch.device("cpu"))
        case {"built": str(name)} if type(own).__qualname__ == name:
            return own
    raise shared(
        CheckpointError(
            f"learning_rates.schedulers: is damaged: {shown(saved)} is no value of a scheduler"
        )
    )


def _items(values: Sequence[Any], own: Any) -> list[Any]:
    there = (
        own if isinstance(own, (list, tuple)) and len(own) == len(values) else [None] * len(values)
    )
    return [decoded(value, mine) for value, mine in zip(values, there, strict=True)]


def _pairs(pairs: Sequence[Any], own: Any) -> dict[Any, Any]:
    there = own if isinstance(own, dict) else {}
    made: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise shared(CheckpointError("learning_rates.schedulers: is damaged: an odd pair"))
        key = decoded(pair[0], None)
        made[key] = decoded(pair[1], there.get(key))
    return made
