"""Trains cases one after the other on the ranks it is started on; rank 0 prints how each ended.

    python train_cases.py DEVICE FOLDER [CASE ...]
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import lockstep as ls
from lockstep.config import override
from lockstep.launching import api as front
from lockstep.launching.api import Session
from lockstep.launching.rank.environment import detect

DISTRIBUTED = Path(__file__).parent.parent / "distributed"
sys.path.insert(0, str(DISTRIBUTED))

import matrix  # noqa: E402
import tasks  # noqa: E402


class Stepped(tasks.Everything):
    """As `Everything`, with an optimizer of a name."""

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer that `OPTIMIZERS` has for the case."""
        return OPTIMIZERS[self.kind](model.parameters())


OPTIMIZERS: dict[str, Any] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, fused=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "adam, capturable": lambda p: torch.optim.NAdam(p, foreach=False),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "own lbfgs": lambda p: ls.optim.LBFGS(p),
    "sam": lambda p: ls.optim.SAM(p, lambda g: torch.optim.SGD(g, lr=0.1), rho=0.05),
    "adam-atan2": lambda p: ls.optim.AdamATan2(p, lr=0.01),
}


def optimizer_case(name: str) -> tuple[Any, list[str]]:
    """A case of an optimizer."""
    kind = type("Stepped", (Stepped,), {"kind": name, "__module__": __name__})
    return kind, ["steps=8"]


def cases() -> dict[str, tuple[Any, list[str]]]:
    """Task and keys of each case, by name."""
    import batch_loss_tasks
    import carry_tasks
    import closure_tasks
    import table_tasks

    found = {name: (tasks.Everything, keys) for name, keys in matrix.CASES.items()}
    found |= {name: optimizer_case(name) for name in OPTIMIZERS}
    found |= {
        "schedule-free": (closure_tasks.Free, ["steps=8"]),
        "carry": (carry_tasks.Read, ["steps=8"]),
        "batch-loss": (batch_loss_tasks.Redundancy, ["steps=8"]),
        "tables": (table_tasks.Look, ["steps=8"]),
        "low-rank": (tasks.Everything, ["steps=8", "compression.name=lowrank"]),
        "top-k": (tasks.Everything, ["steps=8", "compression.name=topk"]),
        "int8": (tasks.Everything, ["steps=8", "compression.name=int8"]),
        "local": (tasks.Everything, ["steps=8", "local.steps=2"]),
    }
    return found


def main() -> None:
    device, folder, *names = sys.argv[1:]
    environment = detect(os.environ)
    found: dict[str, Any] = {}
    known = cases()
    for name in names or known:
        kind, keys = known[name]
        config = override(kind.Config(), [*keys, f"device={device}"], name)
        run_dir = Path(folder) / name.replace(" ", "_")
        try:
            ended = front.run(kind(config), config, Session(str(run_dir), console=False))
            found[name] = [ended.params_sha256, ended.step]
        except Exception as error:
            if os.environ.get("HOSTGPU_LOUD"):
                traceback.print_exc()
            found[name] = [f"{type(error).__name__}: {error}"[:300]]
    if environment.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
