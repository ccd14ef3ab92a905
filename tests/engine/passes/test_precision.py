from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config import PrecisionConfig
from lockstep.engine.passes.precision import LossScale, autocast

CPU = torch.device("cpu")


def loss_scale(**keys: Any) -> LossScale:
    return LossScale(PrecisionConfig(dtype="fp16", **keys))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loss_scale_is_one_for_all_but_fp16(dtype: Any) -> None:
    scale = LossScale(PrecisionConfig(dtype=dtype, growth_interval=1))
    assert not scale.enabled
    for finite in (True, False, True):
        scale.update(finite)
        assert (scale.value, scale.good_steps) == (1.0, 0)


def test_an_overflow_halves_the_scale_at_once() -> None:
    scale = loss_scale(loss_scale=1024.0)
    scale.update(finite=True)
    scale.update(finite=False)
    assert (scale.value, scale.good_steps) == (512.0, 0)
    scale.update(finite=False)
    assert scale.value == 256.0


def test_enough_steps_without_overflow_double_the_scale() -> None:
    scale = loss_scale(loss_scale=8.0, growth_interval=3)
    values = []
    for _ in range(7):
        scale.update(finite=True)
        values.append(scale.value)
    assert values == [8, 8, 16, 16, 16, 32, 32]
    assert scale.good_steps == 1


def test_an_overflow_starts_the_count_again() -> None:
    scale = loss_scale(loss_scale=8.0, growth_interval=3)
    for finite in (True, True, False, True, True):
        scale.update(finite)
    assert (scale.value, scale.good_steps) == (4.0, 2)
    scale.update(finite=True)
    assert (scale.value, scale.good_steps) == (8.0, 0)


def test_the_scale_stays_within_limits() -> None:
    scale = loss_scale(growth_interval=1)
    for _ in range(100):
        scale.update(finite=True)
    assert scale.value == 2.0**24
    for _ in range(100):
        scale.update(finite=False)
    assert scale.value == 2.0**-14


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_computes_in_the_dtype_and_ends_with_its_block(
    dtype: Any, expected: torch.dtype
) -> None:
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with autocast(PrecisionConfig(dtype=dtype), CPU):
        assert layer(x).dtype == expected
    assert layer(x).dtype == torch.float32
    assert layer.weight.dtype == torch.float32
