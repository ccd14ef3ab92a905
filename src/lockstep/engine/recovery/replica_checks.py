"""Making sure that what must be the same on all ranks is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.engine.digests import combined_digest, tensor_digest, tensors_digest
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import everywhere
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.errors import DataError, DivergenceError, TaskError, shared
from lockstep.nn.cutting import held_tensors, units_of
from lockstep.nn.deferred import ParameterDraws
from lockstep.nn.holding import EVERYWHERE, RemoteTensor, is_released

if TYPE_CHECKING:
    from lockstep.engine.step.train_step import TrainStep


def check_same(transport: Transport, facts: dict[str, Any]) -> None:
    """Compare JSON-able facts (config, number of samples) of all ranks.

    Raises:
        TaskError: on every rank, naming the first that differs.
    """
    everyone = transport.gather_json(facts)
    for name, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != value:
                raise shared(
                    TaskError(
                        f"{name}: is {value!r} on rank 0 but {theirs.get(name)!r} on rank {rank}; "
                        "every rank must run the same script with the same config and data"
                    )
                )


def check_start(transport: Transport, model: nn.Module, draws: ParameterDraws | None) -> str:
    """Compare all ranks' freshly built models, of which parameters may not be drawn yet.

    Returns:
        SHA-256 of the model, as `model_digest` gives it.

    Raises:
        TaskError: on every rank, naming the first tensor and the ranks that differ.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {n: parameters.get(n, tensor) for n, tensor in model.state_dict().items()}

    def digest(name: str, tensor: Tensor) -> bytes:
        if draws is not None and is_released(tensor):
            tensor = draws.make(tensor)
        return tensor_digest(name, tensor)

    def digests_of_all() -> dict[str, bytes]:
        tensors = state | dict(model.named_buffers())
        return {name: digest(name, tensor) for name, tensor in tensors.items()}

    digests = everywhere(transport, digests_of_all)
    which = _first_difference(transport, {name: d.hex() for name, d in digests.items()})
    if which:
        raise shared(
            TaskError(
                f"build_model: {which} right after it was built; draw all initial values from "
                "torch's, numpy's or Python's global random state (it is seeded alike on all "
                "ranks), never from a rank, the time or the system"
            )
        )
    return combined_digest({name: digests[name] for name in state})


def check_replicas(
    placement: Placement,
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    task_state: TaskState,
    step: int,
    slices: Mapping[str, Tensor] = MappingProxyType({}),
    carries: dict[str, str] | None = None,
    rows: dict[str, str] | None = None,
) -> None:
    """Compare all ranks' parameters, buffers, state of the task, carries and rows after a step.

    Args:
        placement: where each rank is on the mesh.
        model: model of this rank.
        buffers: buffers of the model that its `state_dict` leaves out, by name.
        task_state: state of the task and its hooks, which is compared too.
        step: number of the step.
        slices: parts of parameters, by name, that some other ranks keep too.
        carries: digests of carries, by name, that some other ranks keep too; None on all ranks if
            microbatches carry nothing.
        rows: digests of rows of tables, by name, that some other ranks keep too; None on all ranks
            if there are no tables.

    Raises:
        DivergenceError: on every rank, naming the first tensor and the ranks that differ.
        TaskError: the task's state cannot be saved; on every rank.
    """
    transport = placement.world
    own = everywhere(transport, task_state.digests)
    if placement.in_slices and (which := _first_difference(transport, _digests(slices))):
        raise _diverged(step, which)
    for copies in (carries, rows):
        if copies is not None and (which := _first_difference(transport, copies)):
            raise _diverged(step, which)
    if not placement.is_split:
        tensors = _whole_ones(model.state_dict()) | dict(buffers)
        everyone = transport.gather_json([tensors_digest(tensors), own])
        if all(theirs == everyone[0] for theirs in everyone):
            return
    else:
        tensors = _whole_ones(held_tensors(model, placement.own)) | dict(buffers)
        units = units_of(model)
        by_unit: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            by_unit.setdefault(str(units.get(name, EVERYWHERE)), {})[name] = tensor
        digests = {unit: tensors_digest(of_unit) for unit, of_unit in by_unit.items()}
        ranks = transport.gather_json([digests, own])
        pairs = {pair for theirs, _ in ranks for pair in theirs.items()}
        if all(r[1] == own for r in ranks) and len(pairs) == len(dict(pairs)):
            return
    raise _diverged(step, _first_difference(transport, _digests(tensors) | own))


def check_all(train_step: TrainStep, step: int) -> None:
    """As `check_replicas`, for all that a training step has."""
    carries, tables = train_step.carries, train_step.tables
    check_replicas(
        train_step.placement,
        train_step.model,
        train_step.state.unsaved,
        train_step.task_state,
        step,
        train_step.parameters.slices(),
        carries.digests() if carries is not None else None,
        tables.digests() if tables is not None else None,
    )


def _diverged(step: int, which: str) -> DivergenceError:
    return shared(
        DivergenceError(
            f"step {step}: {which}, though all ranks must hold the same bits: the task, a hook or "
            "an optimizer has changed it by what ranks do not share (a clock, the rank, a random "
            "generator of its own), or memory or hardware is failing; the run stops, earlier "
            "checkpoints are untouched"
        )
    )


def check_streams(transport: Transport, landmarks: dict[str, str], step: int) -> None:
    """Compare what ranks have read of a stream.

    Args:
        transport: the group of ranks.
        landmarks: digests of samples that this rank has read, by place.
        step: number of the step.

    Raises:
        DataError: on every rank, naming the first sample and the ranks that differ.
    """
    found = _first_odd(transport.gather_json(landmarks))
    if found is not None:
        place, odd = found
        raise shared(
            DataError(
                f"step {step}: dataset('train'): {place} is another one on rank {', '.join(odd)} "
                "than on other ranks; every rank must read the same stream (sort the names of "
                "files, and do not look at ranks)"
            )
        )


def _whole_ones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are in memory; of others this rank keeps slices."""
    return {
        n: t for n, t in tensors.items() if not isinstance(t, RemoteTensor) and not is_released(t)
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_digest(name, t).hex() for name, t in tensors.items()}


def _first_difference(transport: Transport, mine: dict[str, str]) -> str:
    """Names the first digest that is not the same everywhere, and the ranks in the minority."""
    found = _first_odd(transport.gather_json(mine))
    if found is None:
        return ""
    name, odd = found
    ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(odd)}"
    return f"{name} on {ranks} differs from the other ranks'"


def _first_odd(everyone: Sequence[Mapping[str, str]]) -> tuple[str, list[str]] | None:
    """The first name whose value differs between ranks, and the ranks in the minority.

    Args:
        everyone: values by name, of each rank; a rank need not have all names.
    """
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = {rank: theirs[name] for rank, theirs in enumerate(everyone) if name in theirs}
        usual, _ = Counter(values.values()).most_common(1)[0]
        odd = [str(rank) for rank, value in values.items() if value != usual]
        if odd:
            return name, odd
    return None
