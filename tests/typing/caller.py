"""The public API as callers with strict type checkers use it; for `make types`, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import assert_type

import lockstep as ls
from lockstep.comm.backend import init_process_group
from lockstep.config import NO_OUTCOME, Positive
from lockstep.errors import CheckpointError, ConfigError, RankFailure, TaskError
from lockstep.quantum import (
    Circuit,
    PauliSum,
    Simulator,
    from_qasm,
    gate,
    parameter,
    probabilities,
    share,
    shifted,
    statevector,
    to_qasm,
)


class Rate(ls.OptimizerConfig):
    """A section of the caller's own, in the place of one of Lockstep's."""

    decay: float = 0.5


class MyConfig(ls.TrainConfig):
    width: Positive = 8
    kind: Literal["small", "large"] = "small"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    cache: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)

    batch_size: int = 32
    lr: float = 0.01
    optimizer: Rate = Rate(name="sgd", momentum=0.9, decay=0.1)
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine", warmup_steps=10)
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=50, keep=2)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(2, width)
        self.head = nn.Linear(width, 1)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x))


class Full(ls.Task):
    """Every method, with the types of its own model, config and batch."""

    Config = MyConfig
    config: MyConfig
    scratch = ("task.calls",)

    def __init__(self, config: MyConfig | None = None) -> None:
        super().__init__(config)
        self.temperature = self.config.dropout * self.config.optimizer.decay
        assert_type(self.config.width, int)

    def build_model(self) -> Model:
        return Model(self.config.width)

    def dataset(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.rand(8, 2), torch.rand(8)) if split == "train" else None

    def loss(self, model: Model, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        x, y = batch
        error = model.head(model.features(x)).squeeze(1) - y
        noise = torch.rand(1, generator=ls.generator()) + ls.numpy_generator().random()
        return ls.Loss.mean((error + noise).square().mean(), len(x), {"error": (error.sum(), 1.0)})

    def evaluate(self, model: Model, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        return self.loss(model, batch)

    def build_optimizer(self, model: Model) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.config.lr)

    def data_digest(self) -> str:
        return "0" * 64

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    def after_step(self, model: Model, step: int) -> None:
        self.temperature *= 0.99
        model.head.weight.data.clamp_(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.temperature = state["temperature"]


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


class Short(ls.Task):
    """As few types as strict checkers take."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> Rows:
        return Rows()

    def loss(self, model: nn.Module, batch: Tensor) -> ls.Loss:
        return ls.Loss(model(batch).sum(), len(batch))


class Notes(ls.Hook):
    first_only = True

    def __init__(self) -> None:
        self.lines: list[str] = []

    def after_evaluation(self, run: ls.Run, split: str, metrics: dict[str, float]) -> None:
        assert_type(run.model, nn.Module)
        assert_type(run.run_dir, Path)
        self.lines.append(f"{run.step} {split} {metrics['loss']}")


class Pair(ls.Task):
    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.ema = ls.hooks.EMA(0.99)

    def build_model(self) -> nn.ModuleDict:
        return nn.ModuleDict({"one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})

    def dataset(self, split: str) -> Rows:
        return Rows()

    def one_loss(self, model: nn.ModuleDict, batch: Tensor) -> ls.Loss:
        return ls.Loss(model["one"](batch).sum(), len(batch))

    def two_loss(self, model: nn.ModuleDict, batch: Tensor) -> ls.Loss:
        return ls.Loss(model["two"](batch).sum(), len(batch))

    def phases(self) -> list[ls.Phase]:
        return [ls.Phase("one", self.one_loss, steps=2), ls.Phase("two", self.two_loss)]

    def build_optimizer(self, model: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
        return {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}

    def lr_factor(self, step: int, total_steps: int) -> list[float]:
        return [1.0 - step / total_steps, 0.5]

    def hooks(self) -> list[ls.Hook]:
        return [self.ema, ls.hooks.EarlyStopping("loss", 3), Notes()]


class Scheduled(Short):
    def build_optimizer(self, model: nn.Module) -> dict[str, torch.optim.SGD]:
        return {"all": torch.optim.SGD(model.parameters(), 0.1)}

    def lr_factor(self, step: int, total_steps: int) -> dict[str, float]:
        factor = ls.lr_factor(self.config.schedule, step, total_steps)
        assert_type(factor, float)
        return {"all": factor}


def loop() -> None:
    model = nn.Linear(2, 1)
    reducer = ls.Reducer(model.parameters(), num_microbatches=4, sums=("loss",))
    for microbatch in reducer.microbatches(0):
        assert_type(microbatch, int)
        loss = model(torch.zeros(3, 2)).sum()
        loss.backward()
        reducer.add(3, loss=loss)
    assert_type(reducer.reduce()["loss"], float)


def configs() -> None:
    config = ls.TrainConfig(
        batch_size=64,
        steps=10,
        lr=1,
        optimizer=ls.OptimizerConfig(name="adamw", betas=(0.9, 0.99)),
        schedule=ls.ScheduleConfig(name="plateau", patience=3),
        precision=ls.PrecisionConfig(dtype="bf16"),
        early_stopping=ls.EarlyStoppingConfig(patience=3),
        convergence=(ls.ConvergenceConfig(metric="loss", window=3),),
        checkpoint=ls.CheckpointConfig(background=False),
        data=ls.DataConfig(num_workers=2, shuffle=False),
    )
    assert_type(config, ls.TrainConfig)
    assert_type(config.hash, str)
    assert_type(config.to_yaml(), str)
    assert_type(config.optimizer.betas, tuple[float, float])
    assert_type(MyConfig(width=3, kind="large").optimizer.decay, float)


def runs() -> None:
    try:
        ls.train(Full(MyConfig(width=4)), MyConfig(width=4), run_dir=Path("runs") / "full")
        finished = ls.train(Short(), run_dir="runs/short", resume=True)
    except (ConfigError, TaskError) as error:
        raise SystemExit(error.exit_code) from None
    except RankFailure as error:
        assert_type(error.rank, int | None)
        raise
    except ls.LockstepError as error:
        raise SystemExit(str(error)) from error
    assert_type(finished, ls.Result)
    assert_type(finished.params_sha256, str)
    assert_type(finished.model, nn.Module)
    assert_type(finished.best_checkpoint, Path | None)
    assert_type(finished.metrics["val/loss"], float)


def loops() -> None:
    steps = ls.steps(Full(MyConfig(width=4)), run_dir=Path("runs") / "loop", quiet=True)
    assert_type(steps, ls.Steps)
    for step in steps:
        assert_type(step, ls.Step)
        assert_type(step.number, int)
        assert_type(step.metrics["loss"], float)
        assert_type(step.evaluated, dict[str, float])
        assert_type(step.model, nn.Module)
        step.stop("enough")
    assert_type(steps.result, ls.Result)


def loads() -> None:
    try:
        loaded = ls.load("runs/full", "best", device="cpu")
    except CheckpointError:
        loaded = ls.load(Path("runs/full"), 100)
    assert_type(loaded, ls.Loaded)
    assert_type(loaded.step, int)
    assert_type(loaded.run_dir, Path)
    assert_type(loaded.task, ls.Task)
    assert_type(loaded.model, nn.Module)
    if isinstance(loaded.model, Model):
        assert_type(loaded.model.features(torch.zeros(1, 2)), Tensor)


def circuits() -> None:
    circuit = Circuit(2, [gate("rx", 0, angle=parameter(0)), gate("cx", 0, 1)])
    simulator = Simulator(circuit)
    angles = torch.zeros(circuit.num_parameters, requires_grad=True)
    state = simulator.state(angles)
    assert_type(state, Tensor)
    assert_type(statevector(circuit, angles), Tensor)
    assert_type(PauliSum({"ZI": 1.0, "XX": 0.5}).expectation(state), Tensor)
    assert_type(probabilities(state), Tensor)
    assert_type(shifted(simulator, angles, probabilities, share(1, 0, 1)), Tensor)
    assert_type(from_qasm(to_qasm(circuit, version=3)), Circuit)


def backend() -> None:
    init_process_group()
