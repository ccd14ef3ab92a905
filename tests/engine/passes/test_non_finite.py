"""The messages for a loss that is not finite, or has no gradient."""

from __future__ import annotations

import pytest
import torch

import lockstep as ls
from lockstep.comm.transport import LocalTransport
from lockstep.engine.passes.loss_checks import check_has_gradient, non_finite_loss
from lockstep.errors import TaskError


@pytest.mark.parametrize("is_split", [True, False])
def test_names_microbatches_and_what_a_model_on_several_ranks_may_have_to_do_with_it(
    is_split: bool,
) -> None:
    error = non_finite_loss(LocalTransport(), 3, {4: float("nan"), 5: 1.0}, is_split)
    assert "step 3: the loss is nan in microbatch 4 (rank 0);" in str(error)
    assert ("reads parameters itself sees NaN" in str(error)) == is_split


def test_gradients_that_are_switched_off_are_told_from_a_loss_without_one() -> None:
    loss = ls.Loss(torch.zeros(()), 1)
    with pytest.raises(TaskError, match="must depend on the model's parameters"):
        check_has_gradient("loss", loss)
    with torch.no_grad(), pytest.raises(TaskError, match=r"set_grad_enabled\(False\)"):
        check_has_gradient("loss", loss)
