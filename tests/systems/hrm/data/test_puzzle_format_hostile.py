"""Datasets of others: whatever the files hold, a valid dataset or one clear error comes out."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.systems.hrm.data.build import new_dataset
from lockstep.systems.hrm.data.format import (
    ARRAYS,
    Puzzle,
    read_dataset,
    read_identifiers,
    read_split,
)

VOCAB, LENGTH = 6, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokens = np.arange(5 * LENGTH).reshape(5, LENGTH) % VOCAB
    with new_dataset(tmp_path / "data", VOCAB, LENGTH) as writer:
        for split in ("train", "test"):
            writer.add(
                split, [Puzzle(0, tokens[:1], tokens[:1]), Puzzle(0, tokens[1:], tokens[1:])]
            )
            writer.add(split, [Puzzle(0, tokens, tokens)])
    return tmp_path / "data"


def put(folder: Path, array: str, values: Any) -> None:
    np.save(folder / f"train/all__{array}.npy", np.asarray(values))


@pytest.mark.parametrize(
    ("array", "values", "message"),
    [
        ("inputs", np.full((10, LENGTH), VOCAB), "row 0, column 0: token 6: must be from 0 to 5"),
        ("labels", np.full((10, LENGTH), -1), "token -1: must be"),
        (
            "inputs",
            np.ones((10, LENGTH + 1), int),
            r"shape=\(10, 5\): must be \[N, 4\] \(seq_len\)",
        ),
        ("inputs", np.ones((0, LENGTH), int), r"shape=\(0, 4\): must be"),
        ("inputs", np.ones(LENGTH, int), r"shape=\(4,\): must be"),
        ("labels", np.ones((9, LENGTH), int), "9 rows: all__inputs.npy has 10"),
        ("inputs", np.ones((10, LENGTH)), "dtype='<f8': must be integers"),
        ("inputs", np.full((10, LENGTH), np.nan), "dtype='<f8': must be integers"),
        ("inputs", np.ones((10, LENGTH), bool), r"dtype='\|b1': must be integers"),
        ("inputs", np.ones((2, 2, 2), int), "must have 1 or 2 dims"),
        ("inputs", np.int64(3), "must have 1 or 2 dims"),
        ("puzzle_identifiers", [0, 1, 0], "number 1: 1: must be from 0 to 0"),
        ("puzzle_identifiers", [0, -1, 0], "number 1: -1: must be"),
        ("puzzle_identifiers", np.zeros((3, 1), int), r"shape=\(3, 1\): must be \[n\]"),
        ("puzzle_identifiers", np.zeros(0, int), r"must be \[n\], with n of at least 1"),
        ("puzzle_identifiers", [0, 0], "4 numbers: must be one more than the 2"),
        ("puzzle_indices", [0, 5, 1, 10], "number 2: 1: must be more than the one before, 5"),
        ("puzzle_indices", [0, 1, 1, 10], "number 2: 1: must be more than the one before, 1"),
        ("puzzle_indices", [0, 1, 5, 11], "from 0 to 11: must be from 0 to 10, the number of ex"),
        ("puzzle_indices", [1, 2, 5, 10], "from 1 to 10: must be from 0"),
        ("puzzle_indices", np.array([0, 1, 5, 2**64 - 1], "u8"), "is more than any index"),
        ("puzzle_indices", [-(2**63), 2**63 - 1, 0, 1], "number 2: 0: must be more than"),
        ("group_indices", [0, 2], "from 0 to 2: must be from 0 to 3, the number of puzzles"),
        ("group_indices", [0, 1, 2, 3], "total_groups=2: the sets have 3 groups"),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    folder: Path, array: str, values: Any, message: str
) -> None:
    put(folder, array, values)
    with pytest.raises(DataError, match=message) as raised:
        read_split(folder, "train")
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 5}, "token 5: must be from 0 to 4"),
        ({"vocab_size": 0}, "vocab_size=0: must be from 1"),
        ({"vocab_size": 10**200}, "vocab_size=1000"),
        ({"vocab_size": True}, "vocab_size=True: must be int"),
        ({"seq_len": 4.0}, "seq_len=4.0: must be int"),
        ({"seq_len": 3}, r"must be \[N, 3\] \(seq_len\)"),
        ({"pad_id": 6}, "pad_id=6: must be from 0 to 5"),
        ({"ignore_label_id": 2**40}, "ignore_label_id=1099511627776: must be a 32-bit"),
        ({"blank_identifier_id": -1}, "blank_identifier_id=-1"),
        ({"num_puzzle_identifiers": 0}, "num_puzzle_identifiers=0"),
        ({"total_groups": 3}, "total_groups=3: the sets have 2"),
        ({"mean_puzzle_examples": float("nan")}, "mean_puzzle_examples=nan"),
        ({"mean_puzzle_examples": 7}, "mean_puzzle_examples=7.0: the sets have 3.33"),
        ({"mean_puzzle_examples": "7"}, "mean_puzzle_examples='7': must be float"),
        ({"sets": []}, "must be names, each once"),
        ({"sets": ["all", "all"]}, "must be names, each once"),
        ({"sets": ["../../etc/passwd"]}, "sets: '../../etc/passwd': must be of letters"),
        ({"sets": "all"}, "sets='all': must be"),
        ({"sets": ["other"]}, "other__inputs.npy: there is no such file"),
    ],
)
def test_metadata_that_does_not_fit_is_named(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    path = folder / "train/dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        read_split(folder, "train")


@pytest.mark.parametrize("key", ["vocab_size", "sets", "mean_puzzle_examples"])
def test_a_missing_key_is_named(folder: Path, key: str) -> None:
    path = folder / "train/dataset.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=rf"dataset.json: field '{key}': is missing"):
        read_split(folder, "train")


@pytest.mark.parametrize("text", ["[]", "", "{", '{"vocab_size": 1, "vocab_size": 2}', "[" * 9999])
def test_metadata_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "train/dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset.json: "):
        read_split(folder, "train")


@pytest.mark.parametrize("text", ["{}", "[1]", '"<blank>"', "[", "\xff"])
def test_identifiers_that_are_no_names_are_refused(folder: Path, text: str) -> None:
    (folder / "identifiers.json").write_bytes(text.encode("latin1"))
    with pytest.raises(DataError, match=r"identifiers.json: .*must be a list of names"):
        read_identifiers(folder)


def header(descr: str, shape: str, *, version: int = 1, data: bytes = b"") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickled_array_is_refused_and_not_unpickled(folder: Path, tmp_path: Path) -> None:
    path = folder / "train/all__inputs.npy"
    np.save(path, np.array([Touch(tmp_path / "owned")], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"dtype='\|O': must be integers"):
        read_split(folder, "train")
    path.write_bytes(pickle.dumps(Touch(tmp_path / "owned")))
    with pytest.raises(DataError, match=r"is no .npy file"):
        read_split(folder, "train")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no .npy file"),
        (b"PK\3\4 a zip", "is no .npy file"),
        (b"\x93NUMPY\1\0", "truncated in its header"),
        (b"\x93NUMPY\1\0\x76\0{", "is damaged"),
        (b"\x93NUMPY\3\0\xff\xff\xff\xff", "header of 4,294,967,295 bytes: is damaged"),
        (header("'<i8'", f"({2**62}, 4)"), "truncated: shape="),
        (header("'<i8'", f"({2**62}, {2**62})"), "truncated: shape="),
        (header("'<i8'", f"({2**63}, 4)"), "is more than"),
        (header("'<i8'", "(" + "9" * 1000 + ",)"), "is more than"),
        (header("'<i8'", f"({2**63 - 1}, 0)"), "more than any array can have"),
        (header("'<i8'", "(-1, 4)"), "is damaged"),
        (header("[('a', '<i8')]", "(1, 4)"), "must be integers"),
        (header("'<i8'", "(1, 4)", data=bytes(31)), "truncated: .* 32 bytes .* found 31"),
        (header("'<i8'", "(1, 4)", data=bytes(33)), "trailing bytes: .* 32 bytes .* found 33"),
        (header("__import__('os')", "(1, 4)"), "is damaged"),
    ],
)
def test_files_that_lie_are_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "train/all__inputs.npy").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_split(folder, "train")


def test_a_longer_header_of_another_version_is_read(folder: Path) -> None:
    values = np.load(folder / "train/all__inputs.npy")
    content = header("'|u1'", "(10,4)", version=2, data=values.tobytes())
    (folder / "train/all__inputs.npy").write_bytes(content)
    assert np.array_equal(read_split(folder, "train").sets["all"].inputs, values)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [Path.unlink, replace_by_folder, replace_by_fifo])
@pytest.mark.parametrize("name", ["train/dataset.json", "train/all__labels.npy"])
def test_what_is_no_file_is_named(folder: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(folder / name)
    with pytest.raises(DataError, match=rf"{name}: (there is no such file|cannot be read)"):
        read_dataset(folder)


def test_splits_of_different_kinds_are_refused(folder: Path) -> None:
    path = folder / "test/dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 9}))
    with pytest.raises(DataError, match="vocab_size: is 6 in train, 9 in test"):
        read_dataset(folder)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_gives_an_error_or_a_valid_dataset(
    folder: Path, data: st.DataObject
) -> None:
    names = ["dataset.json", *(f"all__{array}.npy" for array in ARRAYS)]
    path = folder / "train" / data.draw(st.sampled_from(names))
    good = path.read_bytes()
    place = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
    noise = data.draw(st.binary(min_size=1, max_size=12))
    bad = {
        "flip": good[:place] + noise + good[place + len(noise) :],
        "cut": good[:place],
        "insert": good[:place] + noise + good[place:],
        "swap": good[:place] + (folder / "train" / names[1]).read_bytes()[place:],
    }[kind]
    path.write_bytes(bad)
    told = str(folder)
    try:
        check_valid(folder)
    except DataError as error:
        told = str(error)
    finally:
        path.write_bytes(good)
    assert str(folder) in told
    assert "\n" not in told


def check_valid(folder: Path) -> None:
    """Take everything as training does: each index must lead to a token of the vocabulary."""
    split = read_split(folder, "train")
    for held in split.sets.values():
        for first, last in zip(held.group_indices, held.group_indices[1:], strict=False):
            for place in range(first, last):
                rows = slice(*held.puzzle_indices[place : place + 2])
                assert len(held.inputs[rows]) == len(held.labels[rows]) > 0
                assert 0 <= held.puzzle_identifiers[place] < split.metadata.num_puzzle_identifiers
                assert int(held.inputs[rows].min()) >= 0
                assert int(held.inputs[rows].max()) < split.metadata.vocab_size


def test_a_copy_elsewhere_is_read_through_links(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "train", tmp_path / "elsewhere")
    (folder / "train").symlink_to(tmp_path / "elsewhere")
    check_valid(folder)
