from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.format import Snapshot, newest_valid, read, read_manifest, write
from lockstep.engine.checkpoint.listing import (
    bring_back,
    folder_name,
    folders,
    mark_latest,
    read_hint,
    set_aside,
    step_of,
    write_hint,
)
from lockstep.engine.checkpoint.writer import prune
from lockstep.errors import CheckpointError

FILES = ["model.safetensors", "optimizer.safetensors", "manifest.json"]
META = {
    "config": {"lr": 0.1, "name": "größe", "betas": [0.9, 0.999], "steps": None},
    "progress": {"best": float("inf"), "metrics": {"val/loss": 0.1 + 0.2}},
}


def odd_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "bf16": torch.randn(3, 5, generator=generator).bfloat16(),
        "half": torch.randn(3, generator=generator).half(),
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(2**62, dtype=torch.int64),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "precise": torch.randn(4, generator=generator, dtype=torch.float64),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "layer.größe/weight": torch.ones(2, 2),
    }


def snapshot(step: int = 100, value: float = 1.0) -> Snapshot:
    model = {"weight": torch.full((10, 3), value), "bias": torch.arange(3.0)}
    return Snapshot(step, model, {"exp_avg/weight": torch.full((10, 3), -value)}, dict(META))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def raw(t: Tensor) -> Any:
        return t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return one.keys() == other.keys() and all(raw(one[n]) == raw(other[n]) for n in one)


def saved(root: Path, step: int = 100, value: float = 1.0) -> Path:
    return write(root, snapshot(step, value))[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    return str(caught.value)


def signed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and make its digest right again."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **body}), encoding="utf-8")


def test_odd_tensors_come_back_to_the_bit(tmp_path: Path) -> None:
    taken = Snapshot(7, odd_tensors(), {f"m/{n}": t for n, t in odd_tensors().items()}, META)
    folder, size = write(tmp_path, taken)
    assert folder == tmp_path / "step_00000007"
    assert size == sum(len(data) for data in contents(folder).values())
    back = read(folder)
    assert (back.step, back.meta) == (7, META)
    assert same(back.model, taken.model)
    assert same(back.optimizer, taken.optimizer)


def test_a_folder_that_is_gone_does_not_come_into_being_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "run" / "checkpoints", Snapshot(1, {}, {}))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_tensors_comes_back(tmp_path: Path) -> None:
    back = read(write(tmp_path, Snapshot(0, {}, {}))[0])
    assert (back.step, back.model, back.optimizer, back.meta) == (0, {}, {}, {})


def test_tensors_that_are_not_contiguous_come_back(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "strided": torch.arange(10.0)[::2],
        "expanded": torch.arange(3.0).expand(2, 3),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    assert same(read(write(tmp_path, Snapshot(1, tensors, {}))[0]).model, tensors)


def test_views_of_one_flat_tensor_come_back(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"a": flat[:6].view(2, 3), "none": flat[6:6], "b": flat[6:7].view(()), "c": flat[8:]}
    assert same(read(write(tmp_path, Snapshot(1, tensors, {}))[0]).model, tensors)


@given(
    meta=st.dictionaries(
        st.text(max_size=5).map(lambda s: "k" + s),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
        max_size=4,
    )
)
@settings(deadline=None, max_examples=30)
def test_any_json_comes_back(
    tmp_path_factory: pytest.TempPathFactory, meta: dict[str, Any]
) -> None:
    root = tmp_path_factory.getbasetemp() / "any"
    assert read(write(root, Snapshot(1, {}, {}, meta))[0]).meta == meta


def test_numbers_as_keys_become_text(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Snapshot(1, {}, {}, {"ranks": {9: "a", 10: "b"}}))
    assert read(folder).meta == {"ranks": {"9": "a", "10": "b"}}


def test_paths_may_hold_any_characters(tmp_path: Path) -> None:
    root = tmp_path / "Läufe 実験 [1] *"
    folder = saved(root)
    assert folders(root) == [folder]
    assert newest_valid(root)[1] == folder
    assert read_hint(root, "latest") == folder


def test_only_the_newest_is_called_latest(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    folder = saved(tmp_path, 20)
    assert read_hint(tmp_path, "latest") == folder
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000010", "step_00000020", "latest"}


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path, value=1.0)
    folder = saved(tmp_path, value=2.0)
    assert read(folder).model["weight"][0, 0] == 2.0
    assert {p.name for p in tmp_path.iterdir()} == {folder.name, "latest"}


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    whole = (folder / name).read_bytes()
    for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:length])
        assert refused(folder).startswith(f"{folder / name}: is damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_longer_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    with (folder / name).open("ab") as file:
        file.write(b"x")
    assert refused(folder).startswith(f"{folder / name}: is damaged")


@pytest.mark.parametrize("name", FILES[:2])
def test_any_flipped_bit_of_a_tensor_file_is_found(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    whole = (folder / name).read_bytes()
    for offset in (0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 4, len(whole) - 1):
        for bit in (0, 3, 7):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << bit
            (folder / name).write_bytes(flipped)
            assert refused(folder).startswith(f"{folder / name}: is damaged: its SHA-256 does not")


def test_any_flipped_bit_of_the_manifest_is_found_or_changes_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    expected = json.loads(whole)
    harmless = 0
    for offset in range(len(whole)):
        for bit in (0, 1, 5):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = read_manifest(folder)
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: ")  # noqa: PT017
            else:
                assert found == expected
                harmless += 1
    assert harmless < 10


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    (folder / name).unlink()
    assert refused(folder) == f"{folder / name}: cannot be read: No such file or directory"


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_place_of_a_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert refused(folder) == f"{folder / name}: cannot be read: Is a directory"


def test_a_missing_checkpoint_is_refused_by_its_name(tmp_path: Path) -> None:
    assert refused(tmp_path / "step_00000001").startswith(f"{tmp_path}/step_00000001/manifest.json")


def test_files_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    folder, other = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 2.0)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    assert "model.safetensors: is damaged: its SHA-256 does not" in refused(folder)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    for old, new in (('"step": 100', '"step": 200'), ("0.999", "0.99"), ('"lr"', '"lR"')):
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        assert refused(folder) == (f"{path}: is damaged: its SHA-256 does not match its content")
        path.write_text(text, encoding="utf-8")
    read(folder)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "1" * 5000, "[]", "[1, 2]", "3", "null", '"text"', "{}", "{", "", "\0"]
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path)
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    message = f"{folder}/manifest.json: is damaged: not a checkpoint's manifest: "
    assert refused(folder).startswith(message)


def test_a_newer_format_is_refused_with_advice(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    signed(folder, lambda body: body.update(format=2))
    message = refused(folder)
    assert message.startswith(f"{folder}/manifest.json: format=2 is newer than this library reads")
    assert "update lockstep-train" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("format"),
        lambda body: body.pop("files"),
        lambda body: body.pop("step"),
        lambda body: body["files"].pop("model.safetensors"),
        lambda body: body["files"]["model.safetensors"].pop("sha256"),
    ],
    ids=["format", "files", "step", "file", "digest"],
)
def test_a_manifest_that_lacks_something_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = saved(tmp_path)
    signed(folder, change)
    assert refused(folder).startswith(f"{folder}/")


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("save", [torch.save, lambda o, p: p.write_bytes(pickle.dumps(o))])
def test_nothing_pickled_is_loaded(tmp_path: Path, save: Callable[[Any, Path], Any]) -> None:
    folder, mark = saved(tmp_path), tmp_path / "mark"
    path = folder / "model.safetensors"
    save({"weight": Payload(mark)}, path)
    data = path.read_bytes()

    def change(body: dict[str, Any]) -> None:
        body["files"][path.name] = {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    signed(folder, change)
    assert refused(folder).startswith(f"{path}: is damaged: ")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()


def test_the_newest_valid_checkpoint_is_found_with_reasons_for_newer_ones(tmp_path: Path) -> None:
    folder = {step: saved(tmp_path, step, float(step)) for step in (1, 2, 3, 4)}
    (folder[4] / "model.safetensors").unlink()
    (folder[3] / "manifest.json").write_bytes(b"{")
    found, where, skipped = newest_valid(tmp_path)
    assert found is not None
    assert (found.step, where) == (2, folder[2])
    assert found.model["weight"][0, 0] == 2.0
    assert [message.partition(": ")[0] for message in skipped] == [
        str(folder[4] / "model.safetensors"),
        str(folder[3] / "manifest.json"),
    ]


def test_the_hint_plays_no_part_in_finding_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    folder = saved(tmp_path, 2)
    write_hint(tmp_path, "latest", folder_name(1))
    assert newest_valid(tmp_path)[1] == folder
    (tmp_path / "latest").unlink()
    assert newest_valid(tmp_path)[1] == folder


def test_where_no_checkpoint_is_none_is_found(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) == (None, None, [])
    assert newest_valid(tmp_path / "none") == (None, None, [])
    (tmp_path / "file").touch()
    assert newest_valid(tmp_path / "file") == (None, None, [])
    (tmp_path / "step_00000001").mkdir()
    found, where, [reason] = newest_valid(tmp_path)
    assert (found, where) == (None, None)
    assert "step_00000001/manifest.json: cannot be read" in reason


def test_checkpoints_are_ordered_by_step_however_many_digits_it_has(tmp_path: Path) -> None:
    steps = [5, 99_999_999, 100_000_000, 1_000_000_000]
    for step in steps:
        (tmp_path / folder_name(step)).mkdir()
    assert [p.name for p in folders(tmp_path)] == [folder_name(s) for s in reversed(steps)]
    assert [step_of(p) for p in folders(tmp_path)] == steps[::-1]


@pytest.mark.parametrize("name", ["step_1", "step_00000001.old", "damaged_step_00000001", "best"])
def test_the_name_of_another_folder_has_no_step(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: is no name of a checkpoint's folder"):
        step_of(Path(name))


def test_other_folders_and_files_are_no_checkpoints(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for name in ("step_00000200_copy", "step_best", "old", ".step_00000300.1.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000400").touch()
    assert folders(tmp_path) == [folder]
    prune(tmp_path, 1)
    assert (tmp_path / "step_00000200_copy").is_dir()
    assert (tmp_path / "step_best").is_dir()


@pytest.mark.parametrize("again", [False, True], ids=["new_step", "same_step"])
@pytest.mark.parametrize("call", ["rename", "fsync", "mkdir"])
def test_a_crash_while_writing_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, again: bool
) -> None:
    saved(tmp_path, 1)
    before = contents(tmp_path)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            saved(tmp_path, 1 if again else 2, 3.0)
    assert contents(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000001", "latest"}
    saved(tmp_path, 1 if again else 2, 3.0)
    assert newest_valid(tmp_path)[0].model["weight"][0, 0] == 3.0  # type: ignore[union-attr]


@pytest.mark.parametrize("last", range(1, 8))
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """A killed process runs no cleanup: neither the rest of `write` nor its handlers."""
    saved(tmp_path, 1, 1.0)
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= last:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "rename"), (os, "fsync"), (os, "mkdir"), (shutil, "rmtree")):
            patch.setattr(module, name, counted(getattr(module, name)))
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, 2, 2.0)
    found, _, skipped = newest_valid(tmp_path)
    assert found is not None
    assert found.model["weight"][0, 0] == float(found.step)
    assert skipped == []


def test_leftovers_of_a_killed_process_are_in_nobodys_way(tmp_path: Path) -> None:
    leftover = tmp_path / f".step_00000100.{os.getpid()}.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    folder = saved(tmp_path)
    assert read(folder).step == 100
    prune(tmp_path, keep=1)
    assert not leftover.exists()


def test_pruning_keeps_one_of_each_time_span_for_good(tmp_path: Path) -> None:
    """A checkpoint is written every 10 s; the same stay whoever prunes, and however often."""
    for step in range(1, 31):
        written = snapshot(step)
        written.meta["saved_at"] = 1e9 + 10 * step
        write(tmp_path, written)
        prune(tmp_path, 2, 60.0)
        prune(tmp_path, 2, 60.0)
    assert [int(f.name[5:]) for f in folders(tmp_path)] == [30, 29, 25, 19, 13, 7, 1]
    shutil.rmtree(tmp_path / folder_name(13))
    (tmp_path / folder_name(19) / "manifest.json").write_text("{")
    prune(tmp_path, 2, 60.0)
    assert [int(f.name[5:]) for f in folders(tmp_path)] == [30, 29, 25, 7, 1], "damaged ones go"
    prune(tmp_path, 2)
    assert [int(f.name[5:]) for f in folders(tmp_path)] == [30, 29]


def test_a_checkpoint_without_a_time_counts_by_that_of_its_folder(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        os.utime(saved(tmp_path, step), (1e9 + 10 * step,) * 2)
    prune(tmp_path, 1, 20.0)
    assert [int(f.name[5:]) for f in folders(tmp_path)] == [4, 3, 1]


def test_pruning_removes_what_killed_processes_left(tmp_path: Path) -> None:
    for name in (".step_00000100.12345.tmp", ".step_00000100.12345.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    folder = saved(tmp_path)
    prune(tmp_path, keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {folder.name, "latest"}


def test_a_failed_exchange_of_two_checkpoints_of_a_step_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 1.0)
    before = contents(tmp_path)
    rename = os.rename

    def fail_with_the_new_one(source: Any, target: Any) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_with_the_new_one)
        with pytest.raises(OSError, match="Input/output error"):
            saved(tmp_path, 1, 2.0)
    assert contents(tmp_path) == before


def test_a_checkpoint_of_the_same_state_is_left_alone(tmp_path: Path) -> None:
    """There would be a moment without it, and it might be the only one."""
    folder = saved(tmp_path, 1)
    before = folder.stat().st_ino
    again = snapshot(1)
    again.meta |= {"layout": {"world_size": 7}}
    write(tmp_path, again)
    assert folder.stat().st_ino == before
    again.meta |= {"progress": {"best": 3.0}}
    write(tmp_path, again)
    assert folder.stat().st_ino != before
    (folder / "optimizer.safetensors").write_bytes(b"damaged")
    write(tmp_path, again)
    assert read(folder).meta["progress"] == {"best": 3.0}
    assert {p.name for p in tmp_path.iterdir()} == {folder.name, "latest"}


@pytest.mark.parametrize("then", ["starts", "prunes"])
def test_a_kill_while_a_checkpoint_is_replaced_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    saved(tmp_path, 1, 1.0)
    rename = os.rename
    is_killed = False

    def killed(source: Any, target: Any) -> None:
        nonlocal is_killed
        if str(source).endswith(".tmp"):
            is_killed = True
            raise KeyboardInterrupt
        if not is_killed:
            rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, 1, 2.0)
    assert folders(tmp_path) == []
    if then == "starts":
        bring_back(tmp_path)
    else:
        prune(tmp_path, keep=3)
    found, _, skipped = newest_valid(tmp_path)
    assert found is not None
    assert found.model["weight"][0, 0] == 1.0
    assert skipped == []


def test_a_hint_that_names_a_missing_folder_is_reported(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step)
    shutil.rmtree(tmp_path / folder_name(2))
    found, folder, skipped = newest_valid(tmp_path)
    assert found is not None
    assert folder == tmp_path / folder_name(1)
    assert skipped == [f"{tmp_path}/latest: names step_00000002, which is missing"]
    assert set_aside(tmp_path, 1) == []
    mark_latest(tmp_path, 1)
    assert newest_valid(tmp_path)[2] == []
    shutil.rmtree(folder)
    assert newest_valid(tmp_path)[2] == [
        f"{tmp_path}/latest: names step_00000001, which is missing"
    ]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        saved(tmp_path, step)
    write_hint(tmp_path, "best", folder_name(2))
    prune(tmp_path, keep=2)
    assert [p.name for p in folders(tmp_path)] == [folder_name(s) for s in (5, 4, 2)]
    prune(tmp_path, keep=1)
    assert [p.name for p in folders(tmp_path)] == [folder_name(s) for s in (5, 2)]
    write_hint(tmp_path, "best", folder_name(5))
    prune(tmp_path, keep=1)
    assert [p.name for p in folders(tmp_path)] == [folder_name(5)]


@pytest.mark.parametrize(
    "content",
    [
        b"step_00000999\n",
        b"",
        b"\n",
        b".",
        b"..",
        b"../elsewhere",
        b"/tmp",
        b"step_00000001/deeper",
        b"\xff\xfe",
        b"\0",
        b"x" * 5000,
    ],
)
def test_a_hint_that_points_nowhere_is_no_hint(tmp_path: Path, content: bytes) -> None:
    root = tmp_path / "checkpoints"
    folder = saved(root, 1)
    (folder / "deeper").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "best").write_bytes(content)
    assert read_hint(root, "best") is None
    prune(root, keep=1)
    assert folders(root) == [folder]


def test_a_missing_hint_is_no_hint(tmp_path: Path) -> None:
    assert read_hint(tmp_path, "best") is None
    (tmp_path / "best").mkdir()
    assert read_hint(tmp_path, "best") is None


def test_a_hint_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(tmp_path, 1)
    write_hint(tmp_path, "best", first.name)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        write_hint(tmp_path, "best", "step_00000002")
    assert read_hint(tmp_path, "best") == first


def test_a_manifest_says_what_is_there(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    manifest = read_manifest(folder)
    assert (manifest["format"], manifest["step"]) == (checkpoint.FORMAT, 100)
    for name in FILES[:2]:
        data = (folder / name).read_bytes()
        assert manifest["files"][name] == {
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
        }
