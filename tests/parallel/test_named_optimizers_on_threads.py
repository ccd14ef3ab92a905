"""Several optimizers on ranks that are threads: their slices, and pieces that a rank has none of.

Nothing here draws random numbers, since threads share their generators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.stepping import advance
from tests.thread_transport import ThreadTransport, on_ranks
from tests.whole_snapshot import whole_snapshot
from torch import nn, optim
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.digests import model_digest
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.restore import restore
from lockstep.optim import AdamATan2

STEPS = 6


class Counting(optim.SGD):
    """Counts its steps in an attribute, but only where it has something to step."""

    elementwise = True
    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(group["params"] for group in self.param_groups):
            self.count += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / max(1, self.count)
        super().step()


class Blocks(ls.Task):
    """Three blocks of different sizes, so that slices of them hold few of the others."""

    def build_model(self) -> nn.Module:
        model = ls.nn.Pipeline(
            nn.Linear(20, 90), nn.Sequential(nn.Tanh(), nn.Linear(90, 40)), nn.Linear(40, 7)
        )
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 10
        return model

    def dataset(self, split: str) -> Dataset[Any] | None:
        x = torch.randn(59, 20, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, torch.arange(59) % 7) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))

    def build_optimizer(self, model: Any) -> dict[str, optim.Optimizer]:
        return {
            "first": optim.AdamW([{"params": [p]} for p in model[0].parameters()], lr=0.01),
            "middle": AdamATan2(model[1].parameters(), lr=0.01),
            "last": Counting(model[2].parameters(), lr=0.1, momentum=0.9),
        }

    def lr_factor(self, step: int, total_steps: int) -> dict[str, float | list[float]]:
        return {"first": [1.0, 0.5], "last": 1.0 - step / total_steps, "middle": 1.0}


class StageOrder(Blocks):
    """Two phases, one of them with the first and the last block."""

    def phases(self) -> list[ls.Phase]:
        return [ls.Phase("ends", self.loss), ls.Phase("middle", self.loss, steps=2)]

    def build_optimizer(self, model: Any) -> dict[str, optim.Optimizer]:
        ends = [*model[0].parameters(), *model[2].parameters()]
        middle = Counting(model[1].parameters(), lr=0.1)
        return {"middle": middle, "ends": optim.AdamW(ends, lr=0.01)}

    def lr_factor(self, step: int, total_steps: int) -> dict[str, float]:  # type: ignore[override]
        return {"ends": 1.0, "middle": 1.0 - step / total_steps}


pytestmark = pytest.mark.usefixtures("generators_of_threads")


def begun(kind: type[Blocks], transport: ThreadTransport, sharding: str) -> Parts:
    config = TrainConfig(
        batch_size=16,
        num_microbatches=5,
        epochs=2,
        clip_norm=0.4,
        sharding=sharding,
        bucket_bytes=4096,
    )
    cpu = torch.device("cpu")
    runtime = Runtime(transport, cpu, transport.rank, "python", 0, lambda _: None, lambda: None)
    return assemble(kind(), config, runtime)


def trained(
    kind: type[Blocks], size: int, sharding: str, last: int = STEPS, start: Snapshot | None = None
) -> tuple[str, Snapshot]:
    """The digest of all ranks' parameters, and what a checkpoint would hold."""

    def body(transport: ThreadTransport) -> tuple[str, Snapshot]:
        parts = begun(kind, transport, sharding)
        train_step, first = parts.train_step, 0
        if start is not None:
            given = start if transport.rank == 0 else None
            first = restore(given, train_step, transport)["progress"]["step"]
        mesh = parts.placement.mesh
        own = mesh.of_ranks(mesh.of_each_replica)[transport.rank]
        for step in range(first, last):
            advance(parts, step, step + 1, own)
            train_step.flat_optimizer.check_state()
        taken = whole_snapshot(train_step, last, {})
        with train_step.parameters.whole():
            return model_digest(parts.model), taken

    found = on_ranks(size, body)
    assert len({digest for digest, _ in found}) == 1
    return found[0]


@pytest.fixture(scope="module", params=[Blocks, StageOrder])
def kind(request: pytest.FixtureRequest) -> type[Blocks]:
    found: type[Blocks] = request.param
    return found


@pytest.fixture(scope="module")
def alone(kind: type[Blocks]) -> tuple[str, Snapshot]:
    return trained(kind, 1, "none")


@pytest.mark.parametrize(
    "sharding",  # slices of optimizers alone are also those of snapshots and buddies, below
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "optimizer")),
        "gradients",
        "parameters",
    ],
)
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 7))]
)
def test_any_number_of_ranks_gives_the_same_bits(
    kind: type[Blocks], alone: tuple[str, Snapshot], size: int, sharding: str
) -> None:
    digest, snapshot = trained(kind, size, sharding)
    wanted, one = alone
    assert digest == wanted
    assert snapshot.meta == one.meta
    assert snapshot.optimizer.keys() == one.optimizer.keys()
    assert all(torch.equal(t, one.optimizer[name]) for name, t in snapshot.optimizer.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "optimizer"), (3, "parameters")),
        pytest.param((3, "gradients"), (2, "none"), marks=pytest.mark.slow),
        pytest.param((1, "none"), (3, "optimizer"), marks=pytest.mark.slow),
        pytest.param((2, "parameters"), (1, "gradients"), marks=pytest.mark.slow),
    ],
)
def test_a_snapshot_goes_on_to_the_same_bits(
    kind: type[Blocks],
    alone: tuple[str, Snapshot],
    before: tuple[int, str],
    after: tuple[int, str],
) -> None:
    _, taken = trained(kind, *before, last=2)
    assert trained(kind, *after, start=taken)[0] == alone[0]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_buddies_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: type[Blocks], alone: tuple[str, Snapshot], size: int
) -> None:
    """Each rank steps two slices, as it does where survivors can go on."""
    monkeypatch.setattr(ThreadTransport, "can_regroup", True)
    assert trained(kind, size, "optimizer")[0] == alone[0]
