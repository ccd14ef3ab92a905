"""Building everything that training needs from a task and a config, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchSource
from lockstep.data.sampler import BatchLayout
from lockstep.engine.audit.pass_state import ForeseenSaves, PassState
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.audit.saved_state import kept_by
from lockstep.engine.digests import Rounding, rounding_of
from lockstep.engine.evaluation.batches import check_judged, is_validation, judged
from lockstep.engine.evaluation.evaluation import Evaluation, evaluations
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.hook import Hook, checked_hooks
from lockstep.engine.optimizer.learning_rates import first_change, values_of
from lockstep.engine.optimizer.schedulers import build_schedulers
from lockstep.engine.passes.batch_loss import check_batch_loss_fits
from lockstep.engine.passes.buffers import Constants, ForwardState
from lockstep.engine.passes.compute import Compute
from lockstep.engine.passes.graphs import check_graphs_fit
from lockstep.engine.passes.stages import stages_of
from lockstep.engine.placement import Placement
from lockstep.engine.recovery.replica_checks import check_same, check_start
from lockstep.engine.run.progress import check_watched
from lockstep.engine.runtime import Runtime, everywhere
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.memory import Kept, check_memory
from lockstep.engine.step.model import (
    Optimization,
    StepChecks,
    TrainedModel,
    build_model,
    built,
    trainable_groups,
)
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.tables.run_tables import check_tables_fit
from lockstep.engine.task import Task, has_carry
from lockstep.engine.training_data import check_parts, training_data
from lockstep.engine.trial.cut_model import StageRehearsal, check_cut_model
from lockstep.engine.trial.drawn_blocks import DrawnBlocks, drawn_blocks, settle
from lockstep.engine.trial.outcome import Rehearsal
from lockstep.engine.trial.trial import Trial
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.cutting import keep, shards_of, units_of
from lockstep.nn.module_row import ModuleRow
from lockstep.nn.row import row_of
from lockstep.nn.tape import storage_of
from lockstep.parallel.compression.sums import first_agreed
from lockstep.parallel.layout import Range

T = TypeVar("T")


@dataclass
class Parts:
    """The parts of a run.

    Attributes:
        model: model in training mode, with its trainable parameters in flat memory.
        task_state: the task and its hooks.
        total_steps: number of optimizer steps of the whole run.
        evaluations: evaluations by split, of those in `Task.splits` that the task has.
        pass_state: state that passes may leave in task, hooks, datasets and model.
        rounding: how this machine rounds.
        facts: values that must be equal on all processes of a run, by a name for people.
    """

    model: nn.Module
    task_state: TaskState
    compute: Compute
    train_step: TrainStep
    sampler: BatchLayout
    loader: BatchSource
    evaluations: dict[str, Evaluation]
    total_steps: int
    pass_state: PassState
    rounding: Rounding
    facts: dict[str, Any]

    @property
    def placement(self) -> Placement:
        """Place of each rank on the mesh."""
        return self.train_step.placement

    @property
    def data_digest(self) -> str:
        """A digest of the dataset's first microbatch."""
        return str(self.facts["first microbatch"])

    @property
    def task_digest(self) -> str | None:
        """The digest of all data that `Task.data_digest` gives, if any."""
        digest: str | None = self.facts["data"]
        return digest


def assemble(task: Task, config: TrainConfig, runtime: Runtime, is_driven: bool = False) -> Parts:
    """Build model, optimizer, data and the training step, for a user's own loop if `is_driven`.

    Raises:
        LockstepError: the task or the config does not work, or ranks do not agree; on all ranks.
    """
    transport = runtime.transport

    def on_all(action: Callable[[], T]) -> T:
        return everywhere(transport, action)

    task_state = on_all(lambda: _checked_task(task, config, is_driven))
    model, compute, optimizer, draws = on_all(lambda: built(task, config, runtime.device))
    local = compute.local.optimizer if compute.local else None
    schedulers = on_all(lambda: build_schedulers(task, local or optimizer, config))
    on_all(lambda: check_graphs_fit(config, runtime.device, compute, model, task_state))
    sizes = {"mesh.pp": config.mesh.pp, "mesh.tp": config.mesh.tp}
    on_all(lambda: check_tables_fit(compute.lookups.tables, sizes))
    start = check_start(transport, model, draws)
    facts: dict[str, Any] = {"config": config.hash, "the model's start": start}
    facts |= {f"table {n}": table.description for n, table in compute.lookups.tables.items()}
    shards = shards_of(model)
    flat = on_all(
        lambda: FlatTensors(
            trainable_groups(model, optimizer),
            "parameter",
            shards,
            units_of(model),
            by_block=draws is not None or (config.shards_gradients and row_of(model) is not None),
            draws=draws,
        ),
    )
    sampler, loader, order = on_all(lambda: training_data(task, config, runtime.device))
    facts |= {"number of samples": sampler.num_samples, "order of samples": order}
    facts["data"] = on_all(task.data_digest)
    check_same(transport, facts)
    check_parts(loader, transport)
    splits = on_all(lambda: evaluations(task, config, runtime.device))
    facts["splits"] = list(splits)
    for name, there in splits.items():
        facts[f"number of samples of {name}"] = there.num_samples
    check_same(transport, facts)
    on_all(lambda: check_judged(config, splits))
    stepping = [*optimizers_in(optimizer).values(), *([local] if local else [])]
    groups = [group for one in stepping for group in one.param_groups]
    values = values_of(groups)
    drawn: DrawnBlocks | None = None
    if draws is not None:
        flat, drawn = on_all(lambda: drawn_blocks(model, flat, compute, loader))
    trial = on_all(lambda: Trial(model, flat, compute, loader, drawn))
    tried = on_all(
        lambda: {n: trial.evaluate(n, e) for n, e in splits.items() if is_validation(n)},
    )
    if tried:
        check_watched(config, judged(tried))
    on_all(lambda: _check_groups_kept(first_change(groups, values)))
    on_all(lambda: schedulers.check_metrics(judged(tried), config.watch))
    on_all(lambda: _check_views(config, flat, drawn, trial))
    if on_all(lambda: settle(model, trial.repeat)):
        flat = on_all(lambda: flat.moved(units_of(model)))
        trial.use(flat)
    on_all(lambda: _rehearse(model, config, flat, drawn, trial, splits, tried))
    facts["first microbatch"] = trial.data_digest
    facts["metrics"] = list(compute.metrics)
    about = config.compression
    agreed = on_all(
        lambda: first_agreed(
            about.name, about.rank, flat.segments, flat.specs, trial.gradients, runtime.device
        ),
    )
    facts["loss and gradient of the first microbatch"] = trial.digest
    check_same(transport, facts)
    state = on_all(lambda: ForwardState(model, trial.changed))
    if task_state.may_change_model:  # and with it any buffer
        saved = model.state_dict().keys()
        state.unsaved |= {
            n: b for n, b in model.named_buffers(remove_duplicate=False) if n not in saved
        }
    if shards:
        whole = on_all(lambda: build_model(task, config, runtime.device))
        on_all(
            lambda: check_cut_model(whole, model, compute, config, loader, splits, runtime.device),
        )
        del whole
    stages = on_all(lambda: stages_of(model, compute, config, loader))
    if drawn is not None:
        drawn.end()
    placement, flat = _placed(config, runtime, model, stages, flat)
    gathered = compute.batch_loss.kept_bytes(config.batch_size) if compute.batch_loss else 0
    kept = Kept(flat, optimizer, compute.phases.are_several, local, gathered)
    size, can_regroup = placement.data.size, transport.can_regroup
    on_all(lambda: check_memory(config, model, kept, size, can_regroup))
    constants = Constants(model, trial.changed)
    total_steps = config.steps or config.epochs * (sampler.steps_per_epoch or 0)
    saves = ForeseenSaves(config, sampler, total_steps, has_validation=bool(tried))
    pass_state = _watched(config.seed, saves, task_state, model, compute, loader, splits)
    on_all(task_state.check)
    facts["phases"] = compute.phases.description()
    facts["hooks"] = [type(hook).__name__ for hook in task_state.hooks]
    train_step = TrainStep(
        runtime,
        config,
        placement,
        TrainedModel(model, flat, state),
        compute,
        Optimization(optimizer, schedulers, total_steps, agreed),
        task_state,
        StepChecks(
            constants,
            pass_state,
            sampler.order_digest,
            saves,
        ),
    )
    pass_state.optimizers = kept_by(optimizers_in(optimizer).values())
    rounding = on_all(lambda: rounding_of(config.precision.dtype, runtime.device))
    if config.strict:
        facts["how the machine rounds (strict)"] = rounding.digest
    facts |= train_step.optimizer_description
    facts["learning rates"] = on_all(train_step.schedule.probe)
    check_same(transport, facts)
    return Parts(
        model,
        task_state,
        compute,
        train_step,
        sampler,
        loader,
        splits,
        total_steps,
        pass_state,
        rounding,
        facts,
    )


def _checked_task(task: Task, config: TrainConfig, is_driven: bool) -> TaskState:
    """The task and its hooks, which the config fits.

    Raises:
        LockstepError: it does not, or a hook is none.
    """
    task_state = TaskState(task, checked_hooks(task), is_driven)
    if config.mesh.tp * config.mesh.pp > 1 or config.shards_parameters:
        _check_whole_model(task_state, config)
    if has_carry(task):
        _check_carry_fits(task, config)
    check_batch_loss_fits(task, config)
    return task_state


def _placed(
    config: TrainConfig,
    runtime: Runtime,
    model: nn.Module,
    stages: Sequence[Range],
    flat: FlatTensors,
) -> tuple[Placement, FlatTensors]:
    """The place of each rank, and the parameters that this one holds there; a collective."""
    row = row_of(model)
    if row is not None and row.has_stages:
        row.untie()
    placement = Placement(config, runtime, model, stages)
    is_joining = runtime.transport.is_joining  # then it gets a place later
    if not is_joining:
        placement.arrange()
    is_undrawn = flat.draws is not None and not placement.in_slices
    if is_undrawn or (placement.is_split and not is_joining):
        flat = flat.restricted(placement.own, by_block=config.shards_gradients)
    if is_undrawn:
        fill = flat.open if is_joining else flat.draw
        for segment in range(len(flat.segments)):
            fill(segment)
        flat.draws = None
    if placement.is_split and not is_joining:
        keep(model, placement.own)
    return placement, flat


def _watched(
    seed: int,
    saves: ForeseenSaves,
    task_state: TaskState,
    model: nn.Module,
    compute: Compute,
    loader: BatchSource,
    splits: dict[str, Evaluation],
) -> PassState:
    """Watch the state that passes may leave behind, in training and in evaluations."""
    datasets = {"train": loader.dataset} | {name: e.dataset for name, e in splits.items()}
    pass_state = PassState(task_state, model, datasets, seed, saves)
    loader.guard = compute.guard = pass_state.guard
    for evaluation in splits.values():
        evaluation.watch(pass_state.guard)
    return pass_state


def _check_groups_kept(changed: str) -> None:
    """Refuse a loss that changes the optimizer's groups: other ranks compute other microbatches.

    Raises:
        TaskError: naming what it has changed, if anything.
    """
    if changed:
        raise TaskError(
            f"{changed} was changed by Task.loss or Task.evaluate; change it in Task.after_step, "
            "or by Task.build_scheduler"
        )


def _check_views(
    config: TrainConfig, flat: FlatTensors, drawn: DrawnBlocks | None, trial: Trial
) -> None:
    """Refuse views of parameters whose memory will move.

    Raises:
        TaskError: naming one.
    """
    if config.mesh.tp * config.mesh.pp > 1 or config.shards_parameters:
        earlier = drawn.earlier if drawn is not None else []
        trial.check_views({storage_of(memory) for memory in [*flat.flats, *earlier]})


def _rehearse(
    model: nn.Module,
    config: TrainConfig,
    flat: FlatTensors,
    drawn: DrawnBlocks | None,
    trial: Trial,
    splits: dict[str, Evaluation],
    tried: dict[str, dict[str, Any]],
) -> None:
    """Refuse code that reads parameters which a rank will not have.

    Raises:
        TaskError: naming it.
    """
    row = row_of(model)
    if config.shards_parameters and drawn is None:  # else all passes were such
        assert row is not None, "others are refused"
        evaluated = {name: (splits[name], metrics) for name, metrics in tried.items()}
        trial.rehearse(Rehearsal(row, flat), evaluated)
    if config.mesh.pp > 1 and isinstance(row, ModuleRow):
        trial.rehearse_stages(StageRehearsal(row, drawn))


def _check_whole_model(task_state: TaskState, config: TrainConfig) -> None:
    """Refuse code that reads the whole model if each rank has only a part of it.

    Raises:
        ConfigError: naming it.
    """
    looking: list[Task | Hook] = []
    if type(task_state.task).after_step is not Task.after_step:
        looking.append(task_state.task)
    looking += [
        hook
        for hook in task_state.hooks
        if hook.changes_model or type(hook).after_step is not Hook.after_step
    ]
    if looking:
        raise ConfigError(
            f"mesh.tp={config.mesh.tp}, mesh.pp={config.mesh.pp}, sharding={config.sharding}: "
            f"{type(looking[0]).__name__}.after_step would see what one rank holds, not the model; "
            "set both to 1, and sharding to gradients at most"
        )


def _check_carry_fits(task: Task, config: TrainConfig) -> None:
    """Refuse a mesh on which other ranks would need the carry than those that compute it.

    Raises:
        ConfigError: naming the key.
    """
    if config.mesh.pp > 1:
        raise ConfigError(
            f"mesh.pp={config.mesh.pp}: the first stage of a pipeline would need what the last one "
            f"has made of the carry ({type(task).__name__}.carry); set mesh.pp=1"
        )
