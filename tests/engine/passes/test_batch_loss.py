"""Losses over the whole batch: those of a plain loop, whatever the number of microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

import lockstep as ls
from lockstep.engine.passes.batch_loss import check_batch_loss_fits, digest
from lockstep.engine.passes.rows import Rows, Ungathered, gather
from lockstep.engine.step.model import build_model
from lockstep.engine.training_data import training_data
from lockstep.errors import ConfigError, LockstepError, TaskError
from lockstep.parallel.layout import Range

NUM_SAMPLES = 107


class Contrast(ls.Task):
    """Pulls samples of a class together; its temperature is learned."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        model.scale = nn.Parameter(torch.tensor(2.0))
        return model.double()

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split == "test":
            return None
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x[:, :3].argmax(1))

    def outputs(self, model: Any, batch: Any) -> Any:
        return {
            "z": F.normalize(model(batch[0]), dim=1),
            "scale": model.scale.expand(len(batch[0])),
        }

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        z, labels = outputs["z"], batch[1]
        logits = z @ z.T * outputs["scale"][0]
        same = (labels[:, None] == labels).to(z.dtype)
        loss = -(F.log_softmax(logits, 1) * same).sum(1) / same.sum(1)
        return ls.Loss(loss.sum(), len(z), {"pairs": (same.sum(), len(z))})

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


class Normed(Contrast):
    """Statistics of batch norm, dropout, and random numbers in the loss."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4)
        )
        model.scale = nn.Parameter(torch.tensor(2.0))
        return model

    def dataset(self, split: str) -> Dataset[Any] | None:
        data = super().dataset(split)
        return data and TensorDataset(data[:][0].float(), data[:][1])

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        noisy = outputs["z"] + 0.01 * torch.randn_like(outputs["z"])
        return super().batch_loss(outputs | {"z": noisy}, batch)


def train(task: type[ls.Task], folder: Path, *, num: int = 5, **keys: Any) -> ls.Result:
    values: dict[str, Any] = {"batch_size": 48, "num_microbatches": num, "epochs": 3, "lr": 0.05}
    return ls.train(task(), ls.TrainConfig(**values | keys), run_dir=folder, quiet=True)


def plain_loop() -> tuple[dict[str, Tensor], float]:
    """The parameters of a loop that has each batch as a whole, and the loss of the last step."""
    task, config = Contrast(), ls.TrainConfig(batch_size=48, num_microbatches=1, epochs=3)
    sampler, loader, _ = training_data(task, config, torch.device("cpu"))
    model = build_model(task, config, torch.device("cpu"))
    optimizer = task.build_optimizer(model)
    assert sampler.steps_per_epoch == 3, "the last batch is smaller"
    for step in range(9):
        loss = task.loss(model, loader.microbatch(step, 0))
        mean = loss.sum / loss.weight
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    return model.state_dict(), float(mean.detach())


def test_the_curve_of_a_plain_loop_with_the_whole_batch(tmp_path: Path) -> None:
    """Also where some microbatches of the last batch, of 11 samples, are empty."""
    expected, loss = plain_loop()
    for num in (1, 5, 16):
        result = train(Contrast, tmp_path / str(num), num=num, log_every=1)
        for name, tensor in result.model.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-12)
        assert result.metrics["train/loss"] == pytest.approx(loss, rel=1e-11)
        assert {"train/pairs", "val/loss", "val/pairs"} <= result.metrics.keys()


def test_a_second_forward_pass_changes_nothing(tmp_path: Path) -> None:
    kept = train(Normed, tmp_path / "kept", clip_norm=0.5)
    again = train(Normed, tmp_path / "again", clip_norm=0.5, batch_loss={"recompute": True})
    assert again.params_sha256 == kept.params_sha256
    layers = train(Normed, tmp_path / "layers", clip_norm=0.5, activation_checkpointing=("0", "2"))
    assert layers.params_sha256 == kept.params_sha256
    assert again.metrics["val/loss"] == kept.metrics["val/loss"]
    assert int(kept.model[1].num_batches_tracked) == 9
    # Weighted by samples: one microbatch has the statistics of the whole batch.
    whole = train(Normed, tmp_path / "whole", num=1, lr=0.0, steps=1, epochs=1)
    parts = train(Normed, tmp_path / "parts", num=5, lr=0.0, steps=1, epochs=1)
    torch.testing.assert_close(parts.model[1].running_mean, whole.model[1].running_mean)


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_the_loss_scale_is_taken_off_again(tmp_path: Path, scale: float) -> None:
    precise = train(Normed, tmp_path / "fp32", steps=2)
    halved = train(
        Normed, tmp_path / "fp16", steps=2, precision={"dtype": "fp16", "loss_scale": scale}
    )
    for one, two in zip(halved.model.parameters(), precise.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0.1, atol=0.01)


class Reading(Contrast):
    """A batch with more in it than the loss reads."""

    scratch = ("task.seen",)
    seen: ClassVar[list[Any]] = []

    def collate(self, samples: list[Any]) -> Any:
        x, labels = default_collate(samples)
        return {"x": x, "labels": labels, "names": [f"s{int(y)}" for y in labels], "n": 3}

    def outputs(self, model: Any, batch: Any) -> Any:
        return super().outputs(model, (batch["x"], batch["labels"]))

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        if len(outputs["z"]) == 48:
            # The trial has the first microbatch only, and may not see what others read.
            self.seen.append((batch["x"].device.type, batch["x"].shape, batch["labels"].clone()))
        return super().batch_loss(outputs, (None, batch["labels"]))


READS: dict[str, Callable[[Any], object]] = {
    "an item": lambda left: left[0],
    "its length": lambda left: len(left),
    "operand": lambda left: 2 - left,
    "number": lambda left: math.log(left),
    "tensor's operand": lambda left: torch.ones(2) / left,
    "argument": lambda left: torch.full((2,), left),
    "in a list": lambda left: torch.stack([torch.ones(()), left]),
}


class ReadsNames(Reading):
    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        assert batch["names"][0]
        return super().batch_loss(outputs, batch)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_any_use_of_what_is_not_gathered_is_refused(read: Callable[[Any], object]) -> None:
    with pytest.raises(TaskError, match=r"reads batch\['n'\] \(int\), which has no row"):
        read(Ungathered("batch['n']", "int"))


def test_what_is_not_read_of_a_batch_is_not_gathered(tmp_path: Path) -> None:
    Reading.seen.clear()
    result = train(Reading, tmp_path / "some", steps=1)
    assert result.step == 1
    device, shape, labels = Reading.seen[-1]
    task, config = Contrast(), ls.TrainConfig(batch_size=48, num_microbatches=1)
    _, loader, _ = training_data(task, config, torch.device("cpu"))
    assert torch.equal(labels, loader.microbatch(0, 0)[1]), "all rows, in order"
    assert (device, shape) == ("meta", (48, 6))
    with pytest.raises(TaskError, match=r"reads batch\['names'\] \(list\), which has no row"):
        train(ReadsNames, tmp_path / "names", steps=1)


class Remembers(Contrast):
    """Goes by what the last microbatch of this rank has left."""

    def outputs(self, model: Any, batch: Any) -> Any:
        self.labels = batch[1]
        return super().outputs(model, batch)

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        loss = super().batch_loss(outputs, batch)
        return ls.Loss(loss.sum * (1 + self.labels.double().mean()), loss.weight)


class Vector(Contrast):
    def batch_loss(self, outputs: Any, batch: Any) -> Any:
        return ls.Loss(outputs["z"].sum(1), 1)


class Tensors(Contrast):
    def batch_loss(self, outputs: Any, batch: Any) -> Any:
        return outputs["z"].sum()


class Detached(Contrast):
    def batch_loss(self, outputs: Any, batch: Any) -> Any:
        return ls.Loss(outputs["z"].detach().sum(), 1)


class Mean(Contrast):
    def outputs(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).mean()


class Number(Contrast):
    def outputs(self, model: Any, batch: Any) -> Any:
        return {"z": model(batch[0]), "scale": 2.0}


class Views(Contrast):
    def outputs(self, model: Any, batch: Any) -> Any:
        return model(torch.cat([batch[0], batch[0]]))


class Uneven(Contrast):
    def outputs(self, model: Any, batch: Any) -> Any:
        return model(batch[0]), torch.zeros(3)


class Ragged(Contrast):
    """Rows as long as the number of samples of their microbatch."""

    def outputs(self, model: Any, batch: Any) -> Any:
        z = super().outputs(model, batch)["z"]
        return {"z": z @ z.T, "scale": z[:, 0]}


class Other(Contrast):
    def outputs(self, model: Any, batch: Any) -> Any:
        made = super().outputs(model, batch)
        return made if len(batch[0]) == 10 else made | {"more": batch[1]}


class Temperature(Contrast):
    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model

    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        scale: Any = self.model.scale
        return super().batch_loss(outputs | {"scale": scale[None]}, batch)


class Nothing(ls.Task):
    build_model, dataset = Contrast.build_model, Contrast.dataset


class OutputsOnly(Nothing):
    outputs = Contrast.outputs


class LossOnly(Nothing):
    batch_loss = Contrast.batch_loss


class Both(Contrast):
    def loss(self, model: Any, batch: Any) -> ls.Loss:
        return super().loss(model, batch)


class Helper(Nothing):
    """Has a method of its own that is called `outputs`."""

    def outputs(self, images: Any) -> Any:  # type: ignore[override]
        return images

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        return ls.Loss(model(self.outputs(batch[0])).square().sum(), len(batch[0]))


def test_a_method_of_that_name_beside_a_loss_is_the_tasks_own(tmp_path: Path) -> None:
    assert train(Helper, tmp_path, steps=1).step == 1


class InPhases(Contrast):
    def phases(self) -> Any:
        return [ls.Phase("one", self.loss)]


class Arguments(Contrast):
    def batch_loss(self, model: Any, outputs: Any, batch: Any) -> Any:  # type: ignore[override]
        return outputs


class Carries(Contrast):
    def carry(self, model: Any, batch: Any) -> Any:
        return torch.zeros(1)


class LooksUp(Contrast):
    def lookups(self, batch: Any) -> Any:
        return {}


class Infinite(Contrast):
    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        loss = super().batch_loss(outputs, batch)
        return ls.Loss(loss.sum / (len(outputs["z"]) < 48), loss.weight, loss.metrics)


class OtherMetrics(Contrast):
    def batch_loss(self, outputs: Any, batch: Any) -> ls.Loss:
        loss = super().batch_loss(outputs, batch)
        return loss if len(outputs["z"]) < 48 else ls.Loss(loss.sum, loss.weight)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (OtherMetrics, r"Task\.batch_loss: returned metrics \[\], earlier it returned \['pairs'\]"),
        (Remembers, r"step 0: gave another result when it was repeated.*task\.labels"),
        (Vector, r"Task\.batch_loss: Loss\.sum must be a scalar.*shape \(10,\); sum the loss"),
        (Tensors, r"Task\.batch_loss: must return lockstep\.Loss.*returned a Tensor"),
        (Detached, r"Task\.batch_loss: Loss\.sum has no gradient"),
        (
            Mean,
            r"Task\.outputs: outputs is a tensor of shape \(\); .*first dimension is the samples",
        ),
        (Number, r"Task\.outputs: outputs\['scale'\] is a float"),
        (Views, r"Task\.outputs: returned 20 rows for a batch of 10 samples.*several tensors"),
        (Uneven, r"Task\.outputs: outputs\[1\] has 3 rows, others have 10"),
        (Ragged, r"a row of outputs\['z'\] is float64 \(10,\) in microbatch 0 and float64 \(9,\)"),
        (Other, r"Task\.outputs: returned .*'more'.*for the first microbatch"),
        (Temperature, r"Task\.batch_loss: reads parameter scale itself.*parameter\.expand"),
        (OutputsOnly, r"OutputsOnly\.batch_loss: is missing.*takes \(outputs, batch\)"),
        (LossOnly, r"LossOnly\.outputs: is missing.*takes \(model, batch\)"),
        (Both, r"Both\.batch_loss: the task has loss too.*`loss = lockstep\.Task\.loss`"),
        (InPhases, r"InPhases\.batch_loss: the task has phases too"),
        (Arguments, r"Arguments\.batch_loss: must be a method that takes \(outputs, batch\)"),
        (Carries, r"Carries\.batch_loss: does not go with Carries\.carry"),
        (LooksUp, r"LooksUp\.batch_loss: does not go with LooksUp\.lookups"),
        (Infinite, r"step 0: the loss is inf \(Task\.batch_loss\); parameters"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    task: type[ls.Task], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LockstepError, match=message):
        train(task, tmp_path, steps=2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mesh": {"pp": 2}}, "mesh.pp=2: Contrast.batch_loss"),
        ({"mesh": {"tp": 2}, "num_shards": 2}, "mesh.tp=2: Contrast.batch_loss"),
        ({"sharding": "gradients"}, "sharding=gradients: .*set sharding=optimizer"),
        ({"sharding": "parameters"}, "sharding=parameters: .*set sharding=optimizer"),
        ({"local": {"steps": 2}}, "local.steps=2: a worker steps by itself"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_batch_loss_fits(Contrast(), ls.TrainConfig(**keys))


def test_rows_come_together_in_order_on_any_ranks() -> None:
    """Of several dtypes, uneven and empty microbatches, and ranks without any."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 5, None, 1]
    rows = {
        m: n
        if n is None
        else Rows(
            [
                torch.randn(n, 2, generator=generator).requires_grad_(),
                torch.rand(n, generator=generator) > 0.5,
                torch.randn(n, 3, 1, generator=generator).bfloat16(),
            ],
            [torch.randint(9, (n,), generator=generator)],
        )
        for m, n in enumerate(sizes)
    }
    names = ["a", "b", "c", "d"]
    expected = [torch.cat([of.all[i] for of in rows.values() if of is not None]) for i in range(4)]

    def body(parts: list[range]) -> Any:
        def on_rank(transport: ThreadTransport) -> Any:
            own = {m: rows[m] for m in parts[transport.rank]}
            return gather(transport, torch.device("cpu"), names, own, None)

        return on_rank

    for parts in ([range(5)], [range(2), range(2, 5)], [range(1), range(1, 5), range(0)]):
        for gathered in on_ranks(len(parts), body(parts)):
            for made, whole in zip(gathered.tensors, expected, strict=True):
                assert torch.equal(made, whole)
            assert [t.requires_grad for t in gathered.tensors] == [True, False, False, False]
            places = {0: Range(0, 3), 1: Range(3, 3), 2: Range(3, 8), 4: Range(8, 9)}
            assert gathered.places == places


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    def on_rank(transport: ThreadTransport) -> str:
        error = ValueError("broken") if transport.rank == 1 else None
        own = {} if error else {0: Rows([torch.ones(1)], [])}
        with pytest.raises(LockstepError) as raised:
            gather(transport, torch.device("cpu"), ["a"], own, error)
        return str(raised.value)

    texts = on_ranks(2, on_rank)
    assert texts[0] == texts[1]
    assert "rank 1 raised an exception" in texts[0]


def test_the_digest_of_a_loss_is_never_that_of_no_loss() -> None:
    assert digest([1.1985347255986107e61])  # of whose bytes CRC-32 is 0
    assert digest(torch.zeros(2, dtype=torch.float64))
