"""torch's compiler: not imported by who does not compile, and told what to go by when it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import run

LEAN = f"{Path(__file__).parents[1] / 'nn' / 'models.py'}:Lean"
TRAINING = """
import sys
from lockstep.cli.main import main
from lockstep.engine.passes.precision import use_deterministic_algorithms

use_deterministic_algorithms(True)  # as on a GPU
sys.argv = ["lockstep", "train", "digits", "steps=4", "checkpoint.every=2"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules
"""

COMPILING = """
import sys
import torch
from torch import nn
from lockstep.engine.passes.precision import keep_compiler_out, use_deterministic_algorithms

keep_compiler_out()
keep_compiler_out()
use_deterministic_algorithms(True)
model = nn.Linear(3, 4)
optimizer = torch.optim.Adam(model.parameters())
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(model, backend="eager")
for rows in range(2, 18):
    compiled(torch.ones(rows, 3))
from torch._dynamo.utils import counters
assert counters["frames"]["ok"] == 16, counters["frames"]
assert sys.modules["torch._inductor.config"].deterministic
use_deterministic_algorithms(False)
assert not sys.modules["torch._inductor.config"].deterministic
optimizer.zero_grad()
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"].__name__
assert sys.modules["torch._dynamo"].__loader__ is sys.modules["torch._dynamo"].__spec__.loader
"""


def in_new_process(code: str, folder: Path) -> None:
    ended = run([sys.executable, "-c", code], folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_training_does_not_import_the_compiler(tmp_path: Path) -> None:
    in_new_process(TRAINING, tmp_path)


@pytest.mark.slow
@pytest.mark.no_ranks  # two that sleep while they wait
def test_stages_with_values_by_name_do_not_import_the_compiler(lockstep: Any) -> None:
    keys = ("init=by_name", "mesh.pp=2", "steps=2", "batch_size=8")
    ended = lockstep("train", LEAN, "-n", 2, "--launcher", "local", *keys)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_who_compiles_has_it_compile_by_shape(tmp_path: Path) -> None:
    in_new_process(COMPILING, tmp_path)
