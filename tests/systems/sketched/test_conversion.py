"""Converting models: which layers, how large, and what is put in their places."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import ConfigError
from lockstep.sketch import Candidate, SKConv2d, SKLinear, apply, choose, measure, replace_layers
from lockstep.systems.sketched.tuner import dense_layers


def model():
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.ReLU(),
        shared,
        nn.ModuleDict({"again": shared, "norm": nn.LayerNorm(32)})["again"],
        nn.Linear(32, 10),
    )


def test_layers_are_replaced_by_the_pattern_of_their_names():
    own = model()
    made = replace_layers(own, ["[24]"], low_rank=lambda _, layer: layer.in_features // 2)
    assert list(made) == ["2", "4"]
    assert [type(layer) for layer in own][2:] == [SKLinear, nn.ReLU, SKLinear, SKLinear, nn.Linear]
    assert own[4] is own[5]  # it is shared as it was
    assert made["2"].sketch_key.tolist() == [0, 0]
    assert made["4"].sketch_key.tolist() == [0, 1]
    own(torch.randn(2, 1, 4, 4)).sum().backward()


def test_full_rank_changes_nothing_but_the_form():
    own, x = model().eval(), torch.randn(5, 1, 4, 4)
    expected = own(x)
    made = replace_layers(own, low_rank=8)
    assert isinstance(made["0"], SKConv2d)
    replace_layers(own2 := model(), ["2", "4", "6"], low_rank=16)
    torch.testing.assert_close(own2(x), expected, rtol=1e-4, atol=1e-4)
    assert (own(x) - expected).norm() > 1e-3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"patterns": ["7"]},
            r"layers='7': matches no layer that can be sketched \(there are: 0, 2",
        ),
        ({"patterns": ["2", "x*"]}, r"layers='x\*': matches no layer"),
        ({"patterns": ["6"], "low_rank": 33}, "layer 6: low_rank=33: larger than the layer"),
        ({"num_terms": 0}, "layer 0: num_terms=0: must be at least 1"),
    ],
)
def test_plans_that_cannot_be(keys, message):
    own = model()
    with pytest.raises(ConfigError, match=f"^{message}"):
        replace_layers(own, **{"low_rank": 2} | keys)
    assert not any(isinstance(m, (SKLinear, SKConv2d)) for m in own.modules())


def test_layers_that_have_no_sketched_form_are_left_out():
    own = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 4), nn.LazyLinear(3))
    assert list(dense_layers(own)) == ["1"]


def test_measured_errors_are_those_of_the_layers():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48), torch.randn(100, 64)
    found = measure(layer, x, [4, 16, 24, 99], [1, 2], "range-finder", repeats=1)
    assert [(c.low_rank, c.num_terms) for c in found] == [
        (0, 0), (4, 1), (16, 1), (24, 1), (4, 2), (16, 2), (24, 2),
    ]  # fmt: skip
    assert found[0].parameters == 64 * 48 + 48
    assert found[1].parameters == 4 * (64 + 48) + 48
    assert found[1].kept == 8 * (64 + 48) + 48  # U is made from the weight
    assert measure(layer, x, [4], method="copy", repeats=1)[1].kept == found[1].parameters
    made = SKLinear.from_dense(layer, 4)
    with torch.no_grad():
        expected = (made(x) - layer(x)).norm() / (layer(x) - layer.bias).norm()
    assert found[1].error == pytest.approx(float(expected))
    assert found[1].error > found[2].error > found[3].error
    assert found[3].error < 1e-5  # 2 x 24 is the whole rank
    assert all(c.seconds > 0 for c in found)


def ways(*rows):
    dense = Candidate(0, 0, 0.0, 0.0, 1000, 1.0, 1000)
    return [dense, *(Candidate(k, 1, error, error, n, t, 2 * n) for k, error, n, t in rows)]


def test_the_fastest_way_that_is_accurate_enough_is_chosen():
    measured = {
        "a": ways((4, 0.5, 100, 0.1), (8, 0.2, 200, 0.2), (16, 0.1, 400, 0.4)),
        "b": ways((4, 0.1, 100, 2.0)),
    }
    plan = choose(measured, max_error=0.3)
    assert plan["a"].chosen.low_rank == 8
    assert plan["b"].chosen == plan["b"].dense  # sketched is not faster
    assert choose(measured, max_error=0.5)["a"].chosen.low_rank == 4
    assert choose(measured, max_error=0.0)["a"].chosen.low_rank == 0


def test_parameters_go_where_they_help_most():
    measured = {
        "a": ways((4, 0.9, 100, 0.1), (8, 0.2, 200, 0.2)),
        "b": ways((4, 0.3, 100, 0.1), (8, 0.25, 200, 0.2)),
    }
    assert {n: c.chosen.low_rank for n, c in choose(measured, max_parameters=300).items()} == {
        "a": 8,
        "b": 4,
    }
    assert [c.chosen.low_rank for c in choose(measured, max_parameters=10**6).values()] == [0, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(1, 64), st.floats(0.01, 1), st.integers(1, 999), st.floats(0.1, 2)
            ),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 4000),
)
def test_budgets_are_kept_and_choices_repeatable(rows, budget):
    measured = {f"layer{i}": ways(*of) for i, of in enumerate(rows)}
    least = sum(min(way.parameters for way in of) for of in measured.values())
    if budget < least:
        with pytest.raises(ConfigError, match=f"max_parameters={budget}: the smallest .* {least} "):
            choose(measured, max_parameters=budget)
        return
    plan = choose(measured, max_parameters=budget)
    assert sum(choice.chosen.parameters for choice in plan.values()) <= budget
    assert plan == choose(measured, max_parameters=budget)


def test_a_plan_is_applied():
    own = model()
    measured = {
        name: measure(layer, torch.randn(8, 32), [4, 8], repeats=1)
        for name, layer in dense_layers(own, ["2", "6"]).items()
    }
    plan = choose(measured, max_parameters=900)
    before = copy.deepcopy(own)
    made = apply(own, plan)
    assert set(made) == {name for name, choice in plan.items() if choice.chosen.low_rank}
    assert "2" in made  # the whole of it is 1,056 numbers
    layers = (own.get_submodule(name) for name in plan)
    assert sum(p.numel() for layer in layers for p in layer.parameters()) <= 900
    assert type(own[4]) is nn.Linear
    with pytest.raises(ConfigError, match="layer 2: the model has no dense layer of that name"):
        apply(own, plan)
    assert isinstance(before[2], nn.Linear)


@pytest.mark.parametrize("limits", [{}, {"max_error": 0.1, "max_parameters": 9}])
def test_exactly_one_limit(limits):
    with pytest.raises(ConfigError, match="give one of max_error and max_parameters"):
        choose({"a": ways()}, **limits)


@pytest.mark.parametrize("error", [-0.1, math.nan])
def test_an_error_that_is_none(error):
    with pytest.raises(ConfigError, match="must not be negative"):
        choose({"a": ways()}, max_error=error)
