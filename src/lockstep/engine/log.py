"""`lockstep.log`: values of a step as a whole, such as a norm, a histogram or a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from torch import Tensor

from lockstep.config.parsing import shown
from lockstep.engine.events import Emit, Logged
from lockstep.engine.log_values import logged
from lockstep.errors import TaskError

Kind = Literal["scalar", "text", "histogram", "image", "figure"]

_WORD = re.compile(r"\w([\w .+=@-]*[\w+=@-])?")
_MOST_BYTES = 200


class Logbook:
    """Emits events for the values that a process logs.

    Args:
        emit: function that takes events.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._names: set[str] = set()
        self._step = 0

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Allow `log` within it.

        Args:
            step: number of optimizer steps that have been done.
        """
        self._step = step
        before = _OPEN.get()
        _OPEN.set(self)
        try:
            yield
        finally:  # not by a token: cells of a notebook may run in contexts of their own
            _OPEN.set(before)

    def log(self, name: str, value: Any, kind: str | None) -> None:
        """As the function `log`."""
        if name not in self._names:
            check_name(name)
            self._names.add(name)
        if kind is None and _is_number(value):  # the frequent case
            number = value.item() if isinstance(value, Tensor) else value
            event = Logged(step=self._step, name=name, kind="scalar", value=number)
        else:
            event = logged(self._step, name, value, kind)
        self._emit(event)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.device.type == "cpu" and value.is_floating_point()
    return type(value) is float


_OPEN: ContextVar[Logbook | None] = ContextVar("lockstep.log", default=None)
"""The logbook of the task or hook that this thread runs, if it may log."""


def log(name: str, value: Any, *, kind: Kind | None = None) -> None:
    """Log something that the step as a whole has; it changes nothing of the run.

    May be called in `Task.after_step`, and in `on_start`, `after_step`, `after_evaluation` and
    `on_end` of a `Hook`: there all ranks have the same state. Numbers of samples are returned from
    `Task.loss` as metrics instead, whose means over the global batch do not depend on ranks.

    Scalars are curves `log/<name>` in `metrics.csv`, TensorBoard and reports. Pictures are files
    `logged/<name>/<step>.png` in the run directory. Of a name and a step, the last one counts.

    Args:
        name: words of letters, digits, `_`, `-`, `.`, `+`, `=`, `@` and spaces, with `/` between
            them; at most 200 bytes.
        value: a number or a tensor of one element (scalar); text, of which at most 65,536
            characters are kept; a tensor or array of numbers of any shape (histogram: 64 bins
            between the least and the greatest finite value, NaN and infinity counted apart); a
            tensor or array of shape HxW, HxWx1, HxWx3, HxWx4, 1xHxW, 3xHxW or 4xHxW, uint8 or
            float in [0, 1], or an image of PIL (image); a `matplotlib.figure.Figure` (figure).
        kind: `scalar`, `text`, `histogram`, `image` or `figure`; needed only for tensors and arrays
            that may be an image or a histogram.

    Raises:
        TaskError: called elsewhere, or the name or value is none of these.
    """
    book = _OPEN.get()
    if book is None:
        raise TaskError(
            f"lockstep.log({shown(name)}): may be called in Task.after_step, and in on_start, "
            "after_step, after_evaluation and on_end of a Hook, where all ranks have the same "
            "state; return numbers of samples from Task.loss as metrics, "
            "Loss(sum, weight, {name: (sum, weight)})"
        )
    book.log(name, value, kind)


def check_name(name: object) -> None:
    """Refuse names that cannot be part of a path.

    Raises:
        TaskError: saying what a name must be.
    """
    if (
        isinstance(name, str)
        and all(map(_WORD.fullmatch, name.split("/")))
        and len(name.encode()) <= _MOST_BYTES
        and not any(word.endswith(".png") for word in name.split("/"))
    ):
        return
    raise TaskError(
        f"lockstep.log({shown(name)}): a name is words with / between them, such as norms/encoder: "
        f"letters, digits, _ - . + = @ and spaces, not ending in .png, at most {_MOST_BYTES} bytes"
    )
