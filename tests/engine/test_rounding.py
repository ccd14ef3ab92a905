"""Whether the machine that goes on with a run rounds as the one that began it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.random import global_state
from lockstep.engine.digests import Rounding, check_rounding, rounding_of
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.no_ranks

CPU = torch.device("cpu")
HERE, THERE = Rounding("a" * 16, "this machine"), Rounding("b" * 16, "that machine")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_machine_rounds_alike_each_time_and_no_random_number_is_drawn(precision: str) -> None:
    before = global_state()
    one, two = rounding_of(precision, CPU), rounding_of(precision, CPU)
    assert one == two
    assert len(one.digest) == 16
    assert "torch" in one.machine
    assert global_state() == before


def test_precisions_have_different_digests() -> None:
    assert len({rounding_of(precision, CPU).digest for precision in ("fp32", "bf16", "fp16")}) == 3


@pytest.mark.parametrize("there", [None, {}, HERE._asdict(), "damaged"])
def test_nothing_is_said_of_a_machine_that_rounds_alike_or_is_unknown(there: Any) -> None:
    assert check_rounding(HERE, there, "step_1", is_strict=True) == ""


def test_both_machines_are_named() -> None:
    said = check_rounding(HERE, THERE._asdict(), "step_1", is_strict=False)
    assert "step_1: was computed on another machine" in said
    assert "that machine there, this machine here" in said
    with pytest.raises(CheckpointError, match="strict=false"):
        check_rounding(HERE, THERE._asdict(), "step_1", is_strict=True)


def test_going_on_where_floating_point_rounds_otherwise_is_said(
    lockstep: Any, tmp_path: Path
) -> None:
    begun = lockstep("train", "digits", "steps=4", "stop_at_step=2", "--run-dir", "run")
    assert begun.returncode == 0, begun.stderr
    other = {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE", "cold": True}
    refused = lockstep("resume", "run", "strict=true", **other)
    assert refused.returncode == 2
    assert "was computed on another machine" in refused.stderr
    ended = lockstep("resume", "run", **other)
    assert ended.returncode == 0, ended.stderr
    assert "warning: run/checkpoints/step_00000002: was computed on another" in ended.stdout
    assert "MKL_CBWR=COMPATIBLE" in ended.stdout


def test_another_default_dtype_makes_no_difference() -> None:
    expected = rounding_of("fp32", torch.device("cpu")).digest
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert rounding_of("fp32", torch.device("cpu")).digest == expected
    finally:
        torch.set_default_dtype(before)
