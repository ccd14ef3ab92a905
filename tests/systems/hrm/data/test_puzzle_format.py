"""The format on disk: what is written is read, and is what published readers take."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.systems.hrm.data import build as writing
from lockstep.systems.hrm.data.arrays import IntegersFile
from lockstep.systems.hrm.data.build import content_digest, new_dataset
from lockstep.systems.hrm.data.format import Puzzle, read_dataset, read_identifiers, read_split

VOCAB, LENGTH = 6, 4


def puzzle(value: int = 1, count: int = 1, identifier: int = 0) -> Puzzle:
    tokens = np.full((count, LENGTH), value)
    return Puzzle(identifier, tokens, tokens)


def small(folder: Path, value: int = 1, **options: bool) -> Path:
    with new_dataset(folder, VOCAB, LENGTH, **options) as writer:
        for split in ("train", "test"):
            writer.add(split, [puzzle(value), puzzle(2, 3)])
            writer.add(split, [puzzle(3)])
    return folder


groups = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(groups, groups, st.sampled_from([2, 256, 257, 65_536, 70_000]), st.integers(0, 2**32))
@settings(max_examples=15)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    train: list[list[tuple[int, int]]],
    test: list[list[tuple[int, int]]],
    vocab_size: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("format") / "data"
    generator = np.random.default_rng(seed)
    made = {
        split: [
            [
                Puzzle(n, *generator.integers(vocab_size, size=(2, count, LENGTH)))
                for n, count in group
            ]
            for group in shape
        ]
        for split, shape in (("train", train), ("test", test))
    }
    with new_dataset(folder, vocab_size, LENGTH) as writer:
        assert [writer.identifier(name) for name in ("a", "b")] == [1, 2]
        for split, all_groups in made.items():
            for group in all_groups:
                writer.add(split, group)
    assert read_identifiers(folder) == ["<blank>", "a", "b"]
    for split, found in read_dataset(folder).items():
        held = found.sets["all"]
        assert held.inputs.dtype == np.min_scalar_type(vocab_size - 1)
        assert len(held.group_indices) - 1 == len(made[split]) == found.metadata.total_groups
        for number, group in enumerate(made[split]):
            first, last = held.group_indices[number : number + 2]
            assert held.puzzle_identifiers[first:last].tolist() == [p.identifier for p in group]
            for place, puzzle in zip(range(first, last), group, strict=True):
                rows = slice(*held.puzzle_indices[place : place + 2])
                assert np.array_equal(held.inputs[rows], puzzle.inputs)
                assert np.array_equal(held.labels[rows], puzzle.labels)


@pytest.mark.parametrize("dtype", ["u1", "<i4", "<i8"])
@pytest.mark.parametrize("row", [(), (81,), (900,)])
@pytest.mark.parametrize("count", [0, 1, 1234])
def test_an_array_has_the_bytes_that_numpy_writes(
    tmp_path: Path, dtype: str, row: tuple[int, ...], count: int
) -> None:
    values = np.arange(count * int(np.prod(row)), dtype=dtype).reshape(count, *row)
    with IntegersFile(tmp_path / "ours.npy", dtype, row) as file:
        file.append(values[: count // 3])
        file.append(values[count // 3 :])
    np.save(tmp_path / "theirs.npy", values)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


def test_a_published_reader_finds_what_it_expects(tmp_path: Path) -> None:
    folder = small(tmp_path / "data")
    metadata = json.loads((folder / "train/dataset.json").read_text())
    assert metadata == {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": VOCAB,
        "seq_len": LENGTH, "num_puzzle_identifiers": 1, "total_groups": 2,
        "mean_puzzle_examples": 5 / 3, "sets": ["all"],
    }  # fmt: skip
    loaded = {
        name: np.load(folder / f"train/all__{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    }
    assert loaded["inputs"].shape == (5, LENGTH)
    assert loaded["puzzle_indices"].tolist() == [0, 1, 4, 5]
    assert loaded["group_indices"].tolist() == [0, 2, 3]
    assert loaded["group_indices"].dtype == np.int32


@pytest.mark.parametrize("dtype", ["<i8", "<i4", ">i8", "<u8", "u1", "i1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_integers_are_read(tmp_path: Path, dtype: str, order: str) -> None:
    folder = small(tmp_path / "data")
    before = read_split(folder, "train").sets["all"]
    expected = {name: np.array(getattr(before, name)) for name in before.__dataclass_fields__}
    for name, values in expected.items():
        np.save(folder / f"train/all__{name}.npy", np.asarray(values, dtype, order=order))
    found = read_split(folder, "train").sets["all"]
    assert isinstance(found.inputs, np.memmap)
    for name, values in expected.items():
        assert np.array_equal(getattr(found, name), values)


def test_keys_of_other_writers_are_passed_over(tmp_path: Path) -> None:
    folder = small(tmp_path / "data")
    path = folder / "train/dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "total_puzzles": 3}))
    assert read_split(folder, "train").metadata.total_groups == 2


def test_a_label_to_be_ignored_may_be_no_token(tmp_path: Path) -> None:
    folder = small(tmp_path / "data")
    path = folder / "train/dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ignore_label_id": -100}))
    labels = np.full((5, LENGTH), -100)
    np.save(folder / "train/all__labels.npy", labels)
    assert np.array_equal(read_split(folder, "train").sets["all"].labels, labels)
    np.save(folder / "train/all__inputs.npy", labels)
    with pytest.raises(DataError, match=r"all__inputs.npy: row 0, column 0: token -100"):
        read_split(folder, "train")


def test_the_same_content_stays_and_another_is_refused(tmp_path: Path) -> None:
    folder = small(tmp_path / "data")
    inode = folder.stat().st_ino
    small(folder)
    assert folder.stat().st_ino == inode
    digest = content_digest(folder)
    with pytest.raises(DataError, match=r"holds another dataset; .*--overwrite"):
        small(folder, 4)
    assert content_digest(folder) == digest
    small(folder, 4, overwrite=True)
    assert content_digest(folder) == content_digest(small(tmp_path / "fresh", 4)) != digest
    assert sorted(os.listdir(tmp_path)) == ["data", "fresh"]


@pytest.mark.parametrize("name", ["thesis.tex", "train/notes.txt", "train/all__inputs.npy/x"])
def test_nothing_of_others_is_overwritten(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(DataError, match=rf"holds {name}, which is no part of a dataset"):
        small(tmp_path / "data", overwrite=True)
    assert path.read_text() == "mine"


def test_an_empty_folder_is_taken_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    read_dataset(small(tmp_path / "data"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="file: is a file"):
        small(tmp_path / "file", overwrite=True)


def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small(tmp_path / "data")
    digest = content_digest(folder)

    def interrupted() -> None:
        with new_dataset(folder, VOCAB, LENGTH, overwrite=True) as writer:
            writer.add("train", [puzzle()])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_write_json", full)
    with pytest.raises(DataError, match="data: cannot be written: No space left on device"):
        small(folder, 4, overwrite=True)
    assert content_digest(folder) == digest
    assert os.listdir(tmp_path) == ["data"]


def test_a_dataset_without_puzzles_is_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="test: has no puzzles"),
        new_dataset(tmp_path / "data", VOCAB, LENGTH) as writer,
    ):
        writer.add("train", [puzzle()])
    assert not os.listdir(tmp_path)
