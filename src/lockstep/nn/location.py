"""Where in a model's code something happened, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType

from torch import Tensor, nn

_INNER = ("torch", "lockstep.nn", "lockstep.parallel")
"""Packages that a user's code calls, whose lines tell nothing."""
_OUTER = ("lockstep.engine",)
"""Packages that call the user's code."""


def callers() -> Iterator[FrameType]:
    """The frames of the present calls, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(trace: TracebackType | None) -> list[FrameType]:
    """The frames that an exception went through, the innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def location(model: nn.Module | None, frames: Iterable[FrameType]) -> str:
    """Where that is: " in blocks.0.norm (LayerNorm) at model.py:12", as far as it is known.

    Args:
        model: model that tells the names of its modules.
        frames: frames of calls, the innermost first.
    """
    frames = list(takewhile(lambda frame: not _is_in(frame, _OUTER), frames))
    owners = (frame.f_locals.get("self") for frame in frames)
    module = next((owner for owner in owners if isinstance(owner, nn.Module)), None)
    known = {id(m): name for name, m in model.named_modules()} if model is not None else {}
    where = ""
    if module is not None:
        name, kind = known.get(id(module), ""), type(module).__name__
        where = f" in {name} ({kind})" if name else f" in {kind}"
    line = next((frame for frame in frames if not _is_in(frame, _INNER)), None)
    if line is None:
        return where
    return f"{where} at {Path(line.f_code.co_filename).name}:{line.f_lineno}"


def name_of(model: nn.Module | None, tensor: Tensor) -> str:
    """What to call a tensor: "buffer norm.mean" if it is one of a model's, or a view of one."""
    named = [] if model is None else [("buffer", *pair) for pair in model.named_buffers()]
    named += [] if model is None else [("parameter", *pair) for pair in model.named_parameters()]
    for kind, name, own in named:
        if (
            tensor is own
            or tensor._base is own
            or (tensor.data_ptr() == own.data_ptr() and tensor.numel() > 0)
        ):
            return f"{kind} {name}"
    return f"a tensor of shape {tuple(tensor.shape)}"


def _is_in(frame: FrameType, packages: Sequence[str]) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == package or module.startswith(f"{package}.") for package in packages)
