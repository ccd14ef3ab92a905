"""The arithmetic of sizes, without MPI."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.backend.buffers import (
    check_dtypes,
    check_parts,
    check_whole,
    only,
    split_counts,
)
from lockstep.comm.transport import offsets

sizes = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(sizes)
def test_offsets_tile_the_whole(counts: list[int]) -> None:
    starts = offsets(counts)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == sum(counts)


@given(sizes, st.lists(st.integers(0, 5), max_size=3))
def test_given_splits_cut_like_torch(splits: list[int], rest: list[int]) -> None:
    tensor = torch.zeros([sum(splits), *rest])
    counts = split_counts(tensor.shape, splits, len(splits))
    assert counts == [part.numel() for part in torch.split(tensor, splits)]


@given(st.integers(1, 8), st.integers(0, 5), st.lists(st.integers(0, 5), max_size=3))
def test_equal_splits_are_equal(num_ranks: int, rows: int, rest: list[int]) -> None:
    tensor = torch.zeros([rows * num_ranks, *rest])
    counts = split_counts(tensor.shape, [], num_ranks)
    assert counts == [tensor.numel() // num_ranks] * num_ranks


@pytest.mark.parametrize(
    ("shape", "splits", "num_ranks"),
    [((5, 2), [], 2), ((4,), [1, 2], 2), ((4,), [4], 2), ((4,), [5, -1], 2), ((), [], 2)],
)
def test_impossible_splits_are_refused(
    shape: tuple[int, ...], splits: list[int], num_ranks: int
) -> None:
    with pytest.raises(ValueError, match="dim 0 of size"):
        split_counts(shape, splits, num_ranks)


def test_only_takes_a_tensor_or_a_list_of_one() -> None:
    tensor = torch.ones(2)
    assert only(tensor) is tensor
    assert only([tensor]) is tensor
    for wrong in ([], [tensor, tensor]):
        with pytest.raises(ValueError, match="one tensor"):
            only(wrong)


def test_parts_must_fit() -> None:
    check_parts("gather", [1, 2], rank=1, size=2, own=2)
    check_parts("gather", [1, 2], rank=1, size=2)
    with pytest.raises(ValueError, match="gather needs one tensor per rank: 3, got 2"):
        check_parts("gather", [1, 2], rank=2, size=3)
    with pytest.raises(ValueError, match="own part has 2 elements on one side and 5"):
        check_parts("gather", [1, 2], rank=1, size=2, own=5)


def test_wholes_and_dtypes_must_fit() -> None:
    check_whole("allgather", torch.ones(4, 2), torch.ones(4), 2)
    with pytest.raises(ValueError, match="8 elements are not 2 times 3"):
        check_whole("allgather", torch.ones(8), torch.ones(3), 2)
    check_dtypes("allgather", [torch.ones(1), torch.ones(2)])
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.int64"):
        check_dtypes("allgather", [torch.ones(1), torch.ones(1, dtype=torch.int64)])


def test_the_package_does_not_start_mpi() -> None:
    code = "import sys, lockstep.comm; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
