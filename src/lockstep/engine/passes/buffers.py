"""State that forward passes change, such as batch norm's running statistics.

Every microbatch starts from the buffers of the last committed step. What each would have made of
them is averaged, weighted like the loss and summed in canonical order; so the buffers after a step
do not depend on the number of ranks. Integer scalars (batch norm's `num_batches_tracked`) count
steps: they advance as in one microbatch.

Parameters and constant buffers no pass may change: they would be changed once for each microbatch
of this rank. Parameters are moved to other memory than a task has given them: one flat array, or
that of a shard or slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.engine.digests import checksum
from lockstep.engine.flat_tensors import FlatTensors, given_other_memory
from lockstep.errors import TaskError
from lockstep.nn.holding import is_released

_MOST_COPIED = 1 << 20
"""Elements of one tensor that are compared by value."""
_VERSION, _IS_TRAINED = attrgetter("_version"), attrgetter("requires_grad")


class TensorPlace(NamedTuple):
    """A parameter or buffer, and where a module keeps it.

    Attributes:
        name: dotted name, as in `state_dict`.
        tensor: tensor that is kept there now.
        held_in: dictionary of the module's parameters or of its buffers.
        key: key of the tensor in that dictionary.
    """

    name: str
    tensor: Tensor
    held_in: dict[str, Tensor | None]
    key: str


def tensor_places(model: nn.Module) -> Iterator[TensorPlace]:
    """All parameters and buffers, persistent or not; a shared one at each of its places."""
    for prefix, module in model.named_modules():
        for held_in in (module._parameters, module._buffers):
            for key, tensor in held_in.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    yield TensorPlace(name, tensor, held_in, key)


class KeptBuffers:
    """A model's buffers, to be put back as they were.

    Attributes:
        names: dotted names of all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy them all."""
        self._places = [p for p in tensor_places(model) if not isinstance(p.tensor, nn.Parameter)]
        self._copies = [place.tensor.detach().clone() for place in self._places]
        self._versions = [place.tensor._version for place in self._places]
        self.names = [place.name for place in self._places]
        self._always = batch_norm_buffers(model)

    def restore(self) -> None:
        """Put back those that have changed."""
        for i, (name, tensor, held_in, key) in enumerate(self._places):
            held_in[key] = tensor
            if tensor._version != self._versions[i] or name in self._always:
                tensor.copy_(self._copies[i])
                self._versions[i] = tensor._version


def batch_norm_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers of batch norm, whose kernels do not count as changes of version."""
    norms = {id(m._buffers) for m in model.modules() if isinstance(m, _NormBase)}
    return {place.name for place in tensor_places(model) if id(place.held_in) in norms}


def changed_by(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Names of the buffers that `forward` changes; all are put back as they were.

    Raises:
        TaskError: it changes a parameter, or makes a parameter or buffer.
    """
    places = list(tensor_places(model))
    before = {p.name: (p.tensor, _kept(p.tensor), p.tensor._version) for p in places}
    forward()
    changed = []
    for name, now, held_in, key in tensor_places(model):
        if name not in before:
            raise TaskError(
                f"{name} was made by a forward pass; register all parameters and buffers in "
                "build_model"
            )
        tensor, copy, version = before[name]
        # A value may stay as it was by chance. Batch norm's kernel does not count versions.
        is_same = now is tensor and tensor._version == version
        if isinstance(copy, int):
            if not is_same or _kept(tensor) != copy:
                raise TaskError(changed_in_pass(f"parameter {name}"))
            continue
        if is_same and same_bits(tensor, copy):
            continue
        changed.append(name)
        held_in[key] = tensor
        tensor.copy_(copy)
    return changed


def _kept(tensor: Tensor) -> Tensor | int:
    """What is kept to detect a change: a copy to restore, or for parameters a checksum."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    return 0 if is_released(tensor) else checksum(tensor)


def changed_in_pass(what: str) -> str:
    """What to say of a tensor that a forward or backward pass has changed and must not."""
    return (
        f"{what} was changed by the forward or backward pass of a microbatch; the result would "
        "depend on the number of ranks. Change it in Task.after_step(model, step), which runs once "
        "a step, alike on every rank"
    )


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal to the bit; NaNs are, and 0.0 and -0.0 are not."""
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class ForwardState:
    """The buffers that forward passes change.

    Attributes:
        flat: buffers that are averaged, in flat memory.
        num_counters: number of buffers that are integer scalars.
        unsaved: buffers that the model's `state_dict` leaves out, by name.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        """Watch the buffers called `names`.

        Raises:
            TaskError: one of them is neither float32, float64 nor an integer scalar.
        """
        places = {place.name: place for place in tensor_places(model)}
        floats: list[tuple[str, Tensor]] = []
        self._counters: list[Tensor] = []
        self._places: dict[int, list[TensorPlace]] = {}
        self.unsaved: dict[str, Tensor] = {}
        persistent = model.state_dict().keys()
        for name in names:
            buffer = places[name].tensor
            if name not in persistent:
                self.unsaved[name] = buffer
            holders = self._places.setdefault(id(buffer), [])
            holders.append(places[name])
            if len(holders) > 1:  # one buffer of several modules
                continue
            if buffer.is_floating_point():
                if not bool(buffer.isfinite().all()):
                    raise TaskError(
                        f"buffer {name}: is changed by forward passes and holds values that are "
                        "not finite, whose changes cannot be averaged over microbatches; start it "
                        "at a finite value"
                    )
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
        self._committed = [b.clone() for b in self._buffers]
        self._committed_counters = [c.clone() for c in self._counters]

    def mark(self) -> None:
        """Take the buffers' present values as the committed ones."""
        if self._buffers:
            torch._foreach_copy_(self._committed, self._buffers)
        if self._counters:
            torch._foreach_copy_(self._committed_counters, self._counters)

    @property
    def memory(self) -> list[Tensor]:
        """What `restore` puts back; the same tensors in every step."""
        return [*self._committed, *self._committed_counters]

    def fetch(self) -> None:
        """Give modules copies for a forward pass, which its backward pass may read much later.

        `collect` takes them away.
        """
        for buffer in [*self._buffers, *self._counters]:
            copy = buffer.clone()
            for _, _, held_in, key in self._places[id(buffer)]:
                held_in[key] = copy

    def collect(self) -> tuple[list[Tensor], list[Tensor]]:
        """What a forward pass has added to buffers, and what it has made of counters.

        `restore` must follow once its backward pass, which may read the buffers, is done.
        """
        deltas: list[Tensor] = []
        if self._buffers:
            now = [self._take_back(b) for b in self._buffers]
            deltas = list(torch._foreach_sub(now, self._committed))
        return deltas, [self._take_back(c) for c in self._counters]

    def restore(self) -> None:
        """Put the committed values back, into the modules' own buffers."""
        # A module may have put another tensor in a buffer's place, which nobody saves or averages.
        for holders in self._places.values():
            for _, buffer, held_in, key in holders:
                held_in[key] = buffer
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
        for name, _, held_in, key in self._places[id(buffer)]:
            held = held_in[key]
            if held is None or (held.shape, held.dtype) != (buffer.shape, buffer.dtype):
                kind = "None" if held is None else f"{held.dtype} {tuple(held.shape)}"
                raise TaskError(
                    f"buffer {name}: was {buffer.dtype} {tuple(buffer.shape)}, and a forward pass "
                    f"made it {kind}; a buffer that forward passes change must keep its shape and "
                    "dtype. Cache what depends on the input in a plain attribute"
                )
            if held is not buffer:
                now = held
                held_in[key] = buffer
        return now.detach()


class Constants:
    """Notices changes by the version counters of tensors, which cost next to nothing to read.

    Changes through `tensor.data` and those of batch norm's kernels are not counted there. So values
    are compared too, in steps whose number is a power of two: often while a run is young.
    """

    def __init__(self, model: nn.Module, changing: Collection[str]) -> None:
        """Watch all parameters, and all buffers but those named in `changing`."""
        self._model = model
        self._changing = changing
        self.watch_again()

    def watch_again(self) -> None:
        """Watch the model's present tensors, some of which have been moved to other memory."""
        model = self._model
        self._ids = _ids(model)
        self._places = [p for p in tensor_places(model) if p.name not in self._changing]
        self._tensors = [place.tensor for place in self._places]
        self._homes = [place.held_in for place in self._places], [p.key for p in self._places]
        self._trained = [tensor.requires_grad for tensor in self._tensors]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._copies: list[Tensor] = []
        self.mark()

    def mark(self, step: int = -1) -> None:
        """Take the present state as the expected one, before the passes of a step."""
        self._versions = [*map(_VERSION, self._tensors)]
        by_value = step >= 0 and step & (step - 1) == 0
        # In the host's memory: a device has none to spare for them.
        places = self._places if by_value else []
        self._copies = [_part(p.tensor).to("cpu", copy=True) for p in places]

    def check(self, when: str, changed: Callable[[str], str] = changed_in_pass) -> None:
        """Make sure that nothing has changed since `mark`.

        Args:
            when: phrase that begins the message, such as `step 3`.
            changed: makes the message for a tensor, by its name, that has changed.

        Raises:
            TaskError: naming the first tensor that has.
        """
        tensors = self._tensors
        # In each step, so without generators and lambdas, which take longer than the comparisons.
        if (
            [*map(_VERSION, tensors)] != self._versions
            or [*map(_IS_TRAINED, tensors)] != self._trained
            or [*map(Tensor.data_ptr, tensors)] != self._pointers
            or not all(map(is_, tensors, map(dict.get, *self._homes)))
        ):
            self._find_changed(when, changed)
        if self._copies:
            self.check_identity(when)
        for place, copy in zip(self._places, self._copies, strict=False):
            if not same_bits(_part(place.tensor), copy.to(place.tensor.device)):
                raise TaskError(f"{when}: {changed(place.name)}")

    def check_identity(self, when: str) -> None:
        """Make sure that the model's tensors are those that it had when it was built.

        Raises:
            TaskError: naming the first that is another.
        """
        if (ids := _ids(self._model)) != self._ids:
            names = [n for n in {**self._ids, **ids} if self._ids.get(n) != ids.get(n)]
            raise TaskError(
                f"{when}: {names[0]} is another tensor than when the model was built, which nobody "
                "trains or saves; change the model's modules in build_model only"
            )

    def _find_changed(self, when: str, changed: Callable[[str], str]) -> None:
        """Raise the error of the first tensor that has changed; released ones may have moved."""
        for index, (name, tensor, held_in, key) in enumerate(self._places):
            if tensor._version != self._versions[index]:
                raise TaskError(f"{when}: {changed(name)}")
            if held_in.get(key) is not tensor:
                raise TaskError(
                    f"{when}: {name} was replaced by another tensor, which nobody trains or saves; "
                    "change it in place, in Task.after_step(model, step)"
                )
            if tensor.requires_grad != self._trained[index]:
                raise TaskError(
                    f"{when}: {name}.requires_grad was changed; what is trained is fixed when the "
                    "model is built. To train a part for some steps only, multiply its loss by 0 "
                    "in the others, and do not decay its weights"
                )
            if (
                tensor.data_ptr() != self._pointers[index]
                and self._trained[index]
                and not is_released(tensor)  # else its block's storage checks it
            ):
                raise TaskError(f"{when}: {given_other_memory(name)}")


def _ids(model: nn.Module) -> dict[str, int]:
    return {place.name: id(place.tensor) for place in tensor_places(model)}


def _part(tensor: Tensor) -> Tensor:
    # A released tensor has a shape without memory: to flatten it would allocate all of it.
    if not tensor.numel() or is_released(tensor):
        return tensor.new_empty(0)
    return tensor.detach().reshape(-1)[:_MOST_COPIED]
