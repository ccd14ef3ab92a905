"""Whether a model in shards computes what the whole model does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.data.batch_source import BatchSource
from lockstep.engine.evaluation.evaluation import Evaluation
from lockstep.engine.passes.buffers import KeptBuffers
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Loss
from lockstep.engine.trial.parameter_reads import check_parameter_reads, number
from lockstep.errors import TaskError
from lockstep.nn.cutting import joined_by_name, region_of, shards_of

_TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Relative difference that rounding may make, by `precision.dtype`."""
_FEW = 0.05
"""Part of a metric's weight by which it may differ: a rounding may flip what is counted."""
_MAY_NEED_ALL = frozenset(
    {
        "amax", "amin", "argmax", "argmin", "batch_norm", "cumprod", "cumsum", "group_norm",
        "instance_norm", "layer_norm", "log_softmax", "logsumexp", "max", "mean", "median", "min",
        "norm", "normalize", "prod", "rms_norm", "softmax", "softmin", "sort", "std", "sum", "topk",
        "var", "var_mean", "vector_norm",
    }
)  # fmt: skip
"""Functions that mix features if they are called along them."""


def check_cut_model(
    whole: nn.Module,
    model: nn.Module,
    compute: Compute,
    config: TrainConfig,
    loader: BatchSource,
    evaluations: Mapping[str, Evaluation],
    device: torch.device,
) -> None:
    """Compare the first microbatch in evaluation mode: loss, metrics, gradients; talks to nobody.

    What needs all features at once, such as a softmax over them, is wrong in a region in which each
    shard is computed by itself, and nothing else would notice.

    Args:
        whole: the model before it was cut.
        model: model in shards, all of which this process has.
        compute: loss of the task, of `model`.
        config: config of the run.
        loader: loader of the training samples.
        evaluations: evaluations by split.
        device: device that both models are on.

    Raises:
        TaskError: they differ by more than rounding, or the task reads parameters in shards.
    """
    there = _values(whole, Compute(compute.task, whole, config, device), loader)
    buffers = KeptBuffers(model)
    try:
        here, calls = _noted(model, compute, loader)
        why = _why(calls)
        _check_values(here, there, config, why)
        _check_gradients(whole, model, config, why)
        check_parameter_reads(model, compute, loader, evaluations)
    finally:
        buffers.restore()


def _noted(
    model: nn.Module, compute: Compute, loader: BatchSource
) -> tuple[Mapping[str, tuple[float, float]], Mapping[str, str]]:
    """`_values` of a model in shards, and where it calls functions on features in shards."""
    region = region_of(model)
    assert region is not None, "the model is not cut"
    calls: dict[str, str] = {}
    region.calls = calls
    try:
        return _values(model, compute, loader), calls
    finally:
        region.calls = None


def _check_values(
    here: Mapping[str, tuple[float, float]],
    there: Mapping[str, tuple[float, float]],
    config: TrainConfig,
    why: str,
) -> None:
    """Compare sums of loss and metrics in shards (`here`) and of the whole model (`there`)."""
    tolerance = _TOLERANCE[config.precision.dtype]
    for name, (expected, weight) in there.items():
        found = here[name][0]
        allowed = tolerance * abs(expected) + (0.0 if name == "loss" else _FEW * abs(weight))
        if not math.isclose(found, expected, rel_tol=tolerance, abs_tol=allowed + 1e-6):
            raise TaskError(
                f"num_shards={config.num_shards}: the sum of the {name} of the first microbatch is "
                f"{found:.6g} in shards and {expected:.6g} of the whole model: {why}"
            )


def _why(calls: Mapping[str, str]) -> str:
    """What may be wrong.

    Args:
        calls: where functions were called on features in shards, by their names.
    """
    suspects = [call for name, call in calls.items() if name in _MAY_NEED_ALL]
    return (
        "something between a layer that cuts features and the one that sums them needs all "
        "features at once, such as a softmax, a norm or a mean over them, or is no function of "
        "torch; leave these layers out of the plan"
    ) + (f". Look at {', '.join(suspects)}" if suspects else "")


def _check_gradients(whole: nn.Module, model: nn.Module, config: TrainConfig, why: str) -> None:
    """Compare the gradients that `_values` has left, and let go of them."""
    tolerance = _TOLERANCE[config.precision.dtype]
    shards = shards_of(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    trained |= {shards[n].whole for n in trained if n in shards}  # no optimizer may have the others
    expected = {
        n: p.grad for n, p in whole.named_parameters() if p.grad is not None and n in trained
    }
    parts = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    missing = {n: torch.zeros_like(p) for n, p in model.named_parameters() if n not in parts}
    found = dict(joined_by_name(parts | missing, shards))
    largest = max((float(g.norm()) for g in expected.values()), default=0.0)
    for name, gradient in expected.items():
        gap = float((found[name] - gradient).norm())
        # A gradient that cancels out has the rounding of those that do not.
        if gap > 10 * tolerance * (float(gradient.norm()) + 0.01 * largest):
            raise TaskError(
                f"num_shards={config.num_shards}: the gradient of {name} in the first microbatch "
                f"has norm {float(found[name].norm()):.6g} in shards and "
                f"{float(gradient.norm()):.6g} of the whole model: {why}"
            )


def _values(
    model: nn.Module, compute: Compute, loader: BatchSource
) -> dict[str, tuple[float, float]]:
    model.eval()
    try:
        loss: Loss = compute.forward(0, 0, loader.microbatch(0, 0))
        model.zero_grad(set_to_none=True)
        loss.sum.backward()  # type: ignore[no-untyped-call]
    finally:
        model.train()
    pairs = {"loss": (loss.sum, loss.weight), **loss.metrics}
    return {name: (number(total), number(weight)) for name, (total, weight) in pairs.items()}
