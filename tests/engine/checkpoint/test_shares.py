"""Checkpoints that several ranks write and read: the same files on any mesh, and none in part.

Ranks are threads, so nothing here draws random numbers.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.nn.unit_models import AsItIs, Normed, Words
from tests.stepping import advance
from tests.thread_transport import ThreadTransport, on_ranks
from torch import nn

from lockstep.config import CheckpointConfig, MeshConfig, TrainConfig
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.checkpoint import copies as copies_module
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint import share as share_module
from lockstep.engine.checkpoint.checkpointer import Checkpointer
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.owners import find_owners
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.checkpoint.share import GatheringFailed, GivenUp, Held, OwnShare
from lockstep.engine.checkpoint.tensor_files import Kind, in_memory
from lockstep.engine.events import Checkpointed, Event, Warned
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.capture import whole_digest
from lockstep.errors import CheckpointError, TaskError

FILE_BYTES = 6000
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "replicas": (2, {}),
    "optimizer": (3, {"sharding": "optimizer"}),
    "stages": (2, {"pp": 2}),
    "slices": (3, {"sharding": "parameters"}),
    "slices of stages": (4, {"pp": 2, "sharding": "parameters"}),
}


pytestmark = pytest.mark.usefixtures("generators_of_threads")


class Rank:
    """A rank that trains `Normed`, and saves it."""

    def __init__(self, transport: ThreadTransport, root: Path, **keys: Any) -> None:
        self.events: list[Event] = []
        made = keys.pop("task", type("Words", (Words,), {"kind": Normed}))
        config = TrainConfig(
            mesh=MeshConfig(pp=keys.pop("pp", 1)),
            checkpoint=CheckpointConfig(file_bytes=FILE_BYTES),
            **{"batch_size": 16, "num_microbatches": 5, "epochs": 2, "clip_norm": 0.4} | keys,
        )
        cpu = torch.device("cpu")
        runtime = Runtime(transport, cpu, transport.rank, "python", 0, self.events.append, nothing)
        self.parts: Parts = assemble(made(), config, runtime)
        self.directory = RunDirectory(root)
        self.directory.checkpoints.mkdir(parents=True, exist_ok=True)
        self.saver = Checkpointer(config, runtime, self.parts, self.directory, lambda folder: None)

    def train(self, first: int, last: int) -> None:
        mesh = self.parts.placement.mesh
        own = mesh.of_ranks(mesh.of_each_replica)[self.parts.placement.world.rank]
        advance(self.parts, first, last, own)

    @property
    def digest(self) -> str:
        return whole_digest(self.parts.train_step)


def nothing() -> None:
    return None


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if "manifest" not in path.name
    }


def saved(root: Path, mesh: str) -> tuple[str, str]:
    """Digests after two steps, which are saved, and after two more."""
    size, keys = MESHES[mesh]

    def body(transport: ThreadTransport) -> tuple[str, str]:
        rank = Rank(transport, root / mesh, **keys)
        rank.train(0, 2)
        rank.saver.finish(Progress(step=2))
        before = rank.digest
        rank.train(2, 4)
        return before, rank.digest

    [digests] = set(on_ranks(size, body))
    return digests


@pytest.mark.parametrize(
    "meshes",
    [["alone", "stages", "slices"], pytest.param([*MESHES], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_any_mesh_writes_the_same_files_and_reads_them(tmp_path: Path, meshes: list[str]) -> None:
    digests = {saved(tmp_path, mesh) for mesh in meshes}
    assert len(digests) == 1
    [(before, after)] = digests
    folders = {mesh: tmp_path / mesh / "checkpoints" / "step_00000002" for mesh in meshes}
    wanted = tensor_files(folders["alone"])
    assert sum(name.startswith("model-") for name in wanted) > 2
    assert sum(name.startswith("optimizer-") for name in wanted) > 4
    assert all(tensor_files(folder) == wanted for folder in folders.values())
    assert not [path for folder in folders.values() for path in folder.parent.glob(".*")]
    index = json.loads(wanted["model.safetensors.index.json"])
    model = nn.Module.state_dict(Normed())
    assert index["weight_map"].keys() == model.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.values())
    there = load_file(folders["alone"] / index["weight_map"]["words.weight"])
    assert there["words.weight"].shape == model["words.weight"].shape

    for mesh in meshes:
        size, keys = MESHES[mesh]
        root = tmp_path / "again" / mesh
        shutil.copytree(folders["slices"].parent, root / "checkpoints")

        def body(
            transport: ThreadTransport, root: Path = root, keys: dict[str, Any] = keys
        ) -> tuple[str, str]:
            rank = Rank(transport, root, **keys)
            assert rank.saver.resume().step == 2
            there = rank.digest
            rank.train(2, 4)
            return there, rank.digest

        assert set(on_ranks(size, body)) == {(before, after)}, mesh


class Turned(Normed):
    """Saves a weight in another order than it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_state_dict_post_hook(turn)  # type: ignore[no-untyped-call]
        self.norm.register_load_state_dict_pre_hook(turn)  # type: ignore[no-untyped-call]


def turn(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].flip(0)


def test_what_hooks_make_of_parameters_is_saved(tmp_path: Path) -> None:
    task, found = type("Turns", (AsItIs,), {"kind": Turned}), {}
    for sharding, size in (("none", 1), ("optimizer", 2), ("gradients", 2)):

        def body(transport: ThreadTransport, sharding: str = sharding) -> list[bool]:
            rank = Rank(transport, tmp_path / sharding, task=task, sharding=sharding)
            rank.train(0, 1)
            rank.saver.finish(Progress(step=1))
            model = rank.parts.train_step.model
            before = [tensor.clone() for tensor in model.parameters()]
            rank.train(1, 2)
            rank.saver.resume()
            return [*map(torch.equal, before, model.parameters())]

        assert all(all(same) for same in on_ranks(size, body)), sharding
        found[sharding] = tensor_files(tmp_path / sharding / "checkpoints" / "step_00000001")
    assert found["optimizer"] == found["gradients"] == found["none"]
    keys = {"task": task, "sharding": "parameters", "clip_norm": None}
    with pytest.raises(TaskError, match=r"gives something else for .*norm\.weight than the param"):
        on_ranks(2, lambda t: Rank(t, tmp_path / "slices", **keys))


def test_ranks_that_do_not_see_the_folder_leave_all_to_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when they read: those that cannot are sent what they need."""
    usual = share_module._note

    def elsewhere(folder: Path, rank: int | str) -> Path:
        return tmp_path / "missing" / "note" if rank == 1 else usual(folder, rank)

    before, after = saved(tmp_path, "alone")
    monkeypatch.setattr(share_module, "_note", elsewhere)
    assert saved(tmp_path, "stages") == (before, after)
    assert saved(tmp_path, "slices") == (before, after)
    folders = [
        tmp_path / m / "checkpoints" / "step_00000002" for m in ("alone", "stages", "slices")
    ]
    assert tensor_files(folders[0]) == tensor_files(folders[1]) == tensor_files(folders[2])
    monkeypatch.setattr(copies_module, "opened_everywhere", lambda transport, snapshot: None)
    monkeypatch.setattr(
        "lockstep.engine.checkpoint.checkpointer.opened_everywhere", lambda *arguments: None
    )

    def body(transport: ThreadTransport) -> str:
        rank = Rank(transport, tmp_path / "stages", sharding="parameters")
        assert rank.saver.resume().step == 2
        rank.train(2, 4)
        return rank.digest

    assert set(on_ranks(2, body)) == {after}


def test_a_checkpoint_at_the_same_path_of_another_disk_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint.write(tmp_path, Snapshot(1, {"x": torch.zeros(3)}, {}))
    stamp = listing.stamp_of(folder)
    assert len(stamp) == 3
    assert listing.stamp_of(tmp_path) == []

    def body(transport: ThreadTransport) -> bool:
        snapshot = checkpoint.read(folder) if transport.rank == 0 else None
        return copies_module.opened_everywhere(transport, snapshot) is not None

    assert on_ranks(2, body) == [True, True]
    stamps = iter([stamp, [0, *stamp[1:]]])
    monkeypatch.setattr(listing, "stamp_of", lambda folder: next(stamps))
    assert on_ranks(2, body) == [False, False]


@pytest.mark.parametrize("mesh", ["stages", pytest.param("slices", marks=pytest.mark.slow)])
def test_a_full_disk_of_one_rank_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str
) -> None:
    size, keys = MESHES[mesh]
    usual, failed = os.fsync, list[int]()

    def full(descriptor: int) -> None:
        if "model-00002" in os.readlink(f"/proc/self/fd/{descriptor}") and not failed:
            failed.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", full)

    def body(transport: ThreadTransport) -> list[Event]:
        rank = Rank(transport, tmp_path, **keys)
        rank.train(0, 1)
        rank.saver.save(Progress(step=1))
        rank.saver.forget()
        rank.saver.finish(Progress(step=1))
        return rank.events

    events = [e for e in on_ranks(size, body)[0] if isinstance(e, (Warned, Checkpointed))]
    assert [type(event) for event in events] == [Warned, Checkpointed]
    assert "No space left on device (rank 1)" in events[0].message  # type: ignore[union-attr]
    assert [p.name for p in (tmp_path / "checkpoints").glob("*step*")] == ["step_00000001"]


def test_a_rank_that_cannot_gather_ends_instead_of_going_on(tmp_path: Path) -> None:
    """The others wait for it in another collective than its next one."""

    class Large(Held):
        def own(self) -> torch.Tensor:
            raise MemoryError("too large")

    def body(transport: ThreadTransport) -> None:
        kind = Kind(torch.float32, torch.Size([2]))
        files: dict[str, Any] = {"a.safetensors": {"x": Large(kind, 0, None)}}
        share = OwnShare(checkpoint.begin(tmp_path, 1), 0, files, [["a.safetensors"]])
        own, _ = share.gathered(transport, torch.device("cpu"))
        with pytest.raises(GatheringFailed, match=r"MemoryError: too large"):
            share.write(own)

    on_ranks(1, body)


def test_what_a_lost_rank_has_not_written_is_given_up(tmp_path: Path) -> None:
    files: dict[str, Any] = {"a.safetensors": {}, "b.safetensors": {}}
    folder = checkpoint.begin(tmp_path, 1)
    (folder / ".rank_1.json").touch()
    share = OwnShare(folder, 0, files, [["a.safetensors"], ["b.safetensors"]])
    share.write({"a.safetensors": in_memory({"x": torch.zeros(2)})})
    threading.Timer(0.1, share.give_up).start()
    with pytest.raises(GivenUp):
        checkpoint.write(tmp_path, Snapshot(1, {}, {}), share=share)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_can_neither_write_nor_remove_its_note_is_not_waited_for(
    tmp_path: Path,
) -> None:
    files: dict[str, Any] = {"a.safetensors": {}}
    folder = checkpoint.begin(tmp_path, 1)
    (folder / ".rank_1.json").touch()
    share = OwnShare(folder, 0, files, [[], ["a.safetensors"]])
    threading.Timer(0.1, share.all_have_ended).start()
    with pytest.raises(OSError, match=r"rank 1 could not say what it has written"):
        checkpoint.write(tmp_path, Snapshot(1, {}, {}), share=share)


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("way", ["missing", "short", "foreign"])
def test_a_file_that_is_not_right_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, name: str, way: str
) -> None:
    for step in (1, 2):
        model = {name: torch.full((10,), float(step)) for name in "abc"}
        checkpoint.write(tmp_path, Snapshot(step, model, {}), most_bytes=40)
    path = tmp_path / "step_00000002" / name
    if way == "missing":
        path.unlink()
    elif way == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for is_mapped in (True, False):
        found, folder, [reason] = checkpoint.newest_valid(tmp_path, is_mapped)
        assert folder == tmp_path / "step_00000001"
        assert str(path) in reason
        assert found is not None
        assert found.model["c"].tolist() == [1.0] * 10
        if is_mapped:
            found.drop()
            assert found.model["c"].tolist() == [1.0] * 10


def test_a_manifest_that_lacks_a_file_is_damaged(tmp_path: Path) -> None:
    model = {name: torch.zeros(10) for name in "abc"}
    folder, _ = checkpoint.write(tmp_path, Snapshot(2, model, {}), most_bytes=40)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"], manifest["files"]["model-00002-of-00003.safetensors"]
    digest = checkpoint._json_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest, **manifest}))
    with pytest.raises(CheckpointError, match=r"is damaged: names no model.safetensors"):
        checkpoint.read(folder)


@pytest.mark.slow
def test_transformers_reads_the_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reader = pytest.importorskip("transformers.trainer_utils").load_sharded_checkpoint
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    config = transformers.GPT2Config(**sizes)
    model, other = (transformers.GPT2LMHeadModel(config) for _ in range(2))
    wanted = model.state_dict()
    folder, _ = checkpoint.write(tmp_path, Snapshot(1, wanted, {}), most_bytes=20_000)
    reader(other, folder)
    config.save_pretrained(folder)
    third = transformers.GPT2LMHeadModel.from_pretrained(folder)
    for made in (other, third):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in made.state_dict().items())


def test_a_host_without_checkpoints_knows_at_once_that_there_is_one(tmp_path: Path) -> None:
    """Else a start on it alone would take the run for a new one."""

    def body(transport: ThreadTransport) -> None:
        rank = Rank(transport, tmp_path / str(transport.rank))
        path, root = rank.directory.path, rank.directory.checkpoints
        rank.directory.owners = find_owners(transport, path, 1, is_apart=True)
        rank.train(0, 2)
        rank.saver.save(Progress(step=2))
        wanted = root / "step_00000002"
        assert listing.hinted(root, "latest") == wanted
        if transport.rank:  # as on the disk of a host that joins
            (root / "latest").unlink()
        rank.saver.regroup(2)
        assert listing.hinted(root, "latest") == wanted
        assert listing.missing(root, "latest") == (
            [f"{root}/latest: names step_00000002, which is missing"] if transport.rank else []
        )

    on_ranks(2, body)
