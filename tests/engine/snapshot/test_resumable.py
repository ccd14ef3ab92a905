"""A checkpoint that was changed and signed again is refused by the field that cannot be."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.conftest import slow
from tests.distributed.tasks import Everything, EverythingConfig
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.comm.transport import LocalTransport
from lockstep.config import OptimizerConfig, TrainConfig
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.checkpointer import Checkpointer
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.optimizer.choice import ELEMENTWISE
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.resumable import _is_state
from lockstep.engine.task import Loss, Task
from lockstep.errors import CheckpointError
from lockstep.launching.api import Result, Session, run

HOME = torch.device("cpu")
CONFIG = EverythingConfig(steps=4, eval_every=2, batch_size=12, num_microbatches=2, threads=1)


def trained(run_dir: Path, resume: bool = False, **keys: Any) -> Result:
    config = CONFIG.model_copy(update=keys)
    return run(Everything(config), config, Session(str(run_dir), resume, (), False))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in the middle."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    trained(path, stop_at_step=3)
    shutil.rmtree(path / "checkpoints" / "step_00000002")
    return path


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """The only checkpoint of a copy of it."""
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step_00000003"


def sign(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    del body["sha256"]
    change(body)
    for name, entry in body["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **body}), encoding="utf-8")


def set_to(*path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


@cache
def built(kind: object) -> tuple[Runtime, Parts]:
    """All parts of a run, once for each `after_step` that `Everything` has."""
    runtime = Runtime(LocalTransport(), HOME, 0, "python", 0, lambda _: None, lambda: None)
    return runtime, assemble(Everything(CONFIG), CONFIG, runtime)


def refusal(folder: Path) -> str:
    """What a resumed run says of its only checkpoint, after which it ends."""
    runtime, parts = built(Everything.after_step)
    directory = RunDirectory(folder.parents[1])
    checkpointer = Checkpointer(CONFIG, runtime, parts, directory, lambda _: None)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume()
    message = str(caught.value)
    assert str(folder) in message
    return message


def test_a_full_disk_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(root: Path, newer_than: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(listing, "set_aside", full)
    runtime, parts = built(Everything.after_step)
    directory = RunDirectory(folder.parents[1])
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; make"):
        Checkpointer(CONFIG, runtime, parts, directory, lambda _: None).resume()


def test_a_manifest_signed_again_without_a_change_is_accepted(folder: Path, tmp_path: Path) -> None:
    sign(folder, lambda body: None)
    went_on = trained(folder.parents[1], resume=True)
    assert went_on.params_sha256 == trained(tmp_path / "straight").params_sha256


SCALAR = {"dtype": "float32", "value": 3.0}


def old(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """In a manifest of before optimizers were described."""

    def changed(body: dict[str, Any]) -> None:
        change(body)
        del body["optimizer"]

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_to("step", value=-5), "step=-5: the folder is called step_00000003"),
        (set_to("step", value=2), "step=2: the folder is called"),
        (set_to("step", value=True), "step=True"),
        (set_to("step", value=3.0), "step=3.0"),
        (set_to("progress", value=None), "progress"),
        (set_to("progress", "step", value=-5), "progress.step=-5"),
        (set_to("progress", "step", value=2), "progress.step=2: the checkpoint is of step 3"),
        (set_to("progress", "step", value="3"), "step='3'"),
        (set_to("progress", "evaluated", value=9), "progress.evaluated=9"),
        (set_to("progress", "best_step", value=-1), "progress.best_step=-1"),
        (set_to("progress", "best_step", value=3), "progress.best_step=3"),
        (set_to("progress", "best", value=None), "progress.best=None"),
        (set_to("progress", "best", value=float("nan")), "progress.best=nan"),
        (set_to("progress", "stale", value=10**30), "progress.stale"),
        (set_to("progress", "decays", value=-1), "progress.decays=-1"),
        (set_to("progress", "recent", value={"loss": "x"}), "recent.loss"),
        (set_to("progress", "metrics", value={"a": []}), "metrics.a"),
        (set_to("progress", "finished", value="done"), "progress.finished='done'"),
        (set_to("progress", "finished", value=1), "finished=1"),
        (set_to("progress", "more", value=1), "'more'"),
        (set_to("loss_scale", value=None), "loss_scale"),
        (set_to("loss_scale", "value", value=0.5), "loss_scale"),
        (set_to("loss_scale", "good_steps", value="a"), "loss_scale"),
        (set_to("loss_scale", "more", value=1), "loss_scale"),
        (set_to("loss_scale", value=[0.5, 0]), "loss_scale"),
        (set_to("loss_scale", value=[1.0, 0, 0]), "loss_scale"),
        (set_to("loss_scale", value=["a", "b"]), "loss_scale"),
        (set_to("sampler", value={}), "sampler"),
        (set_to("sampler", "num_samples", value="9"), "num_samples"),
        (set_to("sampler", "epoch", value=-1), "epoch=-1"),
        (set_to("optimizer_scalars", value=None), "optimizer_scalars=None"),
        (old(set_to("optimizer_scalars", value={})), "is of another optimizer"),
        (set_to("optimizer_scalars", "0", value=[]), "optimizer_scalars"),
        (set_to("optimizer_scalars", "0", value={"step": 3.0}), "is of another optimizer"),
        (old(set_to("optimizer_scalars", "0", value={})), "is of another optimizer"),
        (old(set_to("optimizer_scalars", "9", value={"step": SCALAR})), "is of another optimizer"),
        (old(set_to("optimizer_scalars", "0", "more", value=1)), "is of another optimizer"),
        (old(set_to("optimizer_scalars", "0", "step", value=3)), "is of another optimizer"),
        (set_to("optimizer_scalars", "0", "step", value=SCALAR | {"value": 4}), "step=4"),
        (set_to("optimizer_scalars", "0", "step", value=SCALAR | {"value": -5}), "step=-5"),
        (set_to("optimizer_scalars", "0", "step", value=SCALAR | {"value": 1e999}), "step=inf"),
        (set_to("optimizer_scalars", "0", "step", value=SCALAR | {"value": [3]}), "'step'"),
        (set_to("optimizer_scalars", "0", "step", value=SCALAR | {"dtype": "load"}), "'step'"),
        (
            old(set_to("optimizer_scalars", "0", "step", value=SCALAR | {"dtype": "float64"})),
            "another",
        ),
        (set_to("optimizer_shared", value=3), "optimizer_shared"),
        (set_to("optimizer_shared", value={"": {}}), "optimizer_shared"),
        (set_to("optimizer_shared", "", "groups", value=[{"lr": []}]), "optimizer_shared"),
        (old(set_to("optimizer_shared", "", "groups", value=[{"lr": 9.0}])), "optimizer_shared"),
        (old(set_to("optimizer_shared", "", "attributes", value={"step": 1})), "optimizer_shared"),
        (set_to("optimizer", value=[]), "optimizer=[]"),
        (set_to("task", value=3), "task=3"),
        (set_to("carry", value={"0": None, "1": None}), "is of another task: it has a carry"),
        (set_to("task", value={}), "task: has no 'count'"),
        (set_to("files", value={}), "manifest.json: is damaged: names no model.safetensors"),
        (set_to("files", "model.safetensors", value=3), "files.model.safetensors=3"),
    ],
)
def test_a_field_that_cannot_be_is_named(
    folder: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    try:
        sign(folder, change)
    except TypeError:  # the entry of a file is no longer one
        sign_as_it_is(folder, change)
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_to("optimizer_scalars", value={}), "is of another optimizer"),
        (set_to("optimizer_scalars", "0", value={}), "is of another optimizer"),
        (set_to("optimizer_scalars", "0", "step", "value", value=2.0), "step=2.0: cannot be"),
    ],
)
def test_an_optimizer_that_nobody_else_changes_has_done_all_steps(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], object],
    reason: str,
) -> None:
    monkeypatch.setattr(Everything, "after_step", Task.after_step)
    sign(folder, change)
    assert reason in refusal(folder)


def sign_as_it_is(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **body}), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("exp_avg/0.weight"), "exp_avg/0.weight does not fit"),
        (lambda t: t.update({"exp_avg/9.weight": torch.ones(1)}), "exp_avg/9.weight does not fit"),
        (
            lambda t: t.update({"exp_avg/0.bias": torch.ones(1)}),
            "exp_avg/0.bias is torch.float32 (1,)",
        ),
        (lambda t: t.update({"exp_avg/0.bias": t["exp_avg/0.bias"].double()}), "torch.float64"),
        (lambda t: t.update({k.replace("avg/", "x/"): v.clone() for k, v in t.items()}), "another"),
        (lambda t: t.clear(), "is of another optimizer"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    path = folder / "optimizer.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    sign(folder, old(lambda body: None))
    assert reason in refusal(folder)


@pytest.mark.parametrize("dtype", ["float32", slow("float64")])
@pytest.mark.parametrize("name", [slow("sgd"), "adam"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("keys", [{}, {"dtype": "fp16", "growth_interval": 2}])
def test_what_is_written_can_be_resumed(
    tmp_path: Path, dtype: str, name: str, sharded: bool, keys: dict[str, Any]
) -> None:
    optimizer = {"name": name, "momentum": 0.9, "sharded": sharded}
    own = {"optimizer": optimizer, "precision": keys, "groups": True, "dtype": dtype}
    config = EverythingConfig.model_validate(CONFIG.model_dump() | own)
    changes = {key: getattr(config, key) for key in own}
    trained(tmp_path, stop_at_step=1, **changes)
    assert trained(tmp_path, resume=True, **changes).status == "completed"


@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_numbers_under_other_keys_than_parameters_are_state(value: float) -> None:
    number = {"dtype": "float32", "value": value, "device": "cpu"}
    for found in (number, {"list": [number]}, {"tuple": [1, {"dict": {"device": number}}]}):
        assert _is_state(found)
    assert not _is_state(number | {"dtype": "load"})
    assert not _is_state(number | {"more": 1})


class Own(Task):
    """A small network with an optimizer of its own; a run of it costs a third of `Everything`."""

    make: Callable[..., torch.optim.Optimizer]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2))

    def dataset(self, split: str) -> TensorDataset | None:
        if split != "train":
            return None
        points = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
        return TensorDataset(points, (points.sum(1) > 0).long())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        points, labels = batch
        return Loss(
            nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(points)
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return type(self).make(model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        *(partial(kind, lr=1e-3) for kind in ELEMENTWISE),
        partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, foreach=True),
        partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9, dampening=0.5),
    ],
    ids=lambda make: make.func.__name__,
)
def test_every_optimizer_of_torch_can_be_resumed(tmp_path: Path, make: Any) -> None:
    kind = type("Own", (Own,), {"make": staticmethod(make)})
    straight = ended(kind, tmp_path / "straight")
    ended(kind, tmp_path / "run", stop_at_step=2)
    assert ended(kind, tmp_path / "run", resume=True).params_sha256 == straight.params_sha256
    sharded = {"optimizer": OptimizerConfig(sharded=True)}
    ended(kind, tmp_path / "sharded", stop_at_step=2, **sharded)
    whole = ended(kind, tmp_path / "sharded", resume=True, **sharded)
    assert whole.params_sha256 == straight.params_sha256


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sgd", marks=pytest.mark.slow),
        pytest.param("adam", marks=pytest.mark.slow),
        "adamw",
    ],
)
def test_optimizers_of_the_config_can_be_resumed(tmp_path: Path, name: str) -> None:
    def ended(folder: str, sharded: bool, resume: bool = False, **keys: Any) -> str:
        optimizer = OptimizerConfig.model_validate({"name": name, "sharded": sharded})
        return trained(tmp_path / folder, resume, optimizer=optimizer, **keys).params_sha256

    straight = ended("straight", False)
    for folder, sharded in (("whole", False), ("sharded", True)):
        ended(folder, sharded, stop_at_step=2)
        assert ended(folder, sharded, resume=True) == straight, folder


class Scheduling(Own):
    """Changes hyperparameters and state of its optimizer after steps."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.opt = super().build_optimizer(model)
        return self.opt

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        for group in self.opt.param_groups:
            group["weight_decay"] = 0.1 * step
            group["betas"] = (0.9 - 0.1 * step, 0.99)
        if step == 1:
            self.opt.state.clear()


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_hyperparameters_and_state_that_after_step_changes_come_back(
    tmp_path: Path, elementwise: bool, sharded: bool
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        found = torch.optim.AdamW(parameters, lr=1e-3)
        found.elementwise = elementwise  # type: ignore[attr-defined]
        return found

    if sharded and not elementwise:
        return
    kind = type("Scheduled", (Scheduling,), {"make": staticmethod(make)})
    keys = {"optimizer": OptimizerConfig(sharded=sharded)}
    straight = ended(kind, tmp_path / "straight", **keys)
    ended(kind, tmp_path / "run", stop_at_step=3, **keys)
    assert ended(kind, tmp_path / "run", True, **keys).params_sha256 == straight.params_sha256


def test_hooks_of_an_optimizer_do_not_keep_it_from_being_resumed(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        found = torch.optim.SGD(parameters, lr=1e-2)
        found.register_step_pre_hook(shrink)
        return found

    def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    kind = type("Hooked", (Own,), {"make": staticmethod(make)})
    straight = ended(kind, tmp_path / "straight")
    ended(kind, tmp_path / "run", stop_at_step=2)
    assert ended(kind, tmp_path / "run", resume=True).params_sha256 == straight.params_sha256


def ended(kind: Any, run_dir: Path, resume: bool = False, **keys: Any) -> Result:
    config = TrainConfig(steps=4, batch_size=12, num_microbatches=2, **keys)
    return run(kind(config), config, Session(str(run_dir), resume, (), False))
