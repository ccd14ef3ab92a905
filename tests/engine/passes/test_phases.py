"""Phases: each step has the loss and the optimizer of the phase whose turn it is."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.errors import ConfigError, LockstepError, TaskError


class Gan(ls.Task):
    """A critic with a gradient penalty, and a generator that has batch norm."""

    def build_model(self) -> nn.Module:
        critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        return nn.ModuleDict({"critic": critic, "generator": generator})

    def dataset(self, split: str) -> Dataset[Any] | None:
        angles = torch.linspace(0, 6, 96)
        points = torch.stack([angles.cos(), angles.sin()], 1)
        return TensorDataset(points) if split == "train" else None

    def made(self, model: Any, count: int) -> Tensor:
        points: Tensor = model["generator"](torch.randn(count, 3))
        return points

    def critic_loss(self, model: Any, batch: Any) -> ls.Loss:
        (real,) = batch
        made = self.made(model, len(real)).detach()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(model["critic"](between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().sum()
        loss = model["critic"](made).sum() - model["critic"](real).sum() + 10 * penalty
        return ls.Loss(loss, len(real), {"penalty": (penalty.detach(), len(real))})

    def generator_loss(self, model: Any, batch: Any) -> ls.Loss:
        count = len(batch[0])
        return ls.Loss(-model["critic"](self.made(model, count)).sum(), count)

    def phases(self) -> list[ls.Phase]:
        return [
            ls.Phase("critic", self.critic_loss, steps=2),
            ls.Phase("generator", self.generator_loss),
        ]

    def build_optimizer(self, model: Any) -> Any:
        return {
            "critic": torch.optim.Adam(model["critic"].parameters(), lr=0.01),
            "generator": torch.optim.Adam(model["generator"].parameters(), lr=0.002),
        }


def config(**keys: Any) -> ls.TrainConfig:
    values = {"batch_size": 24, "num_microbatches": 4, "log_every": 1, "steps": 7}
    return ls.TrainConfig(**values | keys)


def train(task: ls.Task, folder: Path, resume: bool = False, **keys: Any) -> ls.Result:
    return ls.train(task, config(**keys), run_dir=folder, resume=resume, quiet=True)


class Steps(ls.Hook):
    """Notes which parts of the model each step has changed."""

    first_only = True

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, list[str], float]] = []
        self._before: dict[str, Tensor] = {}

    def on_start(self, run: ls.Run) -> None:
        self._look(run)

    def after_step(self, run: ls.Run) -> None:
        before = self._before
        self._look(run)
        names = {n.partition(".")[0] for n, p in before.items() if not p.equal(self._before[n])}
        self.rows.append((run.step, run.phase, sorted(names), run.lr))

    def _look(self, run: ls.Run) -> None:
        self._before = {n: p.detach().clone() for n, p in run.model.named_parameters()}


def test_each_phase_steps_its_own_parameters(tmp_path: Path) -> None:
    steps = Steps()

    class Looked(Gan):
        def hooks(self) -> list[ls.Hook]:
            return [steps]

    train(Looked(), tmp_path)
    critic, generator = ("critic", ["critic"], 0.01), ("generator", ["generator"], 0.002)
    turns = [critic, critic, generator, critic, critic, generator, critic]
    assert steps.rows == [(step, *turn) for step, turn in enumerate(turns, start=1)]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["critic_penalty"]) for row in rows] == [t is critic for t in turns]
    assert [bool(row["generator_loss"]) for row in rows] == [t is generator for t in turns]


def test_a_step_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """One microbatch of a model without random numbers, beside torch alone."""

    class Plain(Gan):
        def build_model(self) -> nn.Module:
            generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
            return nn.ModuleDict({"critic": critic, "generator": generator})

        def generator_loss(self, model: Any, batch: Any) -> ls.Loss:
            made = model["generator"](batch[0])
            return ls.Loss(model["critic"](made).square().sum(), len(made))

        def critic_loss(self, model: Any, batch: Any) -> ls.Loss:
            made = model["generator"](batch[0]).detach()
            loss = (model["critic"](made) - 1).square() + (model["critic"](batch[0]) + 1).square()
            return ls.Loss(loss.sum(), len(made))

    keys = {"batch_size": 96, "num_microbatches": 1, "data": {"shuffle": False}}
    result = train(Plain(), tmp_path, **keys, steps=6)
    seed_all(random_key(0, Stream.MODEL))
    task = Plain()
    model = task.build_model()
    optimizers = task.build_optimizer(model)
    batch = [torch.stack([points for (points,) in task.dataset("train")])]  # type: ignore[arg-type, union-attr]
    for turn in ("critic", "critic", "generator") * 2:
        model.zero_grad()
        loss = getattr(task, f"{turn}_loss")(model, batch)
        (loss.sum / loss.weight).backward()
        optimizers[turn].step()
    for ours, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_goes_on_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    whole = train(Gan(), tmp_path / "whole")
    train(Gan(), tmp_path / "halves", stop_at_step=4)
    halves = train(Gan(), tmp_path / "halves", True)
    assert halves.params_sha256 == whole.params_sha256
    assert halves.metrics == whole.metrics


def test_one_optimizer_for_all_phases(tmp_path: Path) -> None:
    class One(Gan):
        def build_optimizer(self, model: nn.Module) -> None:
            return None

    assert train(One(), tmp_path, optimizer={"name": "sgd"}).step == 7
    sharded = train(One(), tmp_path / "sharded", optimizer={"name": "sgd", "sharded": True})
    assert sharded.step == 7


def phases(*given: Any) -> Callable[[], ls.Task]:
    class Bad(Gan):
        def phases(self) -> Any:
            return list(given)

    return Bad


def optimizers(make: Callable[[Any], Any]) -> Callable[[], ls.Task]:
    class Bad(Gan):
        def build_optimizer(self, model: nn.Module) -> Any:
            return make(model)

    return Bad


class NoLoss(Gan):
    def phases(self) -> list[ls.Phase]:
        return []


class NoEvaluation(Gan):
    def dataset(self, split: str) -> Dataset[Any] | None:
        return super().dataset("train") if split != "test" else None


class OtherMetrics(Gan):
    def critic_loss(self, model: Any, batch: Any) -> ls.Loss:
        loss = super().critic_loss(model, batch)
        return loss if len(batch[0]) > 5 else ls.Loss(loss.sum, loss.weight)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


def frozen() -> ls.Task:
    def make(model: Any) -> Any:
        critic = adam(model["critic"].requires_grad_(False))
        return {"critic": critic, "generator": adam(model["generator"])}

    return optimizers(make)()


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (phases("critic"), TaskError, r"Bad\.phases: must return a list of lockstep\.Phase"),
        (phases(ls.Phase("a b", len)), TaskError, "the name 'a b': must be an identifier"),
        (
            phases(ls.Phase("a", len), ls.Phase("a", len)),
            TaskError,
            "the name 'a': must be an identifier that no other phase has",
        ),
        (phases(ls.Phase("a", len, 0)), TaskError, r"Bad\.phases: a: steps=0: must be at least 1"),
        (phases(ls.Phase("a", 3)), TaskError, "a: loss=3: is no function"),
        (NoLoss, TaskError, r"NoLoss\.loss: is missing; write it, or give losses by `phases`"),
        (NoEvaluation, TaskError, r"NoEvaluation\.loss: is missing; write it, or `evaluate`"),
        (OtherMetrics, TaskError, r"critic: the loss: returned metrics \[\], earlier it"),
        (
            optimizers(lambda m: {"critic": adam(m)}),
            TaskError,
            r"build_optimizer: returned optimizers for \['critic'\]; the phases are \['critic', 'g",
        ),
        (
            optimizers(lambda m: {"critic": adam(m), "generator": adam(m)}),
            TaskError,
            "the optimizers of 'critic' and 'generator' have the same parameter",
        ),
        (
            optimizers(lambda m: {"critic": adam(m), "generator": "adam"}),
            TaskError,
            "'generator' is a str; must be an optimizer",
        ),
        (
            frozen,
            TaskError,
            "the optimizer of 'critic' has no parameter that requires a gradient",
        ),
    ],
)
def test_refusals(
    tmp_path: Path, make: Callable[[], ls.Task], kind: type[LockstepError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        train(make(), tmp_path, batch_size=22)


@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_slices_of_optimizers_of_phases_give_the_same_bits(tmp_path: Path, sharding: str) -> None:
    whole = train(Gan(), tmp_path / "whole")
    train(Gan(), tmp_path / "slices", sharding=sharding, stop_at_step=4)
    slices = train(Gan(), tmp_path / "slices", True)
    assert slices.params_sha256 == whole.params_sha256


class Whole(torch.optim.Adam):
    """Not known to be element-wise."""


def test_an_optimizer_of_a_phase_that_steps_whole_parameters_is_named(tmp_path: Path) -> None:
    made = optimizers(
        lambda m: {"critic": adam(m["critic"]), "generator": Whole(m["generator"].parameters())}
    )
    assert train(made(), tmp_path / "whole", steps=3).step == 3
    with pytest.raises(ConfigError, match=r"sharding=gradients: Whole of 'generator' is not known"):
        train(made(), tmp_path / "slices", sharding="gradients")


class Tied(Gan):
    """A pipeline of which the first block and the last share a weight, each phase with one end."""

    def build_model(self) -> nn.Module:
        first, last = nn.Linear(2, 2), nn.Linear(2, 2)
        last.weight = first.weight
        return ls.nn.Pipeline(first, nn.Tanh(), nn.Linear(2, 2), last)

    def both(self, model: Any, batch: Any) -> ls.Loss:
        return ls.Loss((model(batch[0]) - batch[0]).square().sum(), len(batch[0]))

    def phases(self) -> list[ls.Phase]:
        return [ls.Phase("ends", self.both), ls.Phase("inside", self.both)]

    def build_optimizer(self, model: Any) -> dict[str, torch.optim.Optimizer]:
        ends = [*model[0].parameters(), model[3].bias]
        return {
            "ends": torch.optim.SGD(ends, lr=0.1),
            "inside": torch.optim.Adam(model[2].parameters(), lr=0.1),
        }


def test_a_tied_weight_has_the_gradients_of_all_its_blocks(tmp_path: Path) -> None:
    keys = {"batch_size": 96, "num_microbatches": 1, "data": {"shuffle": False}}
    result = train(Tied(), tmp_path, **keys, steps=6)
    seed_all(random_key(0, Stream.MODEL))
    task = Tied()
    model = task.build_model()
    made = task.build_optimizer(model)
    batch = [torch.stack([points for (points,) in task.dataset("train")])]  # type: ignore[arg-type, union-attr]
    for turn in ("ends", "inside") * 3:
        model.zero_grad()
        loss = task.both(model, batch)
        (loss.sum / loss.weight).backward()
        made[turn].step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], tensor)
