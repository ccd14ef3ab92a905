"""Every microbatch has one replica and every shard a holder, whatever the numbers of ranks."""

from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.parallel.mesh import NEW, Mesh, fitting, rearranged, sizes_of_replicas

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, st.integers(1, 8))
def test_microbatches_are_distributed_once_and_in_order(num_microbatches, size, tp):
    assume(size >= tp)
    mesh = Mesh.of(num_microbatches, size, tp)
    ranges = mesh.microbatches
    assert len(ranges) == size
    for column in range(tp):
        of_column = [ranges[rank] for rank in mesh.members(column)]
        assert [i for r in of_column for i in range(*r)] == list(range(num_microbatches))
    lengths = [len(ranges[rank]) for replica in mesh.replicas for rank in replica]
    assert max(lengths) - min(lengths) <= 1
    assert mesh.num_spares == sum(len(r) == 0 for r in ranges)
    for replica in mesh.replicas:
        assert len({ranges[rank] for rank in replica}) == 1
        assert [mesh.columns[rank] for rank in replica] == list(range(tp))


@given(SIZES, st.integers(1, 8))
def test_sizes_of_replicas_leave_no_spare(size, num_shards):
    sizes = sizes_of_replicas(size, num_shards)
    assert (1, 1) in sizes
    assert len(set(sizes)) == len(sizes)
    for pp in range(1, size + 1):
        for tp in range(1, size // pp + 1):
            is_full = tp <= num_shards and not Mesh.of(size, size, tp, pp).incomplete
            assert ((pp, tp) in sizes) == is_full


@given(st.lists(st.integers(NEW, 3), min_size=4, max_size=24))
def test_after_a_loss_few_ranks_change_their_column(kept):
    assume(set(range(4)) <= set(kept))
    columns = rearranged(kept, 4)
    counts = [columns.count(column) for column in range(4)]
    assert max(counts) - min(counts) <= 1  # so no replica more could be complete
    moved = [old for old, new in zip(kept, columns, strict=True) if old not in (NEW, new)]
    for column in range(4):  # only where there were more than enough
        assert moved.count(column) <= max(0, kept.count(column) - min(counts))
    assert all(new in range(4) for new in columns)
    # Of each column somebody stays, who has what those that come need.
    for column in range(4):
        assert any(old == new == column for old, new in zip(kept, columns, strict=True))


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 6))
def test_a_replica_that_fits_is_as_large_as_can_be(size: int, pp: int, tp: int) -> None:
    stages, ranks = fitting(size, pp, tp)
    assert stages <= pp
    assert ranks <= tp
    assert stages * ranks <= size
    if pp * tp <= size:
        assert (stages, ranks) == (pp, tp)
    others = [p * t for p in range(1, pp + 1) for t in range(1, tp + 1) if p * t <= size]
    assert stages * ranks == max(others)


def test_ranks_of_a_stage_are_kept_before_stages() -> None:
    assert fitting(3, 2, 2) == (1, 2)
    assert fitting(1, 4, 4) == (1, 1)
    assert fitting(6, 4, 3) == (2, 3)
