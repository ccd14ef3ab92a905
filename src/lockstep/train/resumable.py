"""Whether a checkpoint that verifies makes sense: types, ranges, and one part fitting the other.

A SHA-256 tells damage. It does not tell what another program, another version or a hand has
written and signed anew; that is refused here, before anything of it is in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.errors import CheckpointError
from lockstep.parsing import as_type, shown
from lockstep.train.checkpoint import Snapshot
from lockstep.train.flat import FlatTensors
from lockstep.train.optimizer import ELEMENTWISE, Stepper
from lockstep.train.precision import LossScale
from lockstep.train.progress import Progress


@dataclass(frozen=True)
class SamplerMeta:
    """What a checkpoint says of the data.

    Attributes:
        num_samples: of the dataset.
        epoch: of the next step.
        data_digest: of the first microbatch.
    """

    num_samples: int
    epoch: int
    data_digest: str


def check_meta(snapshot: Snapshot, where: str) -> tuple[Progress, SamplerMeta]:
    """What a snapshot says of progress and data, which must be of the snapshot's step.

    Raises:
        CheckpointError: names the field that is missing or wrong.
    """
    progress = _part(snapshot, "progress", Progress, where)
    sampler = _part(snapshot, "sampler", SamplerMeta, where)
    problem = progress.problem()
    if progress.step != snapshot.step:
        problem = f"step={progress.step}: the checkpoint is of step {snapshot.step}"
    if problem:
        raise CheckpointError(f"{where}: is damaged: progress.{problem}")
    if sampler.epoch < 0 or sampler.num_samples < 1:
        raise CheckpointError(f"{where}: is damaged: sampler: {sampler}")
    return progress, sampler


def check_training_state(
    snapshot: Snapshot,
    config: TrainConfig,
    total_steps: int,
    stepper: Stepper,
    where: str,
) -> None:
    """Refuse a snapshot whose progress, loss scale or optimizer state cannot be this run's.

    Args:
        snapshot: whose model fits, see `restore.check_fits`.
        config: of the run.
        total_steps: of the run.
        stepper: of the run.
        where: what errors call the snapshot.

    Raises:
        CheckpointError: names the field or tensor.
    """
    progress, _ = check_meta(snapshot, where)
    if progress.step > total_steps:
        raise CheckpointError(
            f"{where}: is damaged: progress.step={progress.step}: the run has {total_steps} steps"
        )
    if progress.finished and progress.step < total_steps and not progress.exhausted(config):
        raise CheckpointError(
            f"{where}: is damaged: progress.finished={shown(progress.finished)}: nothing else in "
            "it says that the run is over"
        )
    scale = LossScale(config.precision)
    problem = _loss_scale_problem(snapshot.meta.get("loss_scale"), scale, config)
    problem = problem or _tensors_problem(snapshot, stepper.flat)
    problem = problem or _scalars_problem(snapshot.meta.get("optimizer_scalars"))
    if problem:
        raise CheckpointError(f"{where}: is damaged: {problem}")
    if stepper.elementwise and type(stepper.optimizer) in ELEMENTWISE:
        _check_layout(snapshot, stepper, scale, where)


def _part(snapshot: Snapshot, key: str, kind: Any, where: str) -> Any:
    try:
        return as_type(kind, snapshot.meta.get(key))
    except ValueError as error:
        raise CheckpointError(f"{where}: is damaged: {key}: {error}") from None


def _loss_scale_problem(found: Any, scale: LossScale, config: TrainConfig) -> str:
    try:
        value, good_steps = as_type(tuple[float, int], found)
    except ValueError as error:
        return f"loss_scale: {error}"
    if not scale.enabled:
        fits = (value, good_steps) == (scale.value, 0)
    else:
        fits = math.isfinite(value) and value > 0
        fits = fits and 0 <= good_steps < config.precision.growth_interval
    return "" if fits else f"loss_scale={found}: cannot be that of {config.precision.dtype}"


def _tensors_problem(snapshot: Snapshot, flat: FlatTensors) -> str:
    """What is wrong with the optimizer's tensors: there must be one for each parameter."""
    parameters = flat.named(flat.flats)
    keys = {name.partition("/")[0] for name in snapshot.optimizer}
    wanted = {f"{key}/{name}": p for key in sorted(keys) for name, p in parameters.items()}
    for name in dict.fromkeys([*wanted, *snapshot.optimizer]):
        if name not in snapshot.optimizer:
            return f"optimizer.safetensors: has no {shown(name)}"
        if name not in wanted:
            return f"optimizer.safetensors: {shown(name)} is of no parameter that is trained"
        there, here = snapshot.optimizer[name], wanted[name]
        if (there.shape, there.dtype) != (here.shape, here.dtype):
            return (
                f"optimizer.safetensors: {shown(name)} is {there.dtype} {tuple(there.shape)}, its "
                f"parameter {here.dtype} {tuple(here.shape)}"
            )
    return ""


def _scalars_problem(found: Any) -> str:
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        return f"optimizer_scalars={shown(found)}: must be objects by name"
    for owner, values in found.items():
        for key, value in values.items():
            place = f"optimizer_scalars.{shown(owner)}.{shown(key)}={shown(value)}"
            if isinstance(value, list) or (isinstance(value, dict) and not _is_tensor(value)):
                return f"{place}: must be a number, a text or a tensor of one element"
            number = value["value"] if isinstance(value, dict) else value
            if key == "step" and not _is_count(number):
                return f"{place}: must be a whole number, 0 or more"
    return ""


def _is_tensor(value: dict[str, Any]) -> bool:
    """Whether this is how a tensor of one element is written."""
    name, number = value.get("dtype"), value.get("value")
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if value.keys() != {"dtype", "value"} or not isinstance(dtype, torch.dtype):
        return False
    if not isinstance(number, (bool, int, float)):
        return False
    try:
        there = torch.tensor(number, dtype=dtype).item()
    except (RuntimeError, ValueError, OverflowError, TypeError):
        return False
    return there == number or number != number


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 2**53 and value == int(value)


def _check_layout(snapshot: Snapshot, stepper: Stepper, scale: LossScale, where: str) -> None:
    """One of torch's own optimizers keeps the same state from its first step on."""
    found = _Layout(
        {name.partition("/")[0] for name in snapshot.optimizer},
        {
            owner: {k: v["dtype"] if isinstance(v, dict) else "" for k, v in values.items()}
            for owner, values in snapshot.meta["optimizer_scalars"].items()
        },
    )
    if found == _Layout(set(), {}) and (scale.enabled or not snapshot.step):
        return  # no step so far, or all of them were skipped
    own = _layout(stepper)
    if found != own:
        raise CheckpointError(
            f"{where}: is of another optimizer: it has {found}, this "
            f"{type(stepper.optimizer).__name__} keeps {own}"
        )
    for owner, values in snapshot.meta["optimizer_scalars"].items():
        count = values.get("step", snapshot.step)
        count = count["value"] if isinstance(count, dict) else count
        if count > snapshot.step or (count < snapshot.step and not scale.enabled):
            raise CheckpointError(
                f"{where}: is damaged: optimizer_scalars.{owner}.step={count}: the checkpoint is "
                f"of step {snapshot.step}"
            )


class _Layout(NamedTuple):
    """What an optimizer keeps: whole tensors by key; all else by group and key, with its dtype."""

    tensors: set[str]
    scalars: dict[str, dict[str, str]]

    def __str__(self) -> str:
        groups = [f"{', '.join(sorted(keys))} of group {g}" for g, keys in self.scalars.items()]
        return "; ".join(filter(None, [", ".join(sorted(self.tensors)), *groups])) or "no state"


def _layout(stepper: Stepper) -> _Layout:
    """Found by stepping a small optimizer of the same kind."""
    own, flat = stepper.optimizer, stepper.flat
    layout = _Layout(set(), {})
    for piece in flat.pieces:
        parameter = nn.Parameter(torch.zeros_like(flat.flats[piece.segment][:2]))
        parameter.grad = torch.zeros_like(parameter)
        trial = type(own)([parameter], lr=1e-3)  # type: ignore[call-arg]
        hyper = own.param_groups[piece.group]
        trial.param_groups[0].update({k: v for k, v in hyper.items() if k != "params"})
        trial.step()
        for key, value in trial.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                layout.tensors.add(key)
            else:
                dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
                layout.scalars.setdefault(str(piece.group), {})[key] = dtype
    return layout
