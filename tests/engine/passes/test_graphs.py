"""Graphs of microbatches give the bits of eager passes, and are left alone where they cannot.

Where there is no GPU, a graph is played: what torch dispatches in a pass is recorded, and done
again with the same tensors and the same numbers of Python, as a CUDA graph does it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.engine import assembly
from lockstep.engine.passes import graphs
from lockstep.engine.passes.graphs import Capture
from lockstep.engine.step.train_step import TrainStep
from lockstep.errors import ConfigError, TaskError
from lockstep.observe import read_events

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Recorder(TorchDispatchMode):
    """Records what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        """Do it all again; results go to the memory that they had."""
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Played(Capture):
    """Graphs of the CPU."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def begin(self) -> None:
        pass

    def has_room(self) -> bool:
        return True

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        with Recorder() as recorder:
            work()

        def replay() -> None:
            self.num_replayed += 1
            recorder.replay()

        return replay

    def wait(self) -> None:
        pass


class Net(nn.Module):
    """Has statistics of batches, draws numbers, and leaves a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Classifier(ls.Task):
    """Weights and metrics are tensors and numbers; the last batch of an epoch is smaller."""

    def build_model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> TensorDataset | None:
        draw = torch.Generator().manual_seed(1)
        x, y = torch.randn(100, 6, generator=draw), torch.randint(3, (100,), generator=draw)
        return TensorDataset(x, y) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        x.mul_(0.5)  # a loss may change its batch
        logits = model(x)
        right = (logits.argmax(1) == y).sum()
        known = (y > 0).sum()
        total = F.cross_entropy(logits, y, reduction="sum")
        return ls.Loss(total, known, {"accuracy": (right, len(y))})


class Waiting(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum * (1 if loss.sum.item() > 0 else 2), loss.weight)


class Finding(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum * len((batch[1] > 0).nonzero()), loss.weight)


class Drawing(Classifier):
    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum * (1 + random.random()), loss.weight)


class Opaque(Classifier):
    def collate(self, samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return [torch.stack(x), torch.stack(y), {1, 2}]

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return super().loss(model, batch[:2])


class Hooked(Classifier):
    """A hook of torch comes late; it is noticed when a graph is checked, in step 15."""

    def hooks(self) -> list[ls.Hook]:
        return [Late()]


class Late(ls.Hook):
    first_only = True

    def after_step(self, run: ls.Run) -> None:
        if run.step == 11:
            run.model.layers[4].register_forward_hook(lambda *args: None)


class Growing(Classifier):
    """Reads a number that changes between steps."""

    factor = 1.0

    def after_step(self, model: nn.Module, step: int) -> None:
        self.factor = 1.0 + (step > 9)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum * self.factor, loss.weight)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


def train(task: type[ls.Task], folder: Path, **keys: Any) -> ls.Result:
    keys = {"batch_size": 40, "num_microbatches": 4, "steps": 24, "device": "cpu"} | keys
    return ls.train(task(), ls.TrainConfig(**keys), run_dir=folder, quiet=True)


def warned(folder: Path) -> list[str]:
    rows = read_events(folder / "events.jsonl")
    return [row["message"] for row in rows if "CUDA graphs" in row.get("message", "")]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Has microbatches of the CPU played by graphs, which count as quick."""
    capture = Played()
    monkeypatch.setattr(graphs, "capture_on", lambda device: capture)
    monkeypatch.setattr(graphs, "_GAIN", 1e9)
    # The generator of the played device is that of the host.
    monkeypatch.setattr(graphs, "host_state", random.getstate)
    return capture


def test_graphs_have_the_bits_of_eager_passes(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(Classifier, tmp_path / "graphs")
    assert played.num_captured == 2  # microbatches of an epoch's last step are smaller
    assert played.num_replayed > 60
    whole = train(Classifier, tmp_path / "eager", compute={"graphs": False})
    assert played.num_captured == 2
    monkeypatch.setattr(graphs, "capture_on", lambda device: None)
    plain = train(Classifier, tmp_path / "plain")
    assert found.params_sha256 == whole.params_sha256 == plain.params_sha256
    assert found.metrics == whole.metrics == plain.metrics
    assert not warned(tmp_path / "graphs")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Waiting, r"aten._local_scalar_dense.default: waits for the GPU"),
        (Finding, r"aten.nonzero.default: waits for the GPU"),
        (Drawing, "draws random numbers on the host"),
        (Opaque, "a batch holds a set"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(
    tmp_path: Path, played: Played, task: type[ls.Task], reason: str
) -> None:
    found = train(task, tmp_path / "graphs", steps=6)
    assert played.num_captured == played.num_replayed == 0
    [message] = warned(tmp_path / "graphs")
    assert reason in message
    eager = train(task, tmp_path / "eager", steps=6, compute={"graphs": False})
    assert found.params_sha256 == eager.params_sha256


class Rated(Classifier):
    def lr_factor(self, step: int, total_steps: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("task", "keys"), [(Rated, {}), (Classifier, {"precision": {"deterministic": False}})]
)
def test_code_between_steps_and_kernels_that_are_not_alike_rule_graphs_out(
    tmp_path: Path, played: Played, task: type[ls.Task], keys: dict[str, Any]
) -> None:
    train(task, tmp_path, steps=6, **keys)
    assert not played.num_captured


def test_the_body_of_a_loop_of_ones_own_rules_graphs_out(tmp_path: Path, played: Played) -> None:
    config = ls.TrainConfig(batch_size=40, num_microbatches=4, steps=6, device="cpu")
    for _ in ls.steps(Classifier(), config, run_dir=tmp_path, quiet=True):
        pass
    assert not played.num_captured


def test_a_hook_of_torch_that_comes_late_is_called(tmp_path: Path, played: Played) -> None:
    train(Hooked, tmp_path, steps=18)
    [message] = warned(tmp_path)
    assert "module layers.4: has a hook of torch" in message
    assert played.num_captured == 2


def test_a_graph_that_saves_no_time_is_not_used(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_GAIN", 0.0)
    train(Classifier, tmp_path, steps=4)
    assert (played.num_captured, played.num_replayed) == (2, 4)


def test_a_number_that_changes_between_steps_is_found(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Growing, tmp_path / "auto", steps=4)
    assert not played.num_captured  # `after_step` might change anything
    monkeypatch.setattr(assembly, "check_graphs_fit", lambda *args: None)
    with pytest.raises(
        TaskError, match=r"step [0-9]+: the CUDA graph .* changed since step [0-9]+"
    ):
        train(Growing, tmp_path / "true", compute={"graphs": True})
    assert played.num_captured


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "ranks compute on cpu, which has no CUDA graphs"),
        ({"local": {"steps": 2}}, "local.steps is not captured"),
        ({"activation_checkpointing": ["layers.0"]}, "activation_checkpointing sets states"),
    ],
)
def test_graphs_that_are_asked_for_are_refused_where_there_are_none(
    tmp_path: Path, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^compute\.graphs=true: .*{reason}.*graphs=auto$"):
        train(Classifier, tmp_path, compute={"graphs": True}, **keys)


@needs_gpu
def test_a_capture_that_fails_leaves_the_gpu_as_it_was() -> None:
    x = torch.zeros(8, device="cuda")

    def work() -> None:
        F.dropout(x, 0.5)
        x.sum().item()

    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    with pytest.raises(RuntimeError):
        Capture().capture(work)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    made: list[Tensor] = []
    replay = Capture().capture(lambda: made.append(torch.rand(4, device="cuda")))
    torch.cuda.manual_seed(3)
    replay()
    assert torch.equal(made[0], expected)


@needs_gpu
@pytest.mark.parametrize("task", [Classifier, Waiting, Drawing, Opaque])
def test_a_gpu_gives_the_same_bits_with_graphs(
    tmp_path: Path, task: type[ls.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[object] = []
    capture = Capture.capture
    monkeypatch.setattr(
        Capture, "capture", lambda self, work: captured.append(work) or capture(self, work)
    )
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keys: dict[str, Any] = {"device": "cuda", "steps": 70, "precision": {"dtype": "bf16"}}
    found = train(task, tmp_path / "graphs", **keys)
    assert len(captured) == (2 if task is Classifier else 0)
    assert len(warned(tmp_path / "graphs")) == (task is not Classifier)
    eager = train(task, tmp_path / "eager", **keys | {"compute": {"graphs": False}})
    assert found.params_sha256 == eager.params_sha256


@needs_gpu
def test_a_step_waits_for_the_gpu_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Once for the sums and the norm, and once for counters such as batch norm's."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    waits: list[int] = []
    run = TrainStep.run

    def counted(*args: Any) -> Any:
        recwarn.clear()
        result = run(*args)
        waits.append(sum("synchronizing" in str(w.message) for w in recwarn.list))
        return result

    monkeypatch.setattr(TrainStep, "run", counted)
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        train(Classifier, tmp_path, device="cuda", steps=30, batch_size=20, num_microbatches=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # More in steps that are checked.
    assert 1 <= sorted(waits)[len(waits) // 2] <= 2
