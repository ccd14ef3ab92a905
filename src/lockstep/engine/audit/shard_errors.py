"""Exceptions of code that cannot take a tensor in shards, as messages for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lockstep.engine.passes.buffers import tensor_places
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.location import frames_of, location
from lockstep.nn.sharded.logits import ShardedLogits
from lockstep.nn.sharded.sharded_tensor import ShardedTensor


@contextmanager
def shards_explained(model: nn.Module) -> Iterator[None]:
    """Say where an exception over a tensor in shards comes from, and what to do.

    Raises:
        TaskError: in place of an exception whose text names such a tensor; or the code has put
            one in a buffer's place.
    """
    try:
        yield
        for name, value, *_ in tensor_places(model):
            if isinstance(value, ShardedTensor):
                raise TaskError(
                    f"buffer {name}: is set to features that are cut into shards (num_shards), "
                    f"other values on each rank: {value.remedy}"
                )
    except LockstepError:
        raise
    except Exception as error:
        kinds = {kind.__name__: kind for kind in (ShardedTensor, ShardedLogits)}
        kind = next((kinds[name] for name in kinds if name in str(error)), None)
        if kind is None:
            raise
        what = f"{type(error).__name__}{location(model, frames_of(error.__traceback__))}"
        raise TaskError(
            f"{what}: {str(error).splitlines()[0]}. It is a tensor whose features are cut into "
            f"shards (num_shards): {kind.remedy}"
        ) from error
