"""Whole passes of microbatches on a GPU, as CUDA graphs where these save time.

Python takes longer to launch a kernel of a small model than the kernel takes. A graph has all
kernels of a microbatch's forward and backward pass, and is launched at once. It reads the batch
from memory of its own, and leaves gradients and sums there; random numbers come from the seed that
is set before each replay. So it gives the bits that Python's launches give.

What Python does beside is not done again. So a pass is captured only if it neither waits for the
GPU nor draws on the host, and nothing in it or between steps might change what it reads. A replay
is compared to a computed pass, to the bit, when captured, and whenever a graph is used next after
the steps 1, 2, 4, 8, … and those before foreseen checkpoints have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import TrainConfig
from lockstep.data.loader import with_tensors
from lockstep.data.random import host_state, seed_torch
from lockstep.engine.events import Warned
from lockstep.engine.passes.backward import Backward, Leaf
from lockstep.engine.passes.buffers import tensor_places
from lockstep.engine.passes.compute import Compute
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.row import row_of

if TYPE_CHECKING:
    from lockstep.engine.passes.passes import StepParts

_NUM_EAGER = 2
"""Batches of the same shapes that come before the one whose passes are captured."""
_MOST_GRAPHS, _MOST_SHAPES = 16, 256
_GAIN = 0.9
"""With `auto`, a replay takes at most this part of the time of a computed pass."""
_COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Refused(Exception):
    """Why a pass is not captured; empty if that is nothing to tell."""


class _Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for the GPU, as far as torch says it of an operation.

    Not by torch's mode that finds all such waits: other threads, which write checkpoints, may wait.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        copied = (*args[:2], made) if func.overloadpacket in _COPIES else ()
        devices = {tensor.device for tensor in copied if isinstance(tensor, Tensor)}
        waits = not _WAITS.isdisjoint(func.tags)
        if func is torch.ops.aten.index.Tensor:  # by a mask, its result is of any size
            waits = any(i is not None and i.dtype == torch.bool for i in args[1])
        if waits or len(devices) > 1:
            raise Refused(f"{func}: waits for the GPU, as `.item()`, `.cpu()` and copies to it do")
        return made


class Capture:
    """Graphs of torch, which share a pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._before = 0

    def begin(self) -> None:
        """Begin to measure memory, for `has_room`."""
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def has_room(self) -> bool:
        """Whether there is memory for what was computed since `begin`, once more."""
        free, _ = torch.cuda.mem_get_info()
        return 2 * (torch.cuda.max_memory_allocated() - self._before) <= free

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture what `work` launches; returns what launches it again, all at once."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        kept = generator.clone_state()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                # Threads that write checkpoints may go on meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except BaseException:
            # A capture that has failed leaves the generator in a state in which it draws no more.
            generator.graphsafe_set_state(kept)
            raise
        return graph.replay

    def wait(self) -> None:
        """Return when the GPU has done all that it was given."""
        torch.cuda.synchronize()


def capture_on(device: torch.device) -> Capture | None:
    """What captures the work of a device; None if it has no graphs."""
    return Capture() if device.type == "cuda" else None


def reason_against(
    config: TrainConfig, compute: Compute, model: nn.Module, task_state: TaskState
) -> str:
    """Why microbatches are not captured, as far as config, task and model tell; else empty."""
    if config.compute.graphs is False:
        return "compute.graphs=false"
    if is_divided := _divided(config, compute, model):
        return is_divided
    if config.activation_checkpointing:
        return "activation_checkpointing sets states of generators inside a pass"
    if hooked := _hooked(model):
        return hooked
    if not config.precision.deterministic:
        return "precision.deterministic=false: a replay cannot be compared to the bit"
    between = [type(hook).__name__ for hook in task_state.hooks if not hook.first_only]
    kind = type(compute.task)
    if kind.after_step is not Task.after_step or kind.lr_factor is not Task.lr_factor:
        between.append(kind.__name__)
    if task_state.is_driven:
        between.append("the body of the loop")
    if between and config.compute.graphs == "auto":
        return f"{between[0]} may change what the loss reads between steps"
    return ""


def check_graphs_fit(
    config: TrainConfig,
    device: torch.device,
    compute: Compute,
    model: nn.Module,
    task_state: TaskState,
) -> None:
    """Refuse `compute.graphs=true` where there are none.

    Raises:
        ConfigError: naming why.
    """
    if config.compute.graphs is not True:
        return
    reason = reason_against(config, compute, model, task_state)
    if not reason and device.type != "cuda":
        reason = f"ranks compute on {device.type}, which has no CUDA graphs"
    if reason:
        raise ConfigError(f"compute.graphs=true: {reason}; set compute.graphs=auto")


def _divided(config: TrainConfig, compute: Compute, model: nn.Module) -> str:
    """What makes more of a microbatch than one forward and one backward pass, if anything."""
    kind = type(compute.task).__name__
    found = {
        "local.steps": compute.local is not None,
        f"{kind}.carry": compute.has_carry,
        f"{kind}.batch_loss": compute.batch_loss is not None,
        f"{kind}.phases": compute.phases.are_several,
        "lockstep.nn.SparseEmbedding": bool(compute.lookups.tables),
        "compression.name": config.compression.name != "none",
        f"sharding={config.sharding}": config.shards_gradients,
        "mesh.tp": config.mesh.tp > 1,
        "a model in blocks (lockstep.nn)": row_of(model) is not None,
    }
    return next((f"{name} is not captured" for name, is_there in found.items() if is_there), "")


def _hooked(model: nn.Module) -> str:
    """Which module or parameter has a hook of torch, in words; empty if none has."""
    is_global = nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    there = ["all modules"] if is_global else []
    for name, module in model.named_modules():
        hooks: tuple[Any, ...] = (module._forward_hooks, module._forward_pre_hooks)
        if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
            there.append(f"module {name}".rstrip())
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            there.append(f"parameter {name}")
    return f"{there[0]}: has a hook of torch, which Python has to call" if there else ""


@dataclass
class _Graph:
    """The captured passes of batches of the same shapes.

    Attributes:
        step: step in which they were captured.
        inputs: memory that a batch is copied to.
        replay: launches them.
        leaf: what they leave; the same memory each time.
    """

    step: int
    inputs: list[Tensor]
    replay: Callable[[], None]
    leaf: Leaf


class WholePasses:
    """Computes leaves of microbatches without waiting for the device, by graphs where it can.

    Attributes:
        is_eager: whether to leave graphs alone, as in a step that is repeated to be compared.
    """

    def __init__(self, parts: StepParts, backward: Backward, capture: Capture | None) -> None:
        """Bind together what a pass works on; without `capture` there are no graphs."""
        config, model = parts.config, parts.model
        self._is_measured = config.compute.graphs == "auto"
        self._runtime, self._compute, self._backward = parts.runtime, parts.compute, backward
        self._loss_scale, self._capture, self._parts = parts.loss_scale, capture, parts
        self._memory = [place.tensor for place in tensor_places(model)] + parts.state.memory
        self._model, self._modules = model, list(model.modules())
        self._stands_on: list[object] = []
        self._num_seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Graph | None] = {}
        self.is_eager, self._unchecked = False, set[Hashable]()

    def begin(self, step: int) -> None:
        """Before the passes of a step: forget graphs of other memory than there is now."""
        if self._capture is None:
            return
        now: list[object] = [*map(Tensor.data_ptr, self._memory)]
        now += [*(module.training for module in self._modules), self._loss_scale.value]
        if now != self._stands_on:
            self._stands_on = now
            self._graphs.clear()
        if (step + 1) & step == 0 or self._parts.saves.is_due(step + 1):
            self._unchecked = {key for key, graph in self._graphs.items() if graph is not None}

    def leaf(self, step: int, microbatch: int, batch: Any) -> Leaf:
        """The leaf of a microbatch; its memory may be overwritten by the next one.

        Raises:
            TaskError: the loss did not return what it must, or a graph does not give its bits.
        """
        made = None
        if self._capture is not None and not self.is_eager:
            try:
                made = self._by_graph(self._capture, step, microbatch, batch)
            except Refused as refused:
                self._give_up(step, str(refused))
        if made is None:
            self._compute.enter_forward(step, microbatch)
            made = self._computed(step, batch)
        return made

    def _by_graph(self, capture: Capture, step: int, microbatch: int, batch: Any) -> Leaf | None:
        key = _shapes(batch, leaves := list[Tensor]())
        if not leaves:
            raise Refused("a batch holds no tensors")
        if key not in self._graphs:
            count = self._num_seen[key] = self._num_seen.get(key, 0) + 1
            if len(self._num_seen) > _MOST_SHAPES:
                raise Refused(f"batches have more than {_MOST_SHAPES} shapes")
            if count <= _NUM_EAGER or len(self._graphs) == _MOST_GRAPHS:
                return None
            self._graphs[key] = self._captured(capture, step, microbatch, batch, leaves)
        graph = self._graphs[key]
        if graph is None:
            return None
        if key not in self._unchecked:
            return self._replayed(graph, step, microbatch, leaves)
        self._unchecked.discard(key)
        if hooked := _hooked(self._model):
            raise Refused(hooked)
        copies = iter([leaf.clone() for leaf in leaves])  # a loss may change its batch
        self._compute.enter_forward(step, microbatch)
        computed = self._computed(step, with_tensors(batch, lambda _: next(copies)))
        made = self._replayed(graph, step, microbatch, leaves)
        if not computed.is_same(made):
            raise TaskError(
                f"step {step}: the CUDA graph of Task.loss gave another result than the loss: it "
                f"reads a value of Python that has changed since step {graph.step}, where the "
                "graph was captured. Keep it in a tensor on the GPU that is changed in place, or "
                "set compute.graphs=false, and go on from an earlier checkpoint"
            )
        return made

    def _computed(self, step: int, batch: Any) -> Leaf:
        """Launch the passes of a microbatch, with the random state that there is."""
        loss = self._compute.loss(step, batch)
        scalars = self._compute.scalars(step, loss)
        return self._backward.on_device(loss.sum, scalars, self._loss_scale.value)

    def _replayed(self, graph: _Graph, step: int, microbatch: int, leaves: list[Tensor]) -> Leaf:
        torch._foreach_copy_(graph.inputs, leaves)
        seed_torch(self._compute.key(step, microbatch))
        graph.replay()
        return graph.leaf

    def _captured(
        self, capture: Capture, step: int, microbatch: int, batch: Any, leaves: list[Tensor]
    ) -> _Graph | None:
        """A graph for batches of these shapes; None if it would be no quicker.

        Raises:
            Refused: there can be none.
        """
        if hooked := _hooked(self._model):
            raise Refused(hooked)
        inputs = [leaf.clone() for leaf in leaves]
        made: list[Leaf] = []

        def compute() -> None:
            there = iter(inputs)
            made.append(self._computed(step, with_tensors(batch, lambda _: next(there))))

        try:
            self._compute.enter_forward(step, microbatch)
            before = host_state()
            with _Rehearsal():  # type: ignore[no-untyped-call]
                compute()
            if host_state() != before:
                raise Refused(
                    "Task.loss draws random numbers on the host, which a graph would not draw "
                    "again; draw them on the GPU (`torch.rand(…, device=x.device)`)"
                )
            made.clear()
            torch._foreach_copy_(inputs, leaves)
            self._compute.enter_forward(step, microbatch)
            capture.begin()
            compute()
            if self._is_measured and not capture.has_room():
                return None
            eager_s = self._seconds(capture, compute)
            expected = made[0]
            made.clear()
            torch._foreach_copy_(inputs, leaves)
            self._compute.enter_forward(step, microbatch)
            graph = _Graph(step, inputs, capture.capture(compute), made[0])
            if self._is_measured and self._seconds(capture, graph.replay) > _GAIN * eager_s:
                return None
            if not expected.is_same(self._replayed(graph, step, microbatch, leaves)):
                raise Refused("a replay gave other bits than the passes that it was captured of")
        except Exception as error:
            self._backward.restart()
            if isinstance(error, Refused):
                raise
            # What has ended a capture comes to light as the context of the error at its end.
            first = error.__context__ or error
            raise Refused(f"{type(first).__name__}: {str(first).partition(chr(10))[0]}") from error
        return graph

    def _seconds(self, capture: Capture, work: Callable[[], None]) -> float:
        """The time that some work takes, the lesser one of two tries."""
        tries = []
        for _ in range(2):
            capture.wait()
            began = perf_counter()
            work()
            capture.wait()
            tries.append(perf_counter() - began)
        return min(tries)

    def _give_up(self, step: int, reason: str) -> None:
        """Compute without graphs from now on."""
        self._capture = None
        self._graphs.clear()
        text = f"microbatches are computed without CUDA graphs: {reason}"
        self._runtime.emit(Warned(step=step, message=text))


def whole_passes(parts: StepParts, backward: Backward) -> WholePasses | None:
    """What computes microbatches on a GPU, if each has one forward and one backward pass."""
    capture, kind = capture_on(parts.runtime.device), parts.runtime.device.type
    if not (capture or kind != "cpu") or _divided(parts.config, parts.compute, parts.model):
        return None
    if reason_against(parts.config, parts.compute, parts.model, parts.task_state):
        capture = None
    return WholePasses(parts, backward, capture)


def _shapes(batch: Any, leaves: list[Tensor]) -> Hashable:
    """What batches must have in common to be computed by one graph; appends tensors to `leaves`.

    Raises:
        Refused: it holds something else than tensors, numbers and texts.
    """
    if isinstance(batch, Tensor):
        if type(batch) is not Tensor or batch.layout is not torch.strided:
            raise Refused(f"a batch holds a {type(batch).__name__} of layout {batch.layout}")
        leaves.append(batch)
        return batch.shape, batch.stride(), batch.dtype, batch.device
    if isinstance(batch, dict):
        return type(batch), *((name, _shapes(value, leaves)) for name, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return type(batch), *(_shapes(value, leaves) for value in batch)
    if batch is None or type(batch) in (bool, int, float, str, bytes):
        return type(batch), batch
    raise Refused(f"a batch holds a {type(batch).__name__}, which may differ from batch to batch")
