"""Models that torch compiles: the bits of one process, whichever shapes a rank meets first."""

import shutil
from pathlib import Path

import pytest
import torch
from tests.distributed.conftest import same
from torch import nn

from lockstep.engine.faults import PlannedFault
from lockstep.engine.passes.compiled import compile_by_shape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler"),
]
TASK = f"{Path(__file__).with_name('compiled_tasks.py')}:Compiled"
CONFIG = (
    "steps=12", "lr=0.01", "batch_size=30", "num_microbatches=5", "eval_every=6",
    "eval_batch_size=4", "log_every=1", "checkpoint.every=4", "digest_every=3",
)  # fmt: skip
SHAPES = 16


def test_a_compiled_model_has_the_bits_of_one_process(train_on, reference, tmp_path):
    ended = train_on(tmp_path / "run", 3, faults=[PlannedFault(1, 5, "reduce")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


def test_every_shape_is_compiled_whichever_were_there_before(monkeypatch):
    from torch._dynamo import config, reset
    from torch._dynamo.utils import counters

    for name in ("automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(config, name, getattr(config, name))
    reset()
    compile_by_shape()
    layer = torch.compile(nn.Linear(3, 4), backend="eager")
    before = counters["frames"]["ok"]
    for rows in range(2, 2 + SHAPES):
        layer(torch.ones(rows, 3))
    assert counters["frames"]["ok"] - before == SHAPES
