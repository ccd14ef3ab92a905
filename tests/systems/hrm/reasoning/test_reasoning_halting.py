from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError, TaskError
from lockstep.systems.hrm.reasoning import (
    continue_target,
    draw_min_steps,
    halting_loss,
    halts,
    refill,
)

LOGITS = st.floats(-20, 20, width=32)
SLOTS = st.lists(
    st.tuples(LOGITS, LOGITS, st.integers(1, 20), st.integers(0, 16), st.booleans()),
    min_size=1,
    max_size=6,
)


def columns(slots: list[tuple[float, float, int, int, bool]]) -> list[torch.Tensor]:
    return [torch.tensor(column) for column in zip(*slots, strict=True)]


@settings(deadline=None)
@given(SLOTS, st.integers(1, 16), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_slots_halt_one_by_one_as_the_rules_say(
    slots: list[tuple[float, float, int, int, bool]],
    max_steps: int,
    is_training: bool,
    early: bool,
    goes_on: bool,
    explores: bool,
) -> None:
    q_halt, q_continue, steps, min_steps, _ = columns(slots)
    found = halts(
        q_halt,
        q_continue if goes_on else None,
        steps,
        max_steps,
        is_training,
        min_steps if explores else None,
        early,
    )
    for halted, (halt, going_on, step, least, _) in zip(found.tolist(), slots, strict=True):
        wants = halt > (going_on if goes_on else 0)
        explored = not explores or step >= least
        may = explored if is_training else early
        assert halted == ((wants and may) or step >= max_steps)


@settings(deadline=None)
@given(SLOTS)
def test_halted_slots_take_the_new_and_others_keep_what_they_have(
    slots: list[tuple[float, float, int, int, bool]],
) -> None:
    halted = columns(slots)[4]
    count = len(slots)
    current = {
        "inputs": torch.arange(count * 3).view(count, 3),
        "state": torch.randn(count, 2, 2).bfloat16(),
        "steps": torch.arange(count, dtype=torch.int32),
    }
    fresh = {
        "inputs": -1 - torch.arange(count * 3).view(count, 3),
        "state": torch.randn(count, 2, 2),
        "steps": torch.zeros(count, dtype=torch.int64),
    }
    filled = refill(halted, current, fresh)
    for name, value in filled.items():
        assert value.dtype == current[name].dtype
        for slot, is_new in enumerate(halted.tolist()):
            source = fresh if is_new else current
            assert torch.equal(value[slot], source[name][slot].to(value.dtype))


def test_what_is_refilled_keeps_its_gradient() -> None:
    old, new = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    refill(torch.tensor([True, False]), {"x": old}, {"x": new})["x"].sum().backward()
    assert old.grad is not None
    assert new.grad is not None
    assert old.grad[:, 0].tolist() == [0, 1]
    assert new.grad[:, 0].tolist() == [1, 0]


def test_a_slot_goes_through_examples_until_each_halts() -> None:
    """Slots that want to halt after as many segments as their example says."""
    slots = {"wanted": torch.tensor([1, 1, 1]), "steps": torch.zeros(3, dtype=torch.int64)}
    halted, seen = torch.ones(3, dtype=torch.bool), []
    for _ in range(8):
        fresh = {"wanted": torch.tensor([1, 3, 9]), "steps": torch.zeros(3, dtype=torch.int64)}
        slots = refill(halted, slots, fresh)
        slots["steps"] = slots["steps"] + 1
        q_halt = torch.where(slots["steps"] >= slots["wanted"], 1.0, -1.0)
        halted = halts(q_halt, None, slots["steps"], 4, is_training=True)
        seen.append(halted.tolist())
    assert [slot.count(True) for slot in zip(*seen, strict=True)] == [8, 2, 2]


def test_the_least_number_of_segments_is_random_for_a_tenth_of_slots() -> None:
    torch.manual_seed(0)
    drawn = draw_min_steps(40_000, 16)
    assert drawn.dtype == torch.int64
    counts = torch.bincount(drawn, minlength=17).tolist()
    assert len(counts) == 17
    assert counts[1] == 0
    assert counts[0] / 40_000 == pytest.approx(0.9, abs=0.01)
    expected = 40_000 * 0.1 / 15
    assert all(abs(count - expected) < 6 * math.sqrt(expected) for count in counts[2:])


def test_as_many_numbers_are_drawn_whatever_the_outcome() -> None:
    after = []
    for probability in (0.0, 0.1, 1.0):
        torch.manual_seed(5)
        draw_min_steps(7, 16, probability)
        after.append(torch.rand(3))
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


@pytest.mark.parametrize(("probability", "values"), [(0.0, {0}), (1.0, {2, 3})])
def test_probabilities_of_0_and_1_are_certain(probability: float, values: set[int]) -> None:
    torch.manual_seed(0)
    assert {*draw_min_steps(200, 3, probability).tolist()} == values


def test_one_segment_leaves_nothing_to_explore() -> None:
    assert {*draw_min_steps(50, 1, 1.0).tolist()} == {1}


@settings(deadline=None)
@given(SLOTS)
def test_going_on_is_worth_what_the_next_segment_gives(
    slots: list[tuple[float, float, int, int, bool]],
) -> None:
    q_halt, q_continue, _, _, is_last = columns(slots)
    q_halt.requires_grad_()
    found = continue_target(q_halt, q_continue, is_last)
    assert not found.requires_grad
    for value, (halt, going_on, *_, last) in zip(found.tolist(), slots, strict=True):
        best = halt if last else max(halt, going_on)
        assert value == pytest.approx(1 / (1 + math.exp(-best)), rel=1e-5)


@settings(deadline=None)
@given(st.lists(st.tuples(LOGITS, st.floats(0, 1)), min_size=1, max_size=5))
def test_halting_losses_are_binary_cross_entropies(slots: list[tuple[float, float]]) -> None:
    q, target = (torch.tensor(c, dtype=torch.float64) for c in zip(*slots, strict=True))
    expected = []
    for logit, probability in slots:
        p = 1 / (1 + math.exp(-logit))
        expected.append(-probability * math.log(p) - (1 - probability) * math.log1p(-p))
    assert halting_loss(q, target).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_halting_losses_have_gradients_for_logits_only() -> None:
    q = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: halting_loss(x, torch.tensor([True, False])), (q,))
    target = torch.tensor([0.5, 0.5], requires_grad=True)
    halting_loss(q.bfloat16(), target).sum().backward()
    assert target.grad is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: draw_min_steps(2, 0), "max_steps=0: must be at least 1"),
        (lambda x: draw_min_steps(2, 4, 1.5), "probability=1.5: must be within 0 … 1"),
        (lambda x: draw_min_steps(2, 4, math.nan), "probability=nan: must be within 0 … 1"),
        (lambda x: halts(x, None, x, 0, is_training=True), "max_steps=0: must be at least 1"),
    ],
)
def test_bad_numbers_of_segments_are_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(torch.zeros(2))


def test_slots_and_examples_that_do_not_fit_are_refused() -> None:
    halted, x = torch.ones(2, dtype=torch.bool), torch.zeros(2, 3)
    with pytest.raises(TaskError, match=r"hold \['a'\] and are to take \['b'\]"):
        refill(halted, {"a": x}, {"b": x})
    with pytest.raises(TaskError, match=r"a: slots hold \[2, 3\] and are to take \[2, 1\]"):
        refill(halted, {"a": x}, {"a": x[:, :1]})
    with pytest.raises(TaskError, match=r"where \[2\] says"):
        refill(halted, {"a": x[:1]}, {"a": x[:1]})
