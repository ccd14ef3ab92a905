"""The memory of devices is what a plan predicts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.clusters.plan_measuring import anatomy
from lockstep.planning.measurements import Facts, Group, Timed
from lockstep.planning.prediction import Layout, peak_bytes
from tests.accelerator import HERE, memory_cases, surroundings
from tests.conftest import environment, slow

HIGH = {
    f"{model} sgd, {number}, sharding={kind}"
    for model in ("transformer", "sketched")
    for number in memory_cases.NUMBERS
    for kind in ("gradients", "parameters")
}
"""Activations are taken to be at their most before the first gradient; here they are few."""
LOW = {"perceptron sgd, 1, sharding=parameters"}
"""Beside a block of four fifths of the model, another one is whole for a moment."""
CASES = [f"{model} {name}" for model in memory_cases.MODELS for name in memory_cases.OPTIMIZERS]
Peaks = dict[int, dict[str, int]]
"""The most memory of a rank, by number of microbatches and layout."""


def measured(folder: Path, size: int, case: str) -> Peaks:
    """What ranks have had."""
    variables = surroundings(environment(cold=True)) | {"HOSTCCL_BLOCKS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank in range(size if size > 1 else 0):
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        ranks.append({name: str(value) for name, value in place.items()})
    command = [sys.executable, str(HERE / "memory_cases.py"), str(folder), case]
    processes = [
        subprocess.Popen(command, env=variables | of_rank, stdout=subprocess.DEVNULL)
        for of_rank in ranks or [{}]
    ]
    assert [process.wait(timeout=280) for process in processes] == [0] * size
    paths = [folder / f"peaks-{size}-{rank}.json" for rank in range(size)]
    everyone = [json.loads(path.read_text())[case] for path in paths]
    return {
        int(number): {name: max(of[number][name] for of in everyone) for name in by_layout}
        for number, by_layout in everyone[0].items()
    }


def facts(case: str, number: int, alone: Peaks, pair: Peaks) -> Facts:
    """What a plan measures: one microbatch alone, and two ranks that have no slices."""
    config = memory_cases.config_of(case, number)
    return Facts(
        task=case, overrides=(), config_hash="", measured_at=0.0, versions={}, host="", cores=2,
        memory_bytes=1 << 40, launcher="torchrun", batch_size=config.batch_size,
        num_microbatches=number, total_steps=4, buddy=False,
        anatomy=anatomy(memory_cases.task_of(case), config),
        timed=(Timed(1, 1, 1, 1, 1.0, alone[1]["sharding=none"]),
               Timed(number, 1, 2, 1, 1.0, pair[number]["mesh.pp=2"])),
        groups=(Group(2, 1.0, pair[number]["sharding=none"]),), messages=(), group_bytes=0,
        start_s=1.0, checkpoint_bytes=0, checkpoint_s=0.0, write_s=0.0,
        device="accelerator",
    )  # fmt: skip


def errors(case: str, alone: Peaks, pair: Peaks) -> Iterator[tuple[str, float]]:
    """By how much each prediction is off."""
    for number in memory_cases.NUMBERS:
        known = facts(case, number, alone, pair)
        layouts = {"sharding=none": Layout(1)}
        layouts |= {f"sharding={kind}": Layout(2, sharding=kind) for kind in memory_cases.KINDS}
        for name, layout in layouts.items():
            found = (alone if layout.num_ranks == 1 else pair)[number][name]
            yield f"{case}, {number}, {name}", peak_bytes(known, layout) / found - 1


@pytest.mark.parametrize("case", [slow(case) for case in CASES])
def test_memory_is_predicted(tmp_path: Path, case: str) -> None:
    found = dict(errors(case, measured(tmp_path, 1, case), measured(tmp_path, 2, case)))
    for name, off in found.items():
        assert (-0.15 if name in LOW else -0.1) < off < (0.3 if name in HIGH else 0.1), found
