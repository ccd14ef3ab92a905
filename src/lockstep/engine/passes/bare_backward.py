"""Backward passes without what torch does around them in Python.

That is for its compiler, for logs and for subclasses of tensors, and for a small model takes a
tenth of the time of the pass.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import has_torch_function

_COMPILER = "torch._dynamo"
_LOG = logging.getLogger("torch.autograd.graph")
"""Where torch logs each node of a graph as it is computed, if it is told to."""


def _if_own(function: Callable[..., None], defined_in: str) -> Callable[..., None] | None:
    """A function, if a file of torch defines it; None if others have replaced that one."""
    # A wrapper has the name and module of what it wraps, but not its code.
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename == defined_in else None


_TENSORS_OWN = _if_own(Tensor.backward, torch._tensor.__file__)
_TORCHS_OWN = _if_own(torch.autograd.backward, torch.autograd.__file__)
"""None where others had replaced it before this module was imported: then they are called."""


def backward(loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
    """Add the gradients of a loss to its leaves, as `loss.backward(inputs=inputs)` does.

    Args:
        loss: scalar that has a gradient.
        inputs: leaves that get a gradient; None for all that there are.
    """
    if _is_watched(loss, inputs):
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        return
    Variable._execution_engine.run_backward(
        (loss,),
        # Made anew, since hooks may change it.
        (torch.ones_like(loss, memory_format=torch.preserve_format),),
        False,  # the graph is not kept
        False,  # and none is made of this pass
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _is_watched(loss: Tensor, inputs: Sequence[Tensor] | None) -> bool:
    """Whether there is more to do than to call the engine of autograd."""
    return bool(
        not loss.is_cpu  # other threads compute, and are to see this one's context
        or not loss.is_floating_point()
        or (inputs is not None and (not inputs or has_torch_function(tuple(inputs))))
        or has_torch_function((loss,))
        or _COMPILER in sys.modules
        or Tensor.backward is not _TENSORS_OWN
        or torch.autograd.backward is not _TORCHS_OWN
        or _LOG.isEnabledFor(logging.DEBUG)
        or torch._C._are_functorch_transforms_active()
    )
