"""Files that are written tensor by tensor, read by the format's own library."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from lockstep.engine.checkpoint import tensor_files
from lockstep.engine.checkpoint.tensor_files import (
    Kind,
    MappedFile,
    Tensors,
    in_memory,
    write_tensors,
)
from lockstep.errors import EnvironError

TENSORS = {
    "flag": torch.tensor([True, False, True]),
    "count": torch.tensor(3),
    "weight": torch.randn(3, 5),
    "turned": torch.randn(4, 6).t(),
    "nothing": torch.empty(0, 3),
    "half": torch.randn(7).bfloat16(),
    "großer Name": torch.randn(2, dtype=torch.float64),
    "complex": torch.randn(2, dtype=torch.complex64),
}


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry = write_tensors(path, in_memory(TENSORS))
    data = path.read_bytes()
    assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    for read in (safetensors.torch.load(data), safetensors.torch.load_file(path)):
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read[name], tensor)


def test_a_mapped_file_takes_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry, before = write_tensors(path, in_memory(TENSORS)), os.listdir("/proc/self/fd")
    mapped = MappedFile(path, entry)
    assert os.listdir("/proc/self/fd") == before
    mapped.tensors["weight"][0] = 7.0  # stays in this process, until it is dropped
    assert mapped.tensors["weight"][0, 0] == 7
    mapped.drop()
    assert all(torch.equal(mapped.tensors[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_is_not_damaged_if_too_many_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tensor_files, "open_to_read", full)
    with pytest.raises(EnvironError, match=r"Too many open files; allow more"):
        MappedFile(tmp_path / "x.safetensors", {"bytes": 1, "sha256": ""})


def test_tensors_lie_at_multiples_of_their_element_size(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, in_memory(TENSORS))
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert header_bytes % 8 == 0
    sizes = [TENSORS[name].itemsize for name in in_memory(TENSORS).kinds]
    assert sizes == sorted(sizes, reverse=True)


def test_tensors_come_one_at_a_time(tmp_path: Path) -> None:
    alive = 0

    def content():
        nonlocal alive
        for value in range(3):
            alive += 1
            assert alive == 1
            yield torch.full((4,), float(value))
            alive -= 1

    kinds = {name: Kind(torch.float32, torch.Size([4])) for name in "abc"}
    path = tmp_path / "x.safetensors"
    write_tensors(path, Tensors(kinds, content()))
    assert [t[0].item() for _, t in sorted(safetensors.torch.load_file(path).items())] == [0, 1, 2]


def test_a_dtype_that_the_format_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_tensors(tmp_path / "x", in_memory({"x": torch.zeros(2, dtype=torch.complex128)}))
