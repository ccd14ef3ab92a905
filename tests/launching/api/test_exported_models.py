"""`ls.export` and `lockstep export`: files that others read, and one message for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from tests.launching.api.test_train import Line
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.errors import ConfigError, DataError, TaskError
from lockstep.launching.api.trained import SUFFIXES

GRAPHS = ("torch.export", "torchscript", "onnx")


class Attends(nn.Module):
    """Two inputs, the batch in the second dimension of the first, two outputs, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, dropout=0.5)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, bias: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        mixed, _ = self.mix(x, x, x)
        return {"y": scale * self.out(mixed.mean(0)) + bias, "mean": x.mean(0)}


class Pairs(ls.Task):
    """Calls its model with a keyword, and a default."""

    def build_model(self) -> nn.Module:
        return Attends()

    def dataset(self, split: str) -> Dataset[Any] | None:
        x = torch.randn(12, 5, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.mean((1, 2))[:, None]) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        out = model(x.transpose(0, 1), bias=torch.zeros(len(y), 1), scale=2.0)
        return ls.Loss((out["y"] - y).square().sum(), len(y))


def trained(task: ls.Task, run_dir: Path) -> Path:
    config = ls.TrainConfig(batch_size=6, num_microbatches=2, steps=2)
    return ls.train(task, config, run_dir=run_dir, quiet=True).run_dir


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(Pairs(), tmp_path_factory.mktemp("pairs") / "мой run")


def test_weights_with_names_and_metadata(pairs: Path, tmp_path: Path) -> None:
    path = tmp_path / "мои weights.safetensors"
    done = ls.export(pairs, path, task=Pairs)
    assert (done.path, done.format, done.step) == (path, "safetensors", 2)
    model = ls.load(pairs, "latest", task=Pairs).model
    with safe_open(path, "pt") as file:
        assert {*file.keys()} == {*model.state_dict()}
        for name, tensor in model.state_dict().items():
            assert torch.equal(file.get_tensor(name), tensor)
        about = file.metadata()
    result = json.loads((pairs / "result.json").read_text())
    assert about["params_sha256"] == result["params_sha256"]
    assert about["task"] == "pairs"
    assert "batch_size: 6" in about["config"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def again(path: Path, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs of an exported model, as a program of somebody else gets them."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        given = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(np.asarray(out)) for out in session.run(None, given)]
    loaded: Any = torch.export.load(path).module() if path.suffix == ".pt2" else None
    if loaded is None:
        with pytest.warns(DeprecationWarning, match="jit.load"):
            loaded = torch.jit.load(str(path))
    return [*loaded(*inputs).values()]


@pytest.mark.parametrize(
    "format", [pytest.param(f, marks=pytest.mark.slow) if f == "onnx" else f for f in GRAPHS]
)
def test_several_inputs_and_any_batch_size(pairs: Path, tmp_path: Path, format: str) -> None:
    path = tmp_path / f"model{SUFFIXES[format]}"
    state = torch.get_rng_state()
    done = ls.export(str(pairs), str(path), format=format, task=Pairs)
    assert torch.equal(torch.get_rng_state(), state)
    assert done.inputs == "x [5, *, 8] float32, bias [*, 1] float32"
    assert 0 <= done.max_difference < 1e-5
    model = ls.load(pairs, "latest", task=Pairs).model
    inputs = (torch.randn(5, 9, 8), torch.randn(9, 1))
    with torch.no_grad():
        wanted = [*model(*inputs).values()]
    for a, b in zip(wanted, again(path, inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_the_command_goes_by_the_suffix(
    here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("train", "digits", "steps=1", "model=cnn", "--run-dir", "run").returncode == 0
    done = here("export", "run", "model.pt2")
    assert done.returncode == 0, done.stderr
    assert "torch.export of step 1, inputs inputs_0 [*, 1, 8, 8] float32; " in done.stdout
    assert (tmp_path / "model.pt2").exists()
    for arguments, message in [
        (("model",), "error: model: digits has no forms of its own; end it in .safetensors, .pt2"),
        (("model.pt2", "--format", "h5"), "error: format='h5': must be one of safetensors,"),
        (("none/model.ts",), "error: none/model.ts: cannot be written: No such file or directory"),
        (("model.pt2", "--checkpoint", "7"), "error: "),
    ]:
        done = here("export", "run", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(message)


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 1e9 else super().forward(x) + x


class OnlyKeywords(nn.Linear):
    def forward(self, *, x: Tensor) -> Tensor:
        return super().forward(x)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape)


class Odd(Line):
    """A line with a model of another kind."""

    kind: type[nn.Linear] = nn.Linear

    def build_model(self) -> nn.Module:
        return self.kind(1, 1)


class Keywords(Odd):
    kind = OnlyKeywords

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return ls.Loss(model(x=batch[0]).square().sum(), len(batch[0]))


class Inside(Odd):
    """Does not call its model, but says what it would call it with."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return ls.Loss(nn.functional.linear(batch[0], model.weight).square().sum(), len(batch[0]))


class Says(Inside):
    def example_input(self, batch: Any) -> Tensor:
        return batch[0]


class ChoosesTask(Odd):
    kind = Chooses


class NoisyTask(Odd):
    kind = Noisy


DATA = {"are_there": True}


class NoData(Odd):
    def dataset(self, split: str) -> Dataset[Any] | None:
        if not DATA["are_there"]:
            raise FileNotFoundError("images.idx")
        return super().dataset(split)


@pytest.mark.parametrize(
    ("kind", "format", "error", "message"),
    [
        (ChoosesTask, "torch.export", ConfigError, "as torch.export: .*data-dependent"),
        (ChoosesTask, "torchscript", ConfigError, "as torchscript: .*data-dependent"),
        (ChoosesTask, "onnx", ConfigError, "cannot be written as onnx"),
        (NoisyTask, "torch.export", ConfigError, "torch.export: what was made predicts"),
        (Keywords, "onnx", TaskError, r"is called with keyword arguments \(x\)"),
        (Inside, "onnx", TaskError, "Inside.evaluate: does not call the model itself; write `def"),
    ],
)
def test_what_cannot_be_exported(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    kind: type[Odd],
    format: str,
    error: type[Exception],
    message: str,
) -> None:
    run_dir = trained(kind(), tmp_path / "run")
    path = tmp_path / f"model{SUFFIXES[format]}"
    with pytest.raises(error, match=message) as caught:
        ls.export(run_dir, path, format=format, task=kind)
    assert len(str(caught.value)) < 500
    assert not capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    if format == "onnx":
        assert ls.export(run_dir, tmp_path / "model.safetensors", task=kind).step == 2


def test_a_task_says_what_its_model_takes(tmp_path: Path) -> None:
    run_dir = trained(Says(), tmp_path / "run")
    done = ls.export(run_dir, tmp_path / "model.ts", task=Says)
    assert done.inputs == "input [*, 1] float32"


def test_data_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = trained(NoData(), tmp_path / "run")
    monkeypatch.setitem(DATA, "are_there", False)
    with pytest.raises(TaskError, match=r"dataset\('val'\): raised FileNotFoundError: images.idx"):
        ls.export(run_dir, tmp_path / "model.pt2", task=NoData)
    assert ls.export(run_dir, tmp_path / "model.safetensors", task=NoData).step == 2
    monkeypatch.setattr(NoData, "dataset", lambda self, split: None)
    with pytest.raises(DataError, match="is None for val and train"):
        ls.export(run_dir, tmp_path / "model.pt2", task=NoData)


def test_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launching.api.trained.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs onnx, onnxscript, onnxruntime; install it with"):
        ls.export(tmp_path, tmp_path / "model.onnx")
