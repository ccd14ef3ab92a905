"""Folders of torch.distributed.checkpoint: exported, started from, and nothing else in them run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as library
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.engine.checkpoint import dcp
from lockstep.errors import CheckpointError, ConfigError


class Task(ls.Task):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def dataset(self, split: str) -> Dataset[Any] | None:
        x = torch.arange(24.0).view(8, 3) / 24
        return TensorDataset(x, x.sum(1, keepdim=True)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss((model(x) - y).square().sum(), len(x))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_goes_to_a_folder_and_back(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "folder"
    ls.train(Task(), ls.TrainConfig(batch_size=8, num_microbatches=2, steps=2), run_dir=run)
    exported = ls.export(run, folder, format="dcp", task=Task)
    assert exported.described == f"wrote {folder}: weights of step 2"
    model = Task().build_model()
    state = model.state_dict()
    library.load(state, checkpoint_id=folder, no_dist=True)
    wanted = ls.load(run, "latest", task=Task).model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    ls.export(run, folder, format="dcp", task=Task)  # in the place of the older one
    with pytest.raises(ConfigError, match=r"is no folder of torch.distributed.checkpoint"):
        ls.export(run, run, format="dcp", task=Task)

    other = tmp_path / "other"  # as programs save a model beside other things
    library.save({"model": wanted, "step": 3}, checkpoint_id=other, no_dist=True)
    for place in (folder, other):
        config = ls.TrainConfig(batch_size=8, num_microbatches=2, steps=1, lr=1e-30)
        ls.train(Task(), config, run_dir=place.with_suffix(".run"), from_run=place)
        there = ls.load(place.with_suffix(".run"), "latest", task=Task).model.state_dict()
        assert torch.equal(there["0.weight"], wanted["0.weight"])


def test_what_cannot_be_written_leaves_the_older_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    dcp.write(folder, {"x": torch.zeros(3)}, {})

    def refuse(made: dcp.Folder) -> None:
        assert made["x"].tolist() == [1.0] * 3
        raise ConfigError("refused")

    with pytest.raises(ConfigError, match="refused"):
        dcp.write(folder, {"x": torch.ones(3)}, {}, refuse)
    usual = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if (self.suffix, target) == (".tmp", folder):
            raise OSError("gone")
        return usual(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="gone"):
        dcp.write(folder, {"x": torch.ones(3)}, {})
    assert [*tmp_path.iterdir()] == [folder]
    assert dcp.Folder(folder)["x"].tolist() == [0.0] * 3


def test_an_index_that_names_other_things_is_refused(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harm",))

    (tmp_path / dcp.INDEX).write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CheckpointError, match=r"is damaged: not the index .* names "):
        dcp.Folder(tmp_path)
    assert not (tmp_path / "harm").exists()
    (tmp_path / dcp.INDEX).write_bytes(b"cpathlib\nPosixPath\n(N}(Vname\nVx\nutb.")
    with pytest.raises(CheckpointError, match=r"is damaged: .* sets attributes of other things"):
        dcp.Folder(tmp_path)
    assert Path("/a/b").name == "b"
    for name in ("../x.distcp", "x.bin"):
        place = _StorageInfo(name, 0, 1)
        (tmp_path / dcp.INDEX).write_bytes(pickle.dumps(Metadata({}, storage_data={0: place})))
        with pytest.raises(CheckpointError, match=rf"names the file {name}"):
            dcp.Folder(tmp_path)
    (tmp_path / dcp.INDEX).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"is damaged"):
        dcp.Folder(tmp_path)
    (tmp_path / dcp.INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        dcp.Folder(tmp_path)
