"""State that forward passes change, such as batch norm's running statistics.

Every microbatch starts from the buffers of the last committed step. What each would have made of
them is averaged, weighted like the loss and summed in canonical order; so the buffers after a step
do not depend on the number of ranks. Integer scalars (batch norm's `num_batches_tracked`) count
steps: they advance as in one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.train.flat import FlatTensors


class _Owner(NamedTuple):
    """Where a module keeps a buffer."""

    module: nn.Module
    key: str


def _owners(model: nn.Module) -> Iterator[tuple[str, _Owner]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, _Owner(module, key)


def changed_by(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Names of the buffers that `forward` changes; all are put back as they were."""
    owners = dict(_owners(model))
    before = {n: (o.module._buffers[o.key], o) for n, o in owners.items()}
    copies = {n: (b.clone(), b._version) for n, (b, _) in before.items() if b is not None}
    forward()
    changed = []
    for name, (buffer, owner) in before.items():
        assert buffer is not None
        copy, version = copies[name]
        replaced = owner.module._buffers[owner.key] is not buffer
        # Batch norm's kernel does not count as a change of version.
        if replaced or buffer._version != version or not torch.equal(buffer, copy):
            changed.append(name)
            owner.module._buffers[owner.key] = buffer
            buffer.copy_(copy)
    return changed


class ForwardState:
    """The buffers that forward passes change.

    Attributes:
        flat: those that are averaged, in flat memory.
        num_counters: integer scalars.
        unsaved: those that the model's `state_dict` leaves out, by name.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        """Watch the buffers called `names`.

        Raises:
            TaskError: one of them is neither float32, float64 nor an integer scalar.
        """
        owners = dict(_owners(model))
        floats: list[tuple[str, Tensor]] = []
        self._counters: list[Tensor] = []
        self._owners: dict[int, list[_Owner]] = {}
        self.unsaved: dict[str, Tensor] = {}
        persistent = model.state_dict().keys()
        for name in names:
            owner = owners[name]
            buffer = owner.module._buffers[owner.key]
            assert buffer is not None
            if name not in persistent:
                self.unsaved[name] = buffer
            holders = self._owners.setdefault(id(buffer), [])
            holders.append(owner)
            if len(holders) > 1:  # one buffer of several modules
                continue
            if buffer.is_floating_point():
                floats.append((name, buffer))
            elif buffer.dim() == 0:
                self._counters.append(buffer)
            else:
                raise TaskError(
                    f"buffer {name}: a forward pass changes this {buffer.dtype} array of shape "
                    f"{tuple(buffer.shape)}; how microbatches' changes are to be merged is not "
                    "defined for integer arrays: keep it as a float tensor"
                )
        self.num_counters = len(self._counters)
        self.flat = FlatTensors([floats], "buffer")
        self._buffers = self.flat.tensors
        self.mark()

    def mark(self) -> None:
        """Take the buffers' present values as the committed ones."""
        self._committed = [b.clone() for b in self._buffers]
        self._committed_counters = [c.clone() for c in self._counters]

    def collect(self, weight: float) -> tuple[list[Tensor], list[int]]:
        """What a forward pass has changed, times `weight`, and its counters.

        `restore` must follow once its backward pass, which may read the buffers, is done.
        """
        deltas: list[Tensor] = []
        counters: list[int] = []
        if self._buffers:
            now = [self._take_back(b) for b in self._buffers]
            deltas = list(torch._foreach_sub(now, self._committed))
            torch._foreach_mul_(deltas, weight)
        if self._counters:
            counters = [int(self._take_back(c)) for c in self._counters]
        return deltas, counters

    def restore(self) -> None:
        """Put the committed values back."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._committed)
        if self._counters:
            torch._foreach_copy_(self._counters, self._committed_counters)

    def commit(self, sums: list[Tensor], weight: float, counters: list[int]) -> None:
        """Advance by the weighted mean of the microbatches' changes."""
        if self._buffers:
            torch._foreach_add_(self._buffers, torch._foreach_div(sums, weight))
            torch._foreach_copy_(self._committed, self._buffers)
        for buffer, value in zip(self._counters, counters, strict=True):
            buffer.fill_(value)
        if self._counters:
            torch._foreach_copy_(self._committed_counters, self._counters)

    def _take_back(self, buffer: Tensor) -> Tensor:
        """The buffer's present value; the modules hold the buffer itself again afterwards."""
        now = buffer
        for module, key in self._owners[id(buffer)]:
            held = module._buffers[key]
            assert held is not None
            if held is not buffer:
                now = held
                module._buffers[key] = buffer
        return now.detach()
