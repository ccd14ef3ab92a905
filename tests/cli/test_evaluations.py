"""Which evaluation of two runs differs first."""

import math

from lockstep.cli.prove.repeated import evaluated, first_different_evaluation, num_evaluations

NAMES = ("this", "that")


def row(step, split="val", model_step=None, arrays=None, **metrics):
    return {
        "event": "Evaluated", "step": step, "split": split, "model_step": model_step,
        "metrics": metrics, "arrays": arrays or {},
    }  # fmt: skip


RUN = [row(2, loss=0.5), row(4, loss=math.nan), row(4, "test", loss=-0.0, arrays={"hits": [1, 2]})]


def test_equal_evaluations_may_come_in_any_order_and_again():
    assert first_different_evaluation(NAMES, (RUN, [*reversed(RUN), RUN[0]])) == ""
    assert num_evaluations([*RUN, RUN[0]]) == 3
    assert evaluated([{"event": "StepDone"}, *RUN]) == tuple(RUN)


def test_the_first_one_that_differs_is_named():
    later = [*RUN[:1], row(4, loss=0.2), row(4, "test", loss=0.0)]
    expected = "the evaluation of test after step 4: loss is -0.0 in this, 0.0 in that"
    assert first_different_evaluation(NAMES, (RUN, later)) == expected
    array = [*RUN[:2], row(4, "test", loss=-0.0, arrays={"hits": [1, 3]})]
    assert "hits is [1, 2] in this, [1, 3] in that" in first_different_evaluation(
        NAMES, (RUN, array)
    )
    unlike = [*RUN, row(2, loss=0.25)]  # once as it should be, once not
    expected = "the evaluation of val after step 2: loss is 0.5 in this, 0.25 in that"
    assert first_different_evaluation(NAMES, (RUN, unlike)) == expected
    assert "loss is 0.5 in this, 0.25 in this" in first_different_evaluation(NAMES, (unlike, RUN))


def test_one_that_is_missing_is_named():
    assert first_different_evaluation(NAMES, (RUN, RUN[1:])) == (
        "the evaluation of val after step 2 is not in that"
    )
    best = [*RUN[:2], row(4, "test", model_step=2, loss=-0.0, arrays={"hits": [1, 2]})]
    assert first_different_evaluation(NAMES, (RUN, best)) == (
        "the evaluation of test after step 4 (state of step 2) is not in this"
    )
