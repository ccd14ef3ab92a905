"""Large tensors are asked for in large pages, unless the user has said otherwise."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource
import lockstep, lockstep.engine.run.loop
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(64 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGES = (64 << 20) // resource.getpagesize()


def page_faults(**env: str) -> int:
    """Of filling 64 MiB, in a program that has imported the whole engine before."""
    plain = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=plain | env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not HUGE.exists() or "[madvise]" not in HUGE.read_text(),
    reason="this system gives large pages to all programs, or to none",
)
@pytest.mark.slow
def test_large_tensors_are_in_large_pages_unless_the_user_says_otherwise() -> None:
    assert page_faults() < PAGES / 4
    assert page_faults(THP_MEM_ALLOC_ENABLE="0") > PAGES / 2


SELDOM = """
import gc
from lockstep.comm.host import collect_as_usual, collect_seldom, skip_last_collection

class Node:
    def __del__(self):
        print("collected", flush=True)

usual = gc.get_threshold()
collect_as_usual()
assert gc.get_freeze_count() == 0
collect_seldom()
assert gc.get_threshold()[0] > usual[0]
collect_as_usual()
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 0
skip_last_collection()
node = Node()
node.itself = node
if {collects}:
    del node
    gc.collect()
"""


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_looked_for_while_a_program_runs_and_not_when_it_ends(collects: bool) -> None:
    code = SELDOM.format(collects=collects)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == ("collected\n" if collects else "")


TASK = """
import gc
import lockstep as ls
import torch

class Line(ls.Task):
    def build_model(self):
        return torch.nn.Linear(1, 1)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 1))

    def loss(self, model, batch):
        print("looks", gc.get_threshold()[0], gc.get_freeze_count() > 100_000)
        return ls.Loss(model(batch[0]).sum(), len(batch[0]))
"""


@pytest.mark.slow
def test_training_looks_for_garbage_as_usual(lockstep, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    keys = ("steps=1", "batch_size=1", "num_microbatches=1")
    ended = lockstep("train", "task.py:Line", *keys, cold=True)
    assert ended.returncode == 0, ended.stderr
    assert f"looks {gc.get_threshold()[0]} True" in ended.stdout
