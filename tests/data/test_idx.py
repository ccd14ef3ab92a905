from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.idx_files import write_idx

from lockstep.data import images as idx
from lockstep.data.images import find_idx, read_idx, read_labelled
from lockstep.errors import DataError

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, torch.float64]
IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
TWO_BY_THREE = bytes.fromhex("00000802 00000002 00000003 000102030405")


def written(folder: Path, content: bytes, name: str = "x-idx1-ubyte") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def save_pair(folder: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    write_idx(folder / IMAGES, images)
    write_idx(folder / LABELS, labels)


def uint8(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.empty(shape, dtype=dtype)
    raw = draw(st.binary(min_size=tensor.nbytes, max_size=tensor.nbytes))
    tensor.numpy()[...] = np.frombuffer(raw, tensor.numpy().dtype).reshape(shape)
    return tensor


@given(tensor=tensors(), gzipped=st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, tensor: torch.Tensor, gzipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / ("round-trip.gz" if gzipped else "round-trip")
    write_idx(path, tensor)
    back = read_idx(path)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.numpy().tobytes() == tensor.numpy().tobytes()


@given(tensor=tensors(), change=st.integers(-100, 100).filter(bool))
@settings(max_examples=60, deadline=None)
def test_any_other_length_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, tensor: torch.Tensor, change: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "length"
    write_idx(path, tensor)
    content = path.read_bytes()
    path.write_bytes(content + b"x" * change if change > 0 else content[:change])
    with pytest.raises(DataError, match=r"length: (trailing|truncated)"):
        read_idx(path)


def test_reads_the_published_layout(tmp_path: Path) -> None:
    assert torch.equal(read_idx(written(tmp_path, TWO_BY_THREE)), uint8(2, 3))


def test_multi_byte_numbers_are_big_endian_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, bytes.fromhex("00000b01 00000002 0102 ff00"))
    assert read_idx(path).tolist() == [0x0102, -256]
    write_idx(path, torch.tensor([0x0102, -256], dtype=torch.int16))
    assert path.read_bytes() == bytes.fromhex("00000b01 00000002 0102 ff00")


def test_a_tensor_read_may_be_changed_in_place(tmp_path: Path) -> None:
    tensor = read_idx(written(tmp_path, TWO_BY_THREE))
    assert tensor.add_(1).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_transposed_tensor_is_written_in_row_order(tmp_path: Path) -> None:
    write_idx(tmp_path / "x", uint8(2, 3).T)
    assert torch.equal(read_idx(tmp_path / "x"), uint8(2, 3).T)


def test_gzip_is_seen_by_content_not_by_name(tmp_path: Path) -> None:
    zipped = written(tmp_path, gzip.compress(TWO_BY_THREE), "zipped")
    plain = written(tmp_path, TWO_BY_THREE, "plain.gz")
    assert torch.equal(read_idx(zipped), read_idx(plain))


def test_errors_end_the_command_with_exit_code_2() -> None:
    assert DataError("x").exit_code == 2


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, None], ids=["empty", "folder", "missing"])
def test_what_is_no_file_is_an_error(tmp_path: Path, make: object) -> None:
    path = tmp_path / "x"
    if callable(make):
        make(path)
    with pytest.raises(DataError, match=rf"^{path}: (cannot be read|truncated)"):
        read_idx(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08", "truncated: the magic number is 4 bytes, found 3"),
        (TWO_BY_THREE[:10], "truncated: 2 dims make 8 bytes, found 6"),
        (TWO_BY_THREE[:-2], r"truncated: dims=\[2, 3\] of uint8 make 6 bytes .*, found 4"),
        (
            TWO_BY_THREE + b"!",
            r"trailing bytes: dims=\[2, 3\] of uint8 make 6 bytes .*, found more",
        ),
        (b"\x01" + TWO_BY_THREE[1:], "magic=01000802: not an IDX file"),
        (b"\0\0\x0a" + TWO_BY_THREE[3:], "magic=00000a02: not an IDX file"),
        (b"<!DOCTYPE html>", "magic=3c21444f: not an IDX file"),
    ],
)
@pytest.mark.parametrize("gzipped", [False, True])
def test_damage_is_named(tmp_path: Path, content: bytes, message: str, gzipped: bool) -> None:
    path = written(tmp_path, gzip.compress(content) if gzipped else content)
    with pytest.raises(DataError, match=rf"^{path}: {message}"):
        read_idx(path)


@pytest.mark.parametrize("position", [2, 12, -8, -1])
def test_a_changed_byte_of_a_gzip_file_is_found(tmp_path: Path, position: int) -> None:
    content = bytearray(gzip.compress(TWO_BY_THREE, mtime=0))
    content[position] ^= 0x40
    with pytest.raises(DataError, match=f"^{tmp_path}.* gzip data is damaged"):
        read_idx(written(tmp_path, bytes(content)))


@pytest.mark.parametrize("kept", [5, 20, -4, -1])
def test_a_cut_gzip_file_is_found(tmp_path: Path, kept: int) -> None:
    with pytest.raises(DataError, match="gzip data is damaged"):
        read_idx(written(tmp_path, gzip.compress(TWO_BY_THREE)[:kept]))


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("dims", [(2**31,), (2**32 - 1, 2**10), (2**32 - 1,) * 255])
def test_a_lying_header_allocates_nothing(
    tmp_path: Path, dims: tuple[int, ...], gzipped: bool
) -> None:
    content = struct.pack(f">HBB{len(dims)}I", 0, 0x0E, len(dims), *dims) + b"few"
    path = written(tmp_path, gzip.compress(content) if gzipped else content)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"truncated|more than any file"):
        read_idx(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_dims_that_overflow_around_a_zero_are_an_error(tmp_path: Path) -> None:
    content = struct.pack(">HBB4I", 0, 0x08, 4, 0, *(2**32 - 1,) * 3)
    with pytest.raises(DataError, match=r"dims=\[0, .*more than any file can hold"):
        read_idx(written(tmp_path, content))


def test_large_files_are_read_whole_without_a_second_copy(tmp_path: Path) -> None:
    tensor = torch.arange(3 << 20, dtype=torch.int32)
    write_idx(tmp_path / "x", tensor)
    tracemalloc.start()
    back = read_idx(tmp_path / "x")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(back, tensor)
    assert peak_bytes < 1.5 * tensor.nbytes


@pytest.mark.parametrize(
    "name", [IMAGES, "t10k-images.idx3-ubyte", f"{IMAGES}.gz", "t10k-images.idx3-ubyte.gz"]
)
def test_every_usual_name_is_found(tmp_path: Path, name: str) -> None:
    write_idx(tmp_path / name, uint8(1, 2, 2))
    write_idx(tmp_path / LABELS, uint8(1))
    assert find_idx(tmp_path, IMAGES) == tmp_path / name


def test_the_plain_file_goes_before_the_gzipped(tmp_path: Path) -> None:
    for name in (f"{IMAGES}.gz", "t10k-images.idx3-ubyte"):
        write_idx(tmp_path / name, uint8(1, 2, 2))
    assert find_idx(tmp_path, IMAGES).name == "t10k-images.idx3-ubyte"


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").touch()
    (tmp_path / IMAGES).mkdir()
    with pytest.raises(DataError) as raised:
        find_idx(tmp_path, IMAGES)
    assert str(raised.value) == (
        f"{tmp_path}: none of {IMAGES}, t10k-images.idx3-ubyte, {IMAGES}.gz, "
        f"t10k-images.idx3-ubyte.gz: the folder holds readme.txt, {IMAGES}"
    )


def test_a_full_folder_is_not_listed_in_full(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"f{number:02}").touch()
    with pytest.raises(DataError, match=r"holds f00, .*, f11 and 88 more$"):
        find_idx(tmp_path, IMAGES)


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/none: .*: there is no such folder"):
        find_idx(tmp_path / "none", IMAGES)
    with pytest.raises(DataError, match="it is not a folder"):
        find_idx(written(tmp_path, b""), IMAGES)


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder holds nothing"):
        find_idx(tmp_path, IMAGES)


def test_images_come_with_their_labels_as_int64(tmp_path: Path) -> None:
    save_pair(tmp_path, uint8(3, 2, 2), uint8(3))
    images, labels = read_labelled(tmp_path, "t10k")
    assert torch.equal(images, uint8(3, 2, 2))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (uint8(3, 2, 2), uint8(4), rf"{LABELS}: 4 labels, .*/{IMAGES}: 3 images"),
        (uint8(3, 4), uint8(3), rf"{IMAGES}: dims=\[3, 4\]: must be \[N, H, W\]"),
        (uint8(3, 0, 4), uint8(3), rf"{IMAGES}: dims=\[3, 0, 4\]: must be .* none of them 0"),
        (uint8(3, 2, 2), uint8(3, 1), rf"{LABELS}: dims=\[3, 1\]: must be \[N\]"),
        (uint8(3, 2, 2).float(), uint8(3), rf"{IMAGES}: type=float32: must be uint8"),
        (uint8(3, 2, 2), -uint8(3).int(), rf"{LABELS}: type=int32: must be uint8"),
    ],
)
def test_images_and_labels_that_do_not_fit(
    tmp_path: Path, images: torch.Tensor, labels: torch.Tensor, message: str
) -> None:
    save_pair(tmp_path, images, labels)
    with pytest.raises(DataError, match=f"^{tmp_path}/{message}"):
        read_labelled(tmp_path, "t10k")


def test_images_without_labels(tmp_path: Path) -> None:
    write_idx(tmp_path / IMAGES, uint8(3, 2, 2))
    with pytest.raises(DataError, match=f"none of {LABELS}, .*holds {IMAGES}"):
        read_labelled(tmp_path, "t10k")


def test_the_real_mnist_test_set() -> None:
    folder = Path(__file__).parents[3] / "shared" / "data" / "mnist"
    if not folder.is_dir():
        pytest.skip("MNIST is not at hand")
    images, labels = read_labelled(folder, "t10k")
    assert images.shape == (10_000, 28, 28)
    assert labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.timeout(10)
def test_a_fifo_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="is a FIFO, socket or device, not a regular file"):
        read_idx(tmp_path / "fifo")


def test_more_than_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytearray:
        raise MemoryError

    path = written(tmp_path, TWO_BY_THREE)
    monkeypatch.setattr(idx, "_read_up_to", lambda s, n: fail() if n == 6 else s.read(n))
    with pytest.raises(DataError, match="6 bytes do not fit into memory"):
        read_idx(path)
