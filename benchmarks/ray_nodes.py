"""A node of a Ray cluster is lost: ranks of Lockstep, beside Ray Train's restart.

Writes `docs/benchmarks/ray_nodes.md` and `ray_nodes.json`; needs the extra `ray`. `--quick` sees
that everything runs, and prints instead. Five rounds take about five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.launching.host.processes import variable
from lockstep.launching.job.commands import rank_environment
from page import Section, command, duration, publish
from processes import HERE, Spread
from run import DOCS, machine

STEP_S, EVERY, STEPS = 0.05, 20, 100_000
"""Seconds of a step's work, steps between checkpoints, and more steps than there is time for."""
_BEFORE = 25
"""Steps that are done before the loss: some more than the newest checkpoint has."""
_AFTER = 5
_WAIT_S = 120.0
_POLL_S = 0.005

TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep as ls

class Slow(ls.Task):
    class Config(ls.TrainConfig):
        batch_size: int = 16
        num_microbatches: int = 2
        log_every: int = 1
    def build_model(self): return nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    def dataset(self, split):
        return TensorDataset(torch.ones(64, 64)) if split == "train" else None
    def loss(self, model, batch):
        time.sleep(STEP_S)
        return ls.Loss(model(batch[0]).square().sum(), len(batch[0]))
"""


@dataclass(frozen=True)
class Loss:
    """What the loss of a node has cost.

    Attributes:
        resumed_s: seconds from the loss to the next committed step.
        caught_up_s: seconds until a step that had not been done before.
        lost_steps: steps that were done before the loss and had to be done again.
        whole_s: seconds until there were two ranks again.
    """

    resumed_s: float
    caught_up_s: float
    lost_steps: int
    whole_s: float


class Cluster:
    """Nodes of a CPU each on this host, besides a head without any; one is a spare."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self._nodes = Nodes(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address: str = self._nodes.address
        for _ in range(3):
            self._nodes.add_node(num_cpus=1)

    def lose(self, raylet: int) -> float:
        """Kill the node of a raylet; the time of that. A new spare comes later."""
        node = next(n for n in self._nodes.worker_nodes if raylet in _pids(n))
        at = time.time()
        os.kill(raylet, signal.SIGKILL)
        self._nodes.remove_node(node, allow_graceful=False)
        return at

    def mend(self) -> None:
        """Have three nodes again."""
        while len(self._nodes.worker_nodes) < 3:
            self._nodes.add_node(num_cpus=1)

    def close(self) -> None:
        """Remove all nodes."""
        self._nodes.shutdown()


def _pids(node: Any) -> list[int]:
    return [info.process.pid for info in node.all_processes["raylet"]]


@contextlib.contextmanager
def started(argv: list[str], folder: Path, address: str) -> Iterator[None]:
    """A program, as long as the context lasts."""
    env = rank_environment(threads=1) | {"RAY_ADDRESS": address}
    with (folder / "said").open("wb") as said:
        child = subprocess.Popen(argv, cwd=folder, env=env, stdout=said, stderr=said)
    try:
        yield
    except TimeoutError:
        print((folder / "said").read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
        child.kill()
        child.wait()


def lockstep(cluster: Cluster, folder: Path) -> Loss:
    """A node with a rank is lost."""
    (folder / "slow.py").write_text(TASK.replace("STEP_S", str(STEP_S)), encoding="utf-8")
    argv = [sys.executable, "-m", "lockstep", "train", "slow.py:Slow", f"steps={STEPS}"]
    argv += [f"checkpoint.every={EVERY}", "-n", "2", "--launcher", "ray", "--run-dir", "run"]

    def rows(*kinds: str) -> list[dict[str, Any]]:
        return [r for r in _rows(folder / "run" / "events.jsonl") if r["event"] in kinds]

    def sizes() -> list[int]:
        return [row["world_size"] for row in rows("Recovered")]

    with started(argv, folder, cluster.address):
        wait_for(lambda: len(rows("StepDone")) >= _BEFORE)
        pid = next(r["pid"] for r in rows("Joined") if r["slot"] == 1)
        lost_at = cluster.lose(int(variable(pid, "RAY_RAYLET_PID")))
        wait_for(lambda: sizes() == [1, 2])
        found = rows("StepDone", "Recovered")
        alone, whole = (i for i, row in enumerate(found) if row["event"] == "Recovered")
        before, after = found[alone - 1], found[alone + 1]
    resumed_s = after["time"] - lost_at
    lost_steps = before["step"] + 1 - after["step"]
    return Loss(resumed_s, resumed_s, lost_steps, found[whole]["time"] - lost_at)


def ray_train(cluster: Cluster, folder: Path) -> Loss:
    """A node with a worker is lost."""
    argv = [sys.executable, str(HERE / "peers" / "ray_train_loop.py"), str(folder)]
    argv += ["--steps", str(STEPS), "--step-s", str(STEP_S), "--every", str(EVERY)]

    def rows(rank: int, key: str) -> list[dict[str, Any]]:
        return [r for r in _rows(folder / "log") if r["rank"] == rank and key in r]

    with started(argv, folder, cluster.address):
        wait_for(lambda: len(rows(0, "step")) >= _BEFORE)
        lost_at = cluster.lose(rows(1, "first")[-1]["raylet"])
        wait_for(lambda: len(rows(0, "first")) > 1)
        again = rows(0, "first")[1]
        done = max(r["step"] for r in rows(0, "step") if r["time"] < again["time"])

        def later() -> list[dict[str, Any]]:
            return [r for r in rows(0, "step") if r["time"] > again["time"]]

        wait_for(lambda: bool(later()) and later()[-1]["step"] > done + _AFTER)
        resumed_s = later()[0]["time"] - lost_at
        caught_up_s = next(r["time"] for r in later() if r["step"] > done) - lost_at
    return Loss(resumed_s, caught_up_s, done - again["first"], resumed_s)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON; none while it is not there."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def wait_for(is_there: Callable[[], bool]) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it takes too long.
    """
    deadline = time.monotonic() + _WAIT_S
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S)


def main() -> None:
    """Measure both in turn, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="losses of each")
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    num_rounds = 1 if args.quick else args.rounds
    warnings.simplefilter("ignore")
    facts = machine(("torch", "ray")) | {"command": command("ray_nodes")}
    found: dict[str, list[Loss]] = {"Lockstep": [], "Ray Train": []}
    cluster = Cluster()
    try:
        for _ in range(num_rounds):
            for name, lose in (("Lockstep", lockstep), ("Ray Train", ray_train)):
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    found[name].append(lose(cluster, Path(folder)))
                print(name, found[name][-1], file=sys.stderr)
                cluster.mend()
    finally:
        cluster.close()
    section = section_of(found)
    publish(
        None if args.quick else DOCS, "ray_nodes", "A lost node of a Ray cluster", facts, [section]
    )


def section_of(found: dict[str, list[Loss]]) -> Section:
    """What was found, as a table."""
    section = Section(
        "2 ranks, a spare node",
        f"Nodes of one CPU on this host (`ray.cluster_utils.Cluster`), steps of {STEP_S:g} s, "
        f"checkpoints every {EVERY} steps, and SIGKILL for the node of rank 1. `next step`: from "
        "the loss to the next committed step; `new step`: to one that had not been done before; "
        "`whole`: until there are two ranks again.",
        ("", "losses", "next step", "new step", "steps lost", "whole"),
        raw={name: [asdict(loss) for loss in losses] for name, losses in found.items()},
    )
    for name, losses in found.items():
        times = [
            duration(Spread.of([getattr(loss, key) for loss in losses]))
            for key in ("resumed_s", "caught_up_s", "whole_s")
        ]
        lost = sorted(loss.lost_steps for loss in losses)
        section.rows.append([name, str(len(losses)), *times[:2], f"{lost[0]}–{lost[-1]}", times[2]])
    ours, theirs = ([loss.resumed_s for loss in losses] for losses in found.values())
    faster = Spread.of_ratios(theirs, ours)
    section.at_least("next step, Ray Train / Lockstep", faster, 10.0)
    worst = max(ours)
    section.at_most("next step of Lockstep below 1 s", f"worst {worst:.2f} s", worst < 1)
    return section


if __name__ == "__main__":
    main()
