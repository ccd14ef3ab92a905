"""The message for a loss that is not finite."""

from __future__ import annotations

import pytest

from lockstep.comm.transport import LocalTransport
from lockstep.engine.passes.loss_checks import non_finite_loss


@pytest.mark.parametrize("is_split", [True, False])
def test_names_microbatches_and_what_a_model_on_several_ranks_may_have_to_do_with_it(
    is_split: bool,
) -> None:
    error = non_finite_loss(LocalTransport(), 3, {4: float("nan"), 5: 1.0}, is_split)
    assert "step 3: the loss is nan in microbatch 4 (rank 0);" in str(error)
    assert ("reads parameters itself sees NaN" in str(error)) == is_split
