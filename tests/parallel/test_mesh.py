"""Every microbatch has one rank, whatever the numbers of both."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.mesh import Mesh


@given(st.integers(1, 64), st.integers(1, 64))
def test_microbatches_are_dealt_out_once_and_in_order(num_microbatches, size):
    mesh = Mesh(num_microbatches, size)
    ranges = mesh.microbatches
    assert len(ranges) == size
    assert [i for r in ranges for i in range(*r)] == list(range(num_microbatches))
    lengths = [len(r) for r in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert mesh.num_spares == sum(n == 0 for n in lengths)
