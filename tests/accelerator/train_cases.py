"""Trains cases one after the other on the ranks it is started on; rank 0 prints how each ended.

    python train_cases.py DEVICE[,DEVICE ...] FOLDER [CASE ...] [KEY=VALUE ...]

With `manners` among the devices, it also checks these.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.config import override
from lockstep.data.loader import SMALL_BYTES, Fetcher
from lockstep.engine.audit import pass_state
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.step.workspace import Workspace
from lockstep.launching import api as front
from lockstep.launching.api import Session
from lockstep.launching.rank.environment import detect

DISTRIBUTED = Path(__file__).parent.parent / "distributed"
sys.path[:0] = [str(DISTRIBUTED), str(DISTRIBUTED.parent / "nn")]

import batch_loss_tasks  # noqa: E402
import carry_tasks  # noqa: E402
import closure_tasks  # noqa: E402
import manners  # noqa: E402
import matrix  # noqa: E402
import models  # noqa: E402
import table_tasks  # noqa: E402
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


class Counting(ls.Task):
    """Counts waits of steps."""

    def build_model(self) -> torch.nn.Module:
        """See `ls.Task`."""
        TrainStep.run = counting(TrainStep.run)  # type: ignore[method-assign]
        # How many steps are done again depends on the machine, and they wait twice.
        pass_state._LEAST_SECONDS = pass_state._MOST_TIME = 1e-12
        return super().build_model()


class Normed(ls.Task):
    """Batch norm, which has a counter, on batches worth a stream."""

    def build_model(self) -> torch.nn.Module:
        """See `ls.Task`."""
        layers = (
            torch.nn.Linear(SMALL_BYTES // 4, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Linear(4, 3),
        )
        return torch.nn.Sequential(*layers)

    def dataset(self, split: str) -> Any:
        """See `ls.Task`."""
        x = torch.randn(32, SMALL_BYTES // 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.argmax(1) % 3) if split == "train" else None

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        """See `ls.Task`."""
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return ls.Loss.mean(loss, len(batch[0]))


class Counted(Counting, Normed):
    """The plain case; notes in which order batches are fetched, and devices are waited for."""

    def build_model(self) -> torch.nn.Module:
        """See `ls.Task`."""
        Fetcher.rows = staticmethod(noting("b", Fetcher.rows))  # type: ignore[method-assign]
        Workspace.fetch = noting("w", Workspace.fetch)  # type: ignore[method-assign]
        return super().build_model()


class Changing(Normed):
    """Changes its data after each step, through memory that torch does not watch."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.data = Normed.dataset(self, "train")

    def dataset(self, split: str) -> Any:
        """See `ls.Task`."""
        return self.data if split == "train" else None

    def after_step(self, model: Any, step: int) -> None:
        """See `ls.Task`."""
        self.data.tensors[0].numpy()[...] *= 1 + step / 64

    def state_dict(self) -> dict[str, Any]:
        """See `ls.Task`."""
        return {"data": self.data.tensors[0]}

    def load_state_dict(self, state: Any) -> None:
        """See `ls.Task`."""
        self.data.tensors[0].copy_(state["data"])


class Damaged(Normed):
    """Has a sample that cannot be read."""

    def dataset(self, split: str) -> Any:
        """See `ls.Task`."""
        made = super().dataset(split)
        return made and Refusing(*made.tensors)


class Refusing(TensorDataset):
    """Raises an exception for one sample."""

    def __getitem__(self, i: int) -> Any:
        if i == 11:
            raise ValueError("sample 11 is damaged")
        return super().__getitem__(i)


def noting(letter: str, function: Any) -> Any:
    """A function that writes a letter down before it does what another one does."""
    path = Path(f"order-{detect(os.environ).rank}")

    @functools.wraps(function)
    def noted(*args: Any) -> Any:
        with path.open("a") as file:
            file.write(letter)
        return function(*args)

    return noted


def counting(run: Any) -> Any:
    """A training step that counts waits for the device, by reason, and writes down their number."""

    def counted(self: TrainStep, step: int, *args: Any) -> Any:
        module = torch.get_device_module() if self.flat.flats[0].device.type != "cpu" else None
        if module is not None and step == _STEPS[0]:
            module.reset()
        elif module is not None and step == _STEPS[1]:
            each = {why: n / (_STEPS[1] - _STEPS[0]) for why, n in module.waits().items()}
            Path(f"waits-{self.placement.world.rank}.json").write_text(json.dumps(each))
        return run(self, step, *args)

    return counted


class Cell(torch.nn.Module):
    """Remembers its last state; torch computes its own cells otherwise on other devices."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(12, 12)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """All states, and the last one."""
        states = torch.tanh(self.mix(x) + memory[0].unsqueeze(1))
        return states, states[:, -1].unsqueeze(0)


class Recurrent(carry_tasks.Read):
    """As `Read`, with another cell."""

    def build_model(self) -> torch.nn.Module:
        """See `ls.Task`."""
        model = super().build_model()
        model.cell = Cell()
        return model


class CountedStages(Counting, models.Deep):
    """Blocks, of which the first and the last share a weight."""


class BrokenStage(models.Deep):
    """The last stage's loss, which no other stage computes, ends with an exception."""

    scratch = ("task.num_losses",)
    num_losses = 0

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        """See `ls.Task`."""
        made: ls.Loss = super().loss(model, batch)
        self.num_losses += 1
        if self.num_losses == 20:
            raise RuntimeError("the loss of this stage fails")
        return made


class BrokenEvaluation(BrokenStage):
    """As `BrokenStage`, in an evaluation."""

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        """See `ls.Task`."""
        return (
            models.Deep.loss(self, model, batch) if model.training else super().loss(model, batch)
        )


class BrokenRows(table_tasks.Plain):
    """One rank's evaluation ends with an exception once it has looked up rows."""

    scratch = ("task.num_losses",)
    num_losses = 0

    def evaluate(self, model: Any, batch: Any) -> ls.Loss:
        """See `ls.Task`."""
        self.num_losses += 1
        if self.num_losses > 12 and torch.accelerator.current_device_index() == 1:
            raise RuntimeError("the loss of this rank fails")
        made: ls.Loss = self.loss(model, batch)
        return made


class CountedCarry(Counting, Recurrent):
    """Carries its last state."""


class CountedOverBatch(Counting, batch_loss_tasks.Redundancy):
    """Copies a matrix to the device itself."""


class CountedSearch(Counting, batch_loss_tasks.Searched):
    """Gathers outputs in each of the passes of a search."""


class CountedTables(Counting, table_tasks.Plain):
    """Looks rows up."""


def optimizer_case(name: str) -> tuple[Any, list[str]]:
    """A case of an optimizer."""
    kind = type("Stepped", (Stepped,), {"kind": name, "__module__": __name__})
    return kind, ["steps=8"]


def cases() -> dict[str, tuple[Any, list[str]]]:
    """Task and keys of each case, by name."""
    found = {name: (tasks.Everything, keys) for name, keys in matrix.CASES.items()}
    found |= {name: optimizer_case(name) for name in OPTIMIZERS}
    found |= {
        "counted": (Counted, ["batch_size=16", "clip_norm=0.1", "steps=32", *_QUIET]),
        "changing": (Changing, ["batch_size=16", "steps=8"]),
        "schedule-free": (closure_tasks.Free, ["steps=8"]),
        "carry": (Recurrent, ["steps=8"]),
        "batch-loss": (batch_loss_tasks.Redundancy, ["steps=8"]),
        "tables": (table_tasks.Look, ["steps=8"]),
        "low-rank": (tasks.Everything, ["steps=8", "compression.name=lowrank"]),
        "top-k": (tasks.Everything, ["steps=8", "compression.name=topk"]),
        "int8": (tasks.Everything, ["steps=8", "compression.name=int8"]),
        "local": (tasks.Everything, ["steps=8", "local.steps=2"]),
    }
    return found


_QUIET = ("eval_every=99", "checkpoint.every=99", "log_every=99")
_STEPS = (18, 30)
"""Between these there is no power of two, after which more is checked."""


def trained(name: str, device: str, folder: Path, keys: list[str]) -> list[Any]:
    """SHA-256 and number of steps of a case, or the error it ended with."""
    kind, own = cases()[name]
    config = override(kind.Config(), [*own, f"device={device}", *keys], name)
    run_dir = folder / f"{name.replace(' ', '_')}-{device}-{config.seed}"
    try:
        ended = front.run(kind(config), config, Session(str(run_dir), console=False))
    except Exception as error:
        if os.environ.get("HOSTGPU_LOUD"):
            traceback.print_exc()
        return [f"{type(error).__name__}: {error}"[:400]]
    return [ended.params_sha256, ended.step]


def main() -> None:
    devices, folder, *names = sys.argv[1:]
    keys = [name for name in names if "=" in name]
    found: dict[str, Any] = {}
    for name in [name for name in names if "=" not in name] or cases():
        found[name] = [
            trained(name, d, Path(folder), keys) for d in devices.split(",") if d != "manners"
        ]
    if "manners" in devices:
        for extra in (1_950_000, 1_700_000):
            gc.collect()
            os.environ["HOSTGPU_BYTES"] = str(torch.accelerator.memory_allocated(0) + extra)
            keys = [f"seed={extra}"]
            found[f"full {extra}"] = trained("counted", "accelerator", Path(folder), keys)
        del os.environ["HOSTGPU_BYTES"]
        manners.check()
    if detect(os.environ).rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
