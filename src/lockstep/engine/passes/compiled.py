"""What `torch.compile` may go by."""

from __future__ import annotations

import sys

_MANY = 2**30


def compile_by_shape() -> None:
    """Have every shape compiled by itself, whichever shapes were there before.

    Else a kernel for any size, or none, takes over after the first few shapes, rounds otherwise,
    and ranks meet shapes in different orders. Who compiles with `dynamic=True` asks for that.
    """
    dynamo = sys.modules.get("torch._dynamo")  # the first optimizer has imported it
    if dynamo is not None:
        dynamo.config.automatic_dynamic_shapes = False
        dynamo.config.recompile_limit = _MANY
        dynamo.config.accumulated_recompile_limit = _MANY
