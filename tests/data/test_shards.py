"""Samples in tar files: those of WebDataset, in its order, and nothing from damaged files."""

from __future__ import annotations

import ast
import io
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep as ls
from lockstep.errors import DataError


def tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def npy(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


def sample(i: int) -> list[tuple[str, bytes]]:
    name = f"some/folder/{'long' * 40 if i % 5 == 4 else ''}{i:04}"
    return [
        (f"{name}.json", b'{"n": %d}' % i),
        (f"{name}.left.NPY", npy(np.arange(i % 4, dtype=np.float32))),
        (f"{name}.cls", b"%d" % (i % 3)),
        (f"{name}.bin", bytes(range(i % 200))),
    ]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    files = [[x for i in range(*r) for x in sample(i)] for r in ((0, 7), (7, 7), (7, 20))]
    files[0].insert(0, ("__meta__", b"about"))
    files[0].insert(5, ("README", b"no extension"))
    return [tar(tmp_path / f"{n}.tar", members) for n, members in enumerate(files)]


THEIRS = """
import sys, webdataset
samples = webdataset.WebDataset(sys.argv[1:], shardshuffle=False, empty_check=False)
print([{k: v for k, v in s.items() if k[:2] != "__" or k == "__key__"} for s in samples])
"""


def test_samples_are_those_of_webdataset_in_its_order(shards: list[Path]) -> None:
    pytest.importorskip("webdataset")
    # In a process of its own, as it leaves files open.
    theirs = subprocess.run(
        [sys.executable, "-c", THEIRS, *shards], capture_output=True, text=True, check=True
    )
    found = ls.Shards(shards, decode=False)
    assert len(found) == 20
    assert [found[i] for i in range(20)] == ast.literal_eval(theirs.stdout)


def test_known_extensions_are_decoded(shards: list[Path]) -> None:
    found = ls.Shards(shards)
    assert found.lengths == (7, 0, 13)
    for i in (19, 3, 7, 6):
        one = found[i]
        assert one["json"] == {"n": i}
        assert one["left.npy"].tolist() == list(range(i % 4))
        assert one["cls"] == i % 3
        assert one["bin"] == bytes(range(i % 200))
    assert found[-1]["__key__"] == found[19]["__key__"]
    for index in (20, -21):
        with pytest.raises(IndexError):
            found[index]


def test_other_extensions_get_decoders(shards: list[Path]) -> None:
    found = ls.Shards(shards[0], decoders={"bin": len, "cls": float})
    assert (found[5]["bin"], found[5]["cls"]) == (5, 2.0)
    alone = ls.Shards(shards[0], decoders={"bin": len}, decode=False)
    assert (alone[5]["bin"], alone[5]["cls"]) == (5, b"2")


@pytest.mark.parametrize("extension", ["pyd", "pkl", "pickle", "pth", "pt", "x.PYD"])
def test_pickles_are_refused_by_name(tmp_path: Path, extension: str) -> None:
    path = tar(tmp_path / "a.tar", [("1.txt", b"a"), (f"2.{extension}", pickle.dumps(1))])
    with pytest.raises(DataError, match=rf"a\.tar: 2\.{extension.lower()}: \.\w+ files hold pick"):
        ls.Shards(path)
    kind = extension.lower().rpartition(".")[2]
    assert ls.Shards(path, decoders={kind: len})[1][extension.lower()] > 0


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("1.npy", npy(np.array([{}], dtype=object)), r"1\.npy: cannot be decoded: .*allow_pickle"),
        ("1.npy", b"no array", r"1\.npy: cannot be decoded"),
        ("1.npz", b"no arrays", r"1\.npz: cannot be decoded"),
        ("1.json", b'{"a": ', r"1\.json: cannot be decoded"),
        ("1.txt", b"\xff\xfe", r"1\.txt: cannot be decoded"),
        ("1.cls", b"three", r"1\.cls: cannot be decoded: .*not a whole number"),
    ],
)
def test_values_that_cannot_be_decoded_are_named(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    path = tar(tmp_path / "a.tar", [(name, data)])
    with pytest.raises(DataError, match=rf"a\.tar: {message}"):
        ls.Shards(path)[0]


def test_an_extension_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", [("1.txt", b"a"), ("1.TXT", b"b")])
    with pytest.raises(DataError, match=r"a\.tar: 1\.txt: comes twice in one sample"):
        ls.Shards(path)


def test_links_and_folders_are_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("1.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            file.addfile(info)
    assert len(ls.Shards(path)) == 0


def damaged(path: Path, change: Any) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is no uncompressed tar file: empty file"),
        (lambda data: b"x" * 3000, "is no uncompressed tar file"),
        (lambda data: data[:700], "what follows member '1.txt' is damaged"),
        (lambda data: data[:1024], "what follows member '1.txt' is damaged or cut off"),
        (lambda data: data[:1300], "what follows member '1.txt' is damaged or cut off"),
        (
            lambda data: data[:1030] + b"\xff" + data[1031:],
            "what follows member '1.txt' is damaged or cut off",
        ),
        (lambda data: data[:2100] + b"z" + data[2101:], "what follows member '2.txt' is damaged"),
    ],
)
def test_damaged_files_are_named_with_the_member(tmp_path: Path, change: Any, message: str) -> None:
    path = tar(tmp_path / "a.tar", [("1.txt", b"a" * 400), ("2.txt", b"b" * 400)])
    with pytest.raises(DataError, match=rf"^{path}: {message}"):
        ls.Shards(damaged(path, change))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.tar: cannot be read: No such file"):
        ls.Shards([tmp_path / "none.tar"])
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        ls.Shards(str(tmp_path))
    path = tar(tmp_path / "a.tar", [("1.txt", b"a"), ("2.txt", b"b" * 9000)])
    found = ls.Shards(path)
    damaged(path, lambda data: data[:5000])
    with pytest.raises(DataError, match=r"a\.tar: 2\.txt: has \d+ of 9000 bytes; the file was cut"):
        found[1]
    path.unlink()
    with pytest.raises(DataError, match=r"a\.tar: cannot be read: No such file"):
        found[0]


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(DataError, match=r"a\.tar\.gz: is no uncompressed tar file"):
        ls.Shards(path)


def test_parts_hold_as_many_samples_each_in_their_order(shards: list[Path]) -> None:
    found = ls.Shards(shards)
    parts = [found.shard(index, 3) for index in range(3)]
    assert [len(part) for part in parts] == [7, 7, 6]
    assert [sample["json"] for part in parts for sample in part] == [{"n": i} for i in range(20)]
    with pytest.raises(IndexError):
        found.shard(3, 3)
