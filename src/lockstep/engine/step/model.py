"""The model of a run, the optimizer of its parameters, and parameters kept in slices."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint as recompute

from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.audit.hints import check_aliases
from lockstep.engine.audit.pass_state import ForeseenSaves, PassState
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import check_optimizer, default_optimizer, needs_closure
from lockstep.engine.optimizer.schedulers import Schedulers
from lockstep.engine.passes.buffers import Constants, ForwardState
from lockstep.engine.passes.compute import Compute
from lockstep.engine.passes.precision import keep_compiler_out
from lockstep.engine.passes.stages import check_pipeline
from lockstep.engine.placement import Placement
from lockstep.engine.step.workspace import Workspace
from lockstep.engine.tables.run_tables import tables_of
from lockstep.engine.task import Task, has_carry
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.cutting import check_state_dict, cut, shards_of
from lockstep.nn.deferred import ParameterDraws, RefusedReads, build_without_numbers, numbers_given
from lockstep.nn.holding import is_released, say_what_is_held
from lockstep.nn.module_row import ModuleRow
from lockstep.nn.row import row_of, set_row
from lockstep.nn.tape import storage_of
from lockstep.nn.units import found_row
from lockstep.parallel.axes import DepthAxis
from lockstep.parallel.layout import Range


@dataclass(frozen=True)
class TrainedModel:
    """A model, and those of its tensors that a step changes.

    Attributes:
        model: model that is trained.
        flat: trainable parameters in flat memory.
        state: buffers that forward passes change.
    """

    model: nn.Module
    flat: FlatTensors
    state: ForwardState


@dataclass(frozen=True)
class Optimization:
    """How gradients become parameters.

    Attributes:
        optimizer: optimizer of the trainable parameters.
        schedulers: torch schedulers of the learning rate.
        total_steps: number of optimizer steps of the whole run.
        first_agreed: what compression of gradients begins with (`LeafStates.agreed`).
    """

    optimizer: torch.optim.Optimizer
    schedulers: Schedulers
    total_steps: int
    first_agreed: Sequence[Tensor] = ()


@dataclass(frozen=True)
class StepChecks:
    """What is made sure of in each step.

    Attributes:
        constants: parameters and buffers that passes must not change.
        pass_state: state that passes may leave in task, hooks, datasets and model.
        order_digest: digest of the order of samples in a step, which all ranks must have alike.
        saves: when the run's state will be saved.
    """

    constants: Constants
    pass_state: PassState
    order_digest: Callable[[int], int]
    saves: ForeseenSaves


class SlicedParameters:
    """Gathers and frees parameters in slices; does nothing where parameters are whole."""

    def __init__(self, model: nn.Module, placement: Placement) -> None:
        self._model, self._placement = model, placement
        self._is_open = True

    def use(self, flat: FlatTensors, workspace: Workspace) -> None:
        """Use this memory from now on; it is open."""
        self._flat, self._workspace = flat, workspace

    def open(self, gathered: bool = False) -> None:
        """Allocate all parameters, except those of other stages.

        Args:
            gathered: whether they have their values, for which this is a collective of the column;
                else only what this rank keeps of them has.
        """
        if self._placement.in_slices:
            for segment in range(len(self._flat.segments)):
                (self._workspace.gather if gathered else self._workspace.open)(segment)
            self._share_ties()
            self._is_open = True

    def close(self) -> None:
        """Free all but the slices that this rank keeps."""
        if self._placement.in_slices:
            for segment in range(len(self._flat.segments)):
                self._flat.close(segment)
            self._share_ties()
            self._is_open = False

    @contextmanager
    def whole(self, gathered: bool = True) -> Iterator[None]:
        """`open` them within it; changes, which all ranks of a column make alike, are kept."""
        was_open = self._is_open
        self.open(gathered)
        try:
            yield
            self._workspace.take_slices()
        finally:
            if not was_open:
                self.close()

    def slices(self) -> dict[str, Tensor]:
        """The slices that this rank keeps, by names for people; none of whole parameters."""
        if not self._placement.in_slices:
            return {}
        named = {}
        for number, of_segment in enumerate(self._workspace.stepped):
            block = f"column {self._placement.column}, block {self._flat.blocks[number]}"
            for (first, last), parameters, _ in of_segment:
                dtype = parameters.dtype
                named[f"{block}: elements {first} to {last - 1} of {dtype}"] = parameters
        return named

    def _share_ties(self) -> None:
        row = row_of(self._model)
        assert row is not None, "other models are not kept in slices"
        row.ties.share()


def build_model(task: Task, config: TrainConfig, device: torch.device) -> nn.Module:
    """The task's model on its device, in training mode, with initial values set by the seed.

    Raises:
        TaskError: it is no module.
    """
    return _model(task, config, device, by_block=False)[0]


def _model(
    task: Task, config: TrainConfig, device: torch.device, by_block: bool
) -> tuple[nn.Module, ParameterDraws | None]:
    """`build_model`, and how to draw parameters that are left without values if `by_block`."""
    key, tape = random_key(config.seed, Stream.MODEL), None
    seed_all(key)
    if config.init == "by_name":
        model, tape = build_without_numbers(task.build_model, key)
    else:
        model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"build_model: must return an nn.Module, returned {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise TaskError(
                f"build_model: {name} is a SyncBatchNorm, which talks to other ranks; use "
                "BatchNorm: its statistics are averaged over all microbatches"
            )
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise TaskError(
                f"build_model: {name} is a lazy module without parameters yet; give its sizes, or "
                "run a batch through the model in build_model"
            )
    draws = numbers_given(model, tape, device if by_block else None) if tape else None
    return model.to(device).train(), draws


class Built(NamedTuple):
    """What a task and a config make.

    Attributes:
        model: model, cut as the config says.
        compute: what computes it.
        optimizer: optimizer of its parameters.
        draws: how to draw these, if they have no values yet (`TrainConfig.draws_by_block`).
    """

    model: nn.Module
    compute: Compute
    optimizer: torch.optim.Optimizer
    draws: ParameterDraws | None = None


def built(task: Task, config: TrainConfig, device: torch.device) -> Built:
    """Build model and optimizer.

    Raises:
        LockstepError: one of them cannot work.
    """
    keep_compiler_out()
    model, draws = _model(task, config, device, config.draws_by_block)
    check_aliases(task, model)
    if config.num_shards > 1:
        cut(model, config.num_shards)
    if config.shards_parameters and row_of(model) is None:
        set_row(model, found_row(model))
    check_pipeline(model, config)
    check_state_dict(model)
    recompute_activations(model, config.activation_checkpointing)
    _check_local_steps_fit(task, model, config)
    _begin_row(model, config)
    compute = Compute(task, model, config, device)
    _check_compression_fits(compute, config)
    if compute.local is not None:
        return Built(model, compute, compute.local.outer_optimizer())
    released = {storage_of(p): n for n, p in model.named_parameters() if is_released(p)}
    with RefusedReads(released, _read_unmade) if released else nullcontext():
        optimizer = compute.phases.optimizer(task.build_optimizer(model))
        if optimizer is None:
            optimizer = default_optimizer(model, config)
        checked = check_optimizer(optimizer, model, config)
    _check_closure_fits(task, model, checked)
    if draws is not None:
        groups = checked.param_groups
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        for parameter in model.parameters():
            if id(parameter) not in trained and is_released(parameter):
                parameter.data = draws.make(parameter).to(device)
    return Built(model, compute, checked, draws)


def _read_unmade(name: str) -> str:
    return (
        f"build_optimizer: reads {name}, which has no values yet on ranks that draw blocks when "
        "they need them (init=by_name with sharding=parameters or mesh.pp); choose by names and "
        "shapes, or set init=in_order"
    )


def _check_closure_fits(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss again, of a task that keeps more than parameters.

    Raises:
        TaskError: naming both.
    """
    if not needs_closure(optimizer):
        return
    has = ""
    if has_carry(task):
        has = "a carry"
    elif tables_of(model):
        has = "a SparseEmbedding"
    elif task.phases():
        has = "phases"
    if has:
        raise TaskError(
            f"build_optimizer: {type(optimizer).__name__} evaluates the loss again when it steps, "
            f"and {type(task).__name__} has {has}, which moves on once a step; return another "
            "optimizer"
        )


def _begin_row(model: nn.Module, config: TrainConfig) -> None:
    """Have a model that is a row of blocks compute all of them, as blocks."""
    row = row_of(model)
    if row is None:
        return
    row.axis = DepthAxis([Range(0, row.num_blocks)])
    row.is_called_once = config.mesh.pp > 1 or config.shards_parameters
    if row.is_called_once:
        say_what_is_held(model)
    if isinstance(row, ModuleRow):
        row.install()


def _check_local_steps_fit(task: Task, model: nn.Module, config: TrainConfig) -> None:
    """Refuse workers of a task that has more to it than a loss of parameters.

    Raises:
        ConfigError: naming the key.
    """
    if config.local.steps == 1:
        return
    kind, has = type(task).__name__, ""
    if row_of(model) is not None:
        has = "blocks (a lockstep.nn.Pipeline, stages or units), which are called one by one"
    elif shards_of(model):
        has = f"layers in shards (num_shards={config.num_shards}), and a worker steps whole ones"
    elif tables_of(model):
        has = "a SparseEmbedding, whose rows all ranks step together"
    elif has_carry(task):
        has = "a carry, and a worker carries the state of its optimizer"
    elif task.phases():
        has = "phases, and a worker has one optimizer"
    if has:
        raise ConfigError(f"local.steps={config.local.steps}: {kind} has {has}; set local.steps=1")


def _check_compression_fits(compute: Compute, config: TrainConfig) -> None:
    """Refuse to keep what was cut off gradients that a step may not have.

    Raises:
        ConfigError: naming the key.
    """
    name = config.compression.name
    if name != "none" and compute.phases.are_several:
        raise ConfigError(
            f"compression.name={name}: {type(compute.task).__name__} has phases, whose steps have "
            "gradients of some parameters only; set compression.name=none"
        )


def recompute_activations(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Make modules whose names match keep no activations but compute them again for backward.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names = dict(model.named_modules())
    for pattern in patterns:
        matching = fnmatch.filter((n for n in names if n), pattern)
        if not matching:
            raise ConfigError(
                f"activation_checkpointing={pattern!r}: no module has such a name; there are "
                f"{', '.join(list(names)[1:9])}{', …' if len(names) > 9 else ''}"
            )
        for name in matching:
            module = names[name]
            module.forward = partial(recompute, module.forward, use_reentrant=False)


def trainable_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[list[tuple[str, Tensor]]]:
    """The optimizer's groups of trainable parameters by name; all others get no gradient."""
    chosen = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    ids = {id(p) for group in chosen for p in group}
    names = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        parameter.requires_grad_(id(parameter) in ids)
    if not ids:
        raise TaskError("build_model: no parameter requires a gradient; there is nothing to train")
    return [[(names[id(p)], p) for p in group] for group in chosen]
