"""Models that torch compiles: the bits of one process, whichever shapes a rank meets first."""

import shutil
from pathlib import Path

import pytest
from tests.distributed.conftest import same

from lockstep.engine.faults import PlannedFault

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler"),
]
TASK = f"{Path(__file__).with_name('compiled_tasks.py')}:Compiled"
CONFIG = (
    "steps=12", "lr=0.01", "batch_size=30", "num_microbatches=5", "eval_every=6",
    "eval_batch_size=4", "log_every=1", "checkpoint.every=4", "digest_every=3",
)  # fmt: skip


def test_a_compiled_model_has_the_bits_of_one_process(train_on, reference, tmp_path):
    ended = train_on(tmp_path / "run", 3, faults=[PlannedFault(1, 5, "reduce")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
