"""Ranks that others start end with the launcher's process that has started them."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.conftest import environment

from lockstep.launching.host.processes import is_alive
from lockstep.launching.job.commands import find_mpirun

TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep as ls

class Slow(ls.Task):
    class Config(ls.TrainConfig):
        batch_size: int = 2
        num_microbatches: int = 2
        steps: int = 10_000
    def build_model(self): return nn.Linear(4, 1)
    def dataset(self, split):
        return TensorDataset(torch.ones(8, 4)) if split == "train" else None
    def loss(self, model, batch):
        open(f"rank-{os.getpid()}", "w").close()
        time.sleep(0.05)
        return ls.Loss(model(batch[0]).sum(), len(batch[0]))

ls.main(Slow(), Slow.Config(), run_dir="run")
"""

MPIRUN = ("-n", "2", "--oversubscribe", "--allow-run-as-root", "--with-ft", "ulfm")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ranks_started_by_hand_do_not_outlive_a_launcher_that_is_killed(tmp_path, launcher):
    (tmp_path / "slow.py").write_text(TASK)
    command = [str(find_mpirun()), *MPIRUN, sys.executable, "slow.py"]
    if launcher == "torchrun":
        command = [sys.executable, *TORCHRUN, "slow.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(cold=True),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(pids := [int(f.name[5:]) for f in tmp_path.glob("rank-*")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
