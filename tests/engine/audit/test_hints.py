"""What a task probably does not mean is said at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lockstep.comm.transport import LocalTransport
from lockstep.config import TrainConfig
from lockstep.engine.audit.hints import ignored_methods
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import Event, Warned
from lockstep.engine.run.loop import Trainer
from lockstep.engine.runtime import Runtime
from lockstep.engine.task import Loss, Task
from lockstep.launching.systems import load_recipe


class Plain(Task):
    """Batch norm and dropout, so that halves are not quite what the whole is."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def dataset(self, split: str) -> Dataset[Any] | None:
        x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, torch.arange(64) % 3) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return self.of(model(x), y)

    def of(self, logits: Tensor, y: Tensor) -> Loss:
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))


class Mean(Plain):
    def of(self, logits: Tensor, y: Tensor) -> Loss:
        return Loss(F.cross_entropy(logits, y), len(y))


class MeanOfMeans(Plain):
    def of(self, logits: Tensor, y: Tensor) -> Loss:
        return Loss(F.cross_entropy(logits, y), 1)


class SaidToBeMean(Plain):
    def of(self, logits: Tensor, y: Tensor) -> Loss:
        return Loss.mean(F.cross_entropy(logits, y), len(y), {"one": (1, 1)})


class WholeBatchesOnly(Plain):
    def of(self, logits: Tensor, y: Tensor) -> Loss:
        assert len(y) == 16
        return Loss(F.cross_entropy(logits, y), len(y))


class Contrastive(Plain):
    """Each sample is told from the others of its microbatch."""

    def of(self, logits: Tensor, y: Tensor) -> Loss:
        z = F.normalize(logits, dim=1)
        return Loss(F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="sum"), len(z))


class Penalised(Plain):
    """Adds something for each batch, whatever is in it."""

    def of(self, logits: Tensor, y: Tensor) -> Loss:
        loss = super().of(logits, y)
        return Loss(loss.sum + 3.0, loss.weight)


class Noisy(Contrastive):
    """Halves get other random numbers, so their losses tell nothing."""

    def of(self, logits: Tensor, y: Tensor) -> Loss:
        return super().of(logits + torch.randn_like(logits), y)


class Whole(Plain):
    """Written for the whole batch."""

    loss = Task.loss

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def batch_loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Contrastive().of(outputs, batch[1])


def warnings(task: Task, tmp_path: Any, **keys: Any) -> list[str]:
    events: list[Event] = []
    tmp_path.mkdir(exist_ok=True)
    runtime = Runtime(
        LocalTransport(), torch.device("cpu"), 0, "python", 0, events.append, lambda: None
    )
    config = TrainConfig(**{"batch_size": 32, "num_microbatches": 2, "steps": 2} | keys)
    trainer = Trainer(task, config, runtime, RunDirectory(tmp_path))
    before = {n: b.clone() for n, b in trainer._parts.model.named_buffers()}
    assert before["1.running_mean"].abs().sum() == 0
    trainer.run()
    return [e.message for e in events if isinstance(e, Warned)]


@pytest.mark.parametrize(
    "kind", [Plain, MeanOfMeans, SaidToBeMean, WholeBatchesOnly, Penalised, Noisy, Whole]
)
def test_no_hint_without_a_reason(kind: type[Task], tmp_path: Any) -> None:
    assert warnings(kind(), tmp_path) == []


def test_a_sum_that_is_a_mean_is_said_so(tmp_path: Any) -> None:
    [message] = warnings(Mean(), tmp_path)
    assert "Loss.sum seems to be a mean" in message
    assert "Loss.mean(loss, " in message


def test_a_loss_that_compares_samples_of_a_microbatch_is_said_so(tmp_path: Any) -> None:
    [message] = warnings(Contrastive(), tmp_path / "two")
    assert "Task.loss: its value depends on which samples share a microbatch" in message
    assert "Task.outputs and Task.batch_loss: see how-to/batch-loss" in message
    assert warnings(Contrastive(), tmp_path / "one", num_microbatches=1) == []


def test_a_mean_is_multiplied_with_its_weight() -> None:
    loss = Loss.mean(torch.tensor(0.5), 6, {"a": (1, 2)})
    assert (loss.sum.item(), loss.weight, loss.metrics) == (3.0, 6, {"a": (1, 2)})


class Foreign(Plain):
    scale = 2

    def build_optimiser(self, model: nn.Module) -> None:
        """Misspelt."""

    def configure_optimizers(self) -> None:
        """Lightning's."""

    def on_epoch_end(self) -> None:
        """Keras's."""

    @property
    def sampler(self) -> None:
        """A DataLoader's."""

    def datasets(self) -> int:
        """A helper that is called."""
        return self.scale

    def vocabulary(self) -> int:
        """Nothing like anything."""
        return self.datasets()


def test_methods_that_nobody_calls_are_named(tmp_path: Any) -> None:
    assert ignored_methods(Foreign) == [
        "Foreign.build_optimiser is never called; use build_optimizer",
        "Foreign.configure_optimizers is never called; use build_optimizer",
        "Foreign.on_epoch_end is never called: there are no such hooks",
        "Foreign.sampler is never called; use data.shuffle in the config, as Lockstep's sampler "
        "fixes which samples a step has",
    ]
    assert warnings(Foreign(), tmp_path) == ignored_methods(Foreign)


@pytest.mark.parametrize("name", ["digits", "quantum", "ufs"])
def test_recipes_are_hinted_nothing(name: str) -> None:
    assert ignored_methods(load_recipe(name)) == []
