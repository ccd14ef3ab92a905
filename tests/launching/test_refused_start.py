"""A start that is refused changes no file, and one that fails holds no directory."""

import hashlib
from pathlib import Path

import pytest
from tests.conftest import result, slow

LAUNCHERS = {"python": (), "local": ("-n", "2", "--launcher", "local"), "mpi": ("-n", "2")}

SCRIPT = """
import lockstep as ls, torch
from torch import nn
from torch.utils.data import TensorDataset


class Config(ls.TrainConfig):
    batch_size: int = 8
    num_microbatches: int = 2
    steps: int = 3
    fails: str = ""
    names: str = ""


class Fit(ls.Task):
    Config = Config

    def build_model(self):
        if self.config.fails == "model":
            raise ValueError("no model")
        return nn.Linear(3, 2)

    def dataset(self, split):
        if self.config.fails == "data":
            raise FileNotFoundError("no data")
        x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, torch.arange(32) % 2) if split == "train" else None

    def loss(self, model, batch):
        if self.config.fails == "loss":
            raise ValueError("no loss")
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return ls.Loss(loss, len(batch[1]))
"""


def everything(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"  # Python's own
    }


@pytest.fixture
def fit(lockstep, tmp_path):
    (tmp_path / "fit.py").write_text(SCRIPT)

    def call(*arguments):
        return lockstep("train", "fit.py:Fit", *arguments)

    return call


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_refused_start_changes_no_file_of_the_run(fit, lockstep, tmp_path, launcher):
    assert fit("--run-dir", "run").returncode == 0
    before = everything(tmp_path)
    more = LAUNCHERS[launcher]
    refused = [
        lockstep("resume", "run", "steps=2", *more),
        lockstep("resume", "run", "fails=loss", *more),
        fit("--run-dir", "run", *more),
        fit("--run-dir", "run", "steps=5", *more),
    ]
    assert [ended.returncode for ended in refused] == [2] * len(refused)
    assert everything(tmp_path) == before
    assert result(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize(
    ("launcher", "fails"),
    [("python", "loss"), slow("python", "data"), ("local", "model"), slow("mpi", "loss")],
)
def test_a_failed_start_leaves_nothing_and_holds_no_directory(fit, tmp_path, launcher, fails):
    more = LAUNCHERS[launcher]
    before = everything(tmp_path)
    assert fit(f"fails={fails}", *more).returncode in (1, 2)
    assert fit(f"fails={fails}", "--run-dir", "runs/mine", *more).returncode in (1, 2)
    assert not (tmp_path / "runs").exists()
    assert everything(tmp_path) == before
    assert fit("--run-dir", "runs/mine", *more).returncode == 0


def test_a_failed_start_deletes_nothing_of_a_user(fit, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    assert fit("fails=loss", "--run-dir", "mine").returncode == 1
    assert everything(tmp_path / "mine").keys() == {"notes.txt"}


def test_what_a_killed_start_has_left_holds_no_directory(fit, tmp_path):
    assert fit("--run-dir", "run", "names=first").returncode == 0
    run = tmp_path / "run"
    for path in run.glob("checkpoints/*/*"):
        path.unlink()
    for path in run.glob("checkpoints/step_*"):
        path.rmdir()
    (run / "events.jsonl").write_text("")
    (run / "result.json").unlink()
    assert fit("--run-dir", "run", "names=second").returncode == 0
    assert "second" in (run / "config.yaml").read_text()


def test_a_refusal_shows_where_two_values_differ(fit):
    assert fit("--run-dir", "run", f"names={'x' * 200}y").returncode == 0
    ended = fit("--run-dir", "run", f"names={'x' * 200}z")
    assert ended.returncode == 2
    assert "xxxy' there" in ended.stderr
    assert "xxxz' here" in ended.stderr
