"""What a step does again, and what a task does after each step, in one process."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.errors import CheckpointError, TaskError, TaskFailure
from lockstep.launching import api as front
from lockstep.launching.api import Session

STEPS = 6


class Assigning(nn.Module):
    """Batch norm, dropout, and a running value that forward passes assign again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.drop, self.second = nn.Dropout(0.3), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().square().mean(0)
        z: Tensor = self.second(self.drop(y + self.mean))
        return z


class Plain(ls.Task):
    def build_model(self) -> nn.Module:
        return Assigning()

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split == "test":
            return None
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(torch.randn(60, 3, generator=generator), torch.arange(60) % 2)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))


def config(**more: Any) -> ls.TrainConfig:
    values = {"batch_size": 12, "num_microbatches": 4, "steps": STEPS, "eval_every": 2}
    return ls.TrainConfig(**values | {"checkpoint": {"every": 2}} | more)


def run(folder: Path, task: ls.Task, resume: bool = False, **more: Any) -> ls.Result:
    return front.run(task, config(**more), Session(str(folder), resume, console=False))


@pytest.mark.parametrize("moment", ["forward", "backward", "compute"])
def test_a_step_that_failed_inside_is_done_again_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Any
) -> None:
    straight = run(tmp_path / "straight", Plain())
    log = tmp_path / "faults"
    faults = [PlannedFault(0, step, moment, "raise") for step in (1, 3, 4)]
    for name, value in to_env(faults, log).items():
        monkeypatch.setenv(name, value)
    again = run(tmp_path / "again", Plain())
    assert len(log.read_text().splitlines()) == 3
    assert again.params_sha256 == straight.params_sha256
    assert again.metrics == straight.metrics


def test_a_gradient_that_an_evaluation_leaves_is_not_added(tmp_path: Path) -> None:
    class Leaving(Plain):
        def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
            with torch.enable_grad():
                self.loss(model, batch).sum.backward()
            return super().evaluate(model, batch)

    straight = run(tmp_path / "straight", Plain())
    assert run(tmp_path / "leaving", Leaving()).params_sha256 == straight.params_sha256


class Late(Plain):
    """Changes something in step 3 that the trial did not see changing."""

    change = "no"

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        if model.training and self.step_of(batch) >= 3:
            with torch.no_grad():
                if self.change == "parameter":
                    model.first.weight.mul_(0.5)
                elif self.change == "buffer":
                    model.late.add_(1)
                else:
                    model.late = model.late + 1
        return super().loss(model, [batch[0][:, :3], batch[1]])

    @staticmethod
    def step_of(batch: Any) -> int:
        return int(batch[0][0, 3])

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("late", torch.zeros(2))
        return model

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        x, y = super().dataset(split).tensors
        step = torch.arange(60).div(5, rounding_mode="floor").float()
        return TensorDataset(torch.cat([x, step[:, None]], 1), y)


@pytest.mark.parametrize(
    ("change", "named"), [("parameter", "first.weight"), ("buffer", "late"), ("assign", "late")]
)
def test_a_change_that_comes_later_is_refused_before_it_counts(
    tmp_path: Path, change: str, named: str
) -> None:
    task = Late()
    task.change = change
    with pytest.raises(TaskError, match=f"step 3: {named} was (changed|replaced) .*after_step"):
        run(tmp_path, task, batch_size=5, num_microbatches=1, data={"shuffle": False})


def test_buffers_that_evaluations_change_are_put_back(tmp_path: Path) -> None:
    class Counting(Plain):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.register_buffer("evaluated", torch.zeros(()))
            return model

        def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
            model.norm.train()
            model.evaluated += len(batch[0])
            loss = super().evaluate(model, batch)
            return ls.Loss(loss.sum, loss.weight, {"evaluated": (model.evaluated, 1)})

    folder = tmp_path / "run"
    ended = run(folder, Counting(), eval_batch_size=10)
    assert ended.metrics["val/evaluated"] == 10
    snapshot = checkpoint.read(folder / "checkpoints" / listing.folder_name(STEPS))
    assert snapshot.model["evaluated"] == 0
    straight = run(tmp_path / "straight", Plain(), eval_batch_size=10)
    assert snapshot.model["norm.running_mean"].equal(
        checkpoint.read(Path(straight.checkpoint)).model["norm.running_mean"]
    )


def test_an_evaluation_that_changes_parameters_is_refused(tmp_path: Path) -> None:
    class Moving(Plain):
        def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
            model.first.weight.add_(1.0)
            return super().evaluate(model, batch)

    with pytest.raises(TaskError, match=r"evaluation of batch 0: first\.weight was changed"):
        run(tmp_path, Moving())


class Averaged(Plain):
    """Keeps an average of the weights, in the model and, by name, in the task."""

    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.count, self.average = 0, torch.zeros(8, 3)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.teacher = nn.Linear(3, 2).requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        far = (model.teacher(batch[0]).square().sum() + self.average.sum()) * model.first.bias.sum()
        return ls.Loss(loss.sum + 0.01 * far / (1 + self.count), loss.weight)

    def after_step(self, model: nn.Module, step: int) -> None:
        self.count += 1
        assert self.count == step
        with torch.no_grad():
            self.average.lerp_(model.first.weight, 0.1)
            model.teacher.weight.add_(torch.randn(2, 3), alpha=0.1)
            model.mean.mul_(0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.count = state["average"], state["count"]


def test_what_a_task_does_after_steps_survives_a_stop(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", Averaged())
    assert run(tmp_path / "parts", Averaged(), stop_at_step=3).status == "stopped"
    parts = run(tmp_path / "parts", Averaged(), resume=True)
    assert parts.params_sha256 == straight.params_sha256
    assert parts.metrics == straight.metrics
    one, two = (checkpoint.read(Path(end.checkpoint)) for end in (straight, parts))
    assert one.meta["task"] == two.meta["task"] == {"count": STEPS}
    assert one.task["average"].equal(two.task["average"])


def test_state_that_a_task_cannot_take_back_is_an_error(tmp_path: Path) -> None:
    run(tmp_path, Averaged(), stop_at_step=3)

    class Forgetful(Averaged):
        load_state_dict = ls.Task.load_state_dict

        @property
        def name(self) -> str:
            return "averaged"

    with pytest.raises(
        TaskError, match=r"Forgetful\.load_state_dict: is missing.*Forgetful\.state_dict"
    ):
        run(tmp_path, Forgetful(), resume=True)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "must return a dict"),
        ({1: 2}, "must return a dict"),
        ({"seen": {1, 2}}, "'seen' is a set"),
        ({"x": {1: 2}}, "'x' has the key 1, which JSON would convert to text"),
        ({"x": [({"a": [{True: 2}]},)]}, "'x' has the key True, which JSON"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_at_the_start(
    tmp_path: Path, state: Any, message: str
) -> None:
    task = Plain()
    task.state_dict = lambda: state  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=message):
        run(tmp_path, task)
    assert not listing.folders(tmp_path / "checkpoints")


class Growing(Averaged):
    """Its state is of other kinds and shapes after some steps."""

    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.queue, self.best = torch.zeros(1), math.inf
        self.reference: Any = None

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        self.queue = torch.cat([self.queue, model.first.bias.detach()[:1]])
        self.reference = model.first.bias.detach().double()
        self.best = -math.inf if step > 1 else math.nan

    def state_dict(self) -> dict[str, Any]:
        own = {"queue": self.queue, "reference": self.reference, "best": self.best}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.queue, self.best = state["queue"], state["best"]
        self.reference = state["reference"]


def test_state_that_grows_and_changes_its_kind_survives_a_stop(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", Growing())
    run(tmp_path / "parts", Growing(), stop_at_step=3)
    parts = run(tmp_path / "parts", Growing(), resume=True)
    one, two = (checkpoint.read(Path(end.checkpoint)) for end in (straight, parts))
    assert one.meta["task"] == two.meta["task"] == {"count": STEPS, "best": -math.inf}
    assert one.task["queue"].equal(two.task["queue"])
    assert one.task["reference"].equal(two.task["reference"])


def test_a_task_state_that_raises_ends_the_run_at_the_start_or_by_name(tmp_path: Path) -> None:
    class Broken(Averaged):
        limit = 0

        def state_dict(self) -> dict[str, Any]:
            if self.count >= self.limit:
                raise RuntimeError("no state")
            return super().state_dict()

    with pytest.raises(TaskError, match=r"Broken\.state_dict: raised an exception(.|\n)*no state"):
        run(tmp_path / "start", Broken())
    task = Broken()
    task.limit = 3
    with pytest.raises(TaskError, match=r"Broken\.state_dict: raised an exception(.|\n)*no state"):
        run(tmp_path / "later", task)


def test_an_error_of_load_state_dict_may_be_of_one_rank_alone() -> None:
    class Raising(Averaged):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise OSError("no such file")

    with pytest.raises(CheckpointError, match="no such file") as caught:
        TaskState(Raising()).restore({}, {"count": 1})
    assert not caught.value.is_shared


def test_an_exception_after_a_step_ends_the_run_without_another_try(tmp_path: Path) -> None:
    class Failing(Averaged):
        def after_step(self, model: nn.Module, step: int) -> None:
            super().after_step(model, step)
            if step == 3:
                raise RuntimeError("no more")

    with pytest.raises(TaskFailure, match="no more"):
        run(tmp_path, Failing(), checkpoint={"every": 2, "background": False})
    names = [folder.name for folder in listing.folders(tmp_path / "checkpoints")]
    assert names == [listing.folder_name(2)]


def test_a_checkpoint_whose_task_state_is_damaged_is_passed_over(tmp_path: Path) -> None:
    ended = run(tmp_path, Averaged())
    file = Path(ended.checkpoint) / "task.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"task\.safetensors: is damaged"):
        checkpoint.read(Path(ended.checkpoint))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"task\.safetensors: cannot be read"):
        checkpoint.read(Path(ended.checkpoint))


class DrawsLate(Late):
    """Draws from a generator of its own from step 3 on."""

    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.rng = torch.Generator()

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        if self.step_of(batch) >= 3:
            x = x + torch.rand(1, generator=self.rng)
        return Plain.loss(self, model, [x[:, :3], y])


class Drawing(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.rng = x, y, torch.Generator()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(1, generator=self.rng) if self.x[index, 3] >= 3 else 0
        return self.x[index] + noise, self.y[index]


class DataDrawsLate(Late):
    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return Plain.loss(self, model, [batch[0][:, :3], batch[1]])

    def dataset(self, split: str) -> Dataset[Any] | None:
        found = super().dataset(split)
        return None if found is None else Drawing(*found.tensors)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "named"), [(DrawsLate, r"task\.rng"), (DataDrawsLate, r"dataset\('train'\)\.rng")]
)
def test_a_generator_that_is_drawn_from_later_is_refused(
    tmp_path: Path, kind: type[ls.Task], named: str, num_workers: int
) -> None:
    data = {"shuffle": False, "num_workers": num_workers}
    with pytest.raises(TaskError, match=rf"{named}: a random generator .* was drawn from"):
        run(tmp_path, kind(), batch_size=5, num_microbatches=1, data=data)


class DrawsAfterSteps(Plain):
    """Draws once a step, from generators that it saves."""

    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.rng, self.numpy = torch.Generator().manual_seed(1), np.random.RandomState(2)
        self.noise = 0.0

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return super().loss(model, [batch[0] + self.noise, batch[1]])

    def after_step(self, model: nn.Module, step: int) -> None:
        self.noise = torch.rand((), generator=self.rng).item() + self.numpy.rand()

    def state_dict(self) -> dict[str, Any]:
        name, key, *rest = self.numpy.get_state()
        return {
            "rng": self.rng.get_state(),
            "numpy": [name, key.tolist(), *rest],
            "noise": self.noise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.set_state(state["rng"])
        self.numpy.set_state(tuple(state["numpy"]))
        self.noise = state["noise"]


def test_generators_that_only_after_step_draws_from_go_on(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", DrawsAfterSteps())
    assert run(tmp_path / "parts", DrawsAfterSteps(), stop_at_step=3).status == "stopped"
    parts = run(tmp_path / "parts", DrawsAfterSteps(), resume=True)
    assert parts.params_sha256 == straight.params_sha256


class Moving(Plain):
    """Gives parameters new memory, which must not take them out of training."""

    def after_step(self, model: nn.Module, step: int) -> None:
        model.first.weight.data = model.first.weight.data * 0.99
        vector = nn.utils.parameters_to_vector(model.second.parameters())
        nn.utils.vector_to_parameters(vector * 0.98, model.second.parameters())


class MovingInPlace(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.first.weight.mul_(0.99)
            for parameter in model.second.parameters():
                parameter.mul_(0.98)


def test_parameters_that_are_given_other_memory_are_still_trained(tmp_path: Path) -> None:
    expected = run(tmp_path / "in-place", MovingInPlace())
    assert run(tmp_path / "straight", Moving()).params_sha256 == expected.params_sha256
    run(tmp_path / "parts", Moving(), stop_at_step=3)
    assert run(tmp_path / "parts", Moving(), True).params_sha256 == expected.params_sha256


class Forgetting(Averaged):
    """Saves one thing, and forgets another."""

    rate = 1.0

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        self.rate *= 0.9


class KeepsTeacher(Plain):
    """Forgets a module of its own."""

    def build_model(self) -> nn.Module:
        self.teacher = nn.Linear(3, 8)
        return super().build_model()

    def after_step(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            self.teacher.weight.lerp_(model.first.weight, 0.1)


class AnnealsModel(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        model.drop.p *= 0.9


class LastLoss(Plain):
    scale = 1.0
    last = 0.0

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        self.last = float(loss.sum.detach())
        return ls.Loss(loss.sum * self.scale, loss.weight)

    def after_step(self, model: nn.Module, step: int) -> None:
        self._adapt()

    def _adapt(self) -> None:
        self.scale = 1.0 if self.last > 1 else 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class Freezing(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        model.first.weight.requires_grad_(step < 2)


class Replacing(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        model.first.weight = nn.Parameter(model.first.weight.detach().clone())


class CountsEvaluations(Plain):
    count = 0

    def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
        self.count += 1
        return super().evaluate(model, batch)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum * (1 + self.count), loss.weight)


class CachesNoise(Plain):
    def dataset(self, split: str) -> Dataset[Any] | None:
        found = super().dataset(split)
        return Noisy(*found.tensors) if split == "train" else found


class Noisy(Drawing):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.cache: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.x[index] + torch.randn(3)
        return self.cache[index], self.y[index]


class Renormed(Plain):
    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        model.first.weight.data = torch.renorm(model.first.weight.data, 2, 0, 100.0)
        return super().loss(model, batch)


class Clips(Plain):
    """Does nothing in the first step, and bypasses version counters."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        model.first.weight.data.clamp_(-0.6, 0.6)
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgetting, r"task\.rate: is changed by after_step, and does not come back"),
        (KeepsTeacher, r"task\.teacher\.weight: is changed by after_step, and does not come back"),
        (AnnealsModel, r"model\.drop\.p: is changed by after_step, and no checkpoint holds it"),
        (LastLoss, r"task\.last: is what the last microbatch of this rank has left"),
        (Freezing, r"step 2: first\.weight\.requires_grad was changed"),
        (Replacing, r"step 1: first\.weight was replaced"),
        (CountsEvaluations, "Task.loss: gave another loss"),
        (CachesNoise, r"dataset\('train'\): drew other random numbers"),
        (Renormed, r"first\.weight was (changed|given other memory)"),
        (Clips, r"first\.weight was changed by the forward"),
    ],
)
def test_more_that_would_differ_is_refused_by_name(
    tmp_path: Path, kind: type[ls.Task], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        run(tmp_path, kind(), lr=0.3)


class FollowsLevel(Averaged):
    """Its dataset reads what `after_step` changes."""

    def dataset(self, split: str) -> Dataset[Any] | None:
        found = super().dataset(split)
        return Levelled(self, *found.tensors) if split == "train" else found


class Levelled(Drawing):
    def __init__(self, task: FollowsLevel, x: Tensor, y: Tensor) -> None:
        self.task, self.x, self.y = task, x, y

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * (1 + self.task.count), self.y[index]


def test_a_dataset_that_follows_the_task_is_refused_in_other_processes(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", FollowsLevel())
    run(tmp_path / "parts", FollowsLevel(), stop_at_step=3)
    parts = run(tmp_path / "parts", FollowsLevel(), True)
    assert parts.params_sha256 == straight.params_sha256
    with pytest.raises(TaskError, match=r"copies of it; set data\.num_workers=0"):
        run(tmp_path / "workers", FollowsLevel(), data={"num_workers": 1})


def test_an_evaluation_that_fails_once_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Plain):
        fails = False

        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.register_buffer("evaluated", torch.zeros(()))
            return model

        def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
            model.evaluated += 1
            if self.fails and broken.pop("now", None):
                raise RuntimeError("once")
            return super().evaluate(model, batch)

        def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
            loss = super().loss(model, batch)
            return ls.Loss(loss.sum * (1 + model.evaluated), loss.weight)

        def after_step(self, model: nn.Module, step: int) -> None:
            if step == 4 and self.fails:
                broken["now"] = True

        scratch = ("test_task_state.broken", "tests.engine.snapshot.test_task_state.broken")

    straight = run(tmp_path / "straight", Failing())
    task = Failing()
    task.fails = True
    again = run(tmp_path / "again", task)
    assert not broken
    assert again.params_sha256 == straight.params_sha256


broken: dict[str, bool] = {}


def test_a_buffer_that_changes_its_shape_is_refused(tmp_path: Path) -> None:
    class Growing(Plain):
        def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
            loss = super().loss(model, batch)
            model.mean = model.mean[:4]
            return loss

    with pytest.raises(TaskError, match=r"buffer mean: was torch.float32 \(8,\), .* \(4,\)"):
        run(tmp_path, Growing())


class ReplacesModule(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        model.second = nn.Linear(8, 2)


class SetsMode(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        model.norm.eval()


class ChangesViews(Plain):
    """Its batches are the dataset's own memory."""

    def dataset(self, split: str) -> Dataset[Any] | None:
        found = super().dataset(split)
        return Views(*found.tensors) if split == "train" else found

    def collate(self, samples: list[Any]) -> Any:
        return samples

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        batch[0].sub_(batch[0].mean())
        return super().loss(model, batch)


class Views(Drawing):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __getitems__(self, indices: list[int]) -> Any:
        first = min(indices[0], 48)
        return self.x[first : first + 3], self.y[first : first + 3]


class Sparse(Plain):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.table = nn.Embedding(5, 2, sparse=True)
        return model

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum + model.table(batch[1]).sum(), loss.weight)


class Lazy(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(2))


class Sync(Plain):
    def build_model(self) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().build_model())


class Infinite(Plain):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("least", torch.full((), torch.inf))
        return model

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        model.least = torch.minimum(model.least, batch[0].min())
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReplacesModule, r"second\.weight is another tensor than when the model was built"),
        (SetsMode, r"model\.norm\.training: is changed by after_step"),
        (ChangesViews, r"dataset\('train'\)\.x: is changed by every microbatch"),
        (Sparse, r"parameter table\.weight: has a sparse gradient"),
        (Lazy, "build_model: 0 is a lazy module"),
        (Sync, "build_model: norm is a SyncBatchNorm"),
        (Infinite, "buffer least: is changed by forward passes and holds values"),
    ],
)
def test_what_would_go_wrong_later_is_refused_by_name(
    tmp_path: Path, kind: type[ls.Task], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        run(tmp_path, kind())


def test_a_training_that_stops_leaves_no_handler_of_signals(tmp_path: Path) -> None:
    list(DataLoader(range(2), num_workers=1))  # torch installs its handler once
    before = signal.getsignal(signal.SIGCHLD)
    run(tmp_path / "run", Plain(), stop_at_step=3, data={"num_workers": 1})
    assert signal.getsignal(signal.SIGCHLD) is before


class Idle(ls.Task):
    """Does nothing."""

    def build_model(self) -> nn.Module:
        """See `ls.Task`."""
        return nn.Identity()

    def dataset(self, split: str) -> None:
        """See `ls.Task`."""


class AtEachStep(Idle):
    """May change anything."""

    def after_step(self, model: Any, step: int) -> None:
        """See `ls.Task`."""


class Shown(ls.Hook):
    """Runs on the first rank."""

    first_only = True


@pytest.mark.parametrize(
    ("state", "may_change"),
    [
        (TaskState(Idle()), False),
        (TaskState(Idle(), [ls.hooks.EMA(), Shown()]), False),
        (TaskState(Idle(), is_driven=True), True),
        (TaskState(AtEachStep()), True),
        (TaskState(Idle(), [ls.Hook(), type("Own", (ls.Hook,), {})()]), True),
        (TaskState(Idle(), [type("Own", (ls.hooks.EMA,), {})()]), True),
    ],
)
def test_code_of_the_users_between_steps_may_change_the_data(
    state: TaskState, may_change: bool
) -> None:
    assert state.may_change_data == may_change
