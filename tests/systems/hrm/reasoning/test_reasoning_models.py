from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.systems.hrm.reasoning import references
from torch import Tensor

from lockstep.errors import ConfigError, TaskError
from lockstep.systems.hrm.reasoning import (
    HierarchicalModel,
    ReasoningModel,
    RecursiveModel,
    Sizes,
    State,
    exact,
    halting_loss,
    stablemax_cross_entropy,
)

SIZES = Sizes(vocabulary=5, length=4, dim=8, num_heads=2, multiple=4, puzzle_dim=11)
"""Rows of 11 become two leading tokens of 8."""

MODELS: dict[str, Callable[[Sizes], ReasoningModel]] = {
    "hierarchical": lambda sizes: HierarchicalModel(sizes, 2, 1),
    "hierarchical, more cycles": lambda sizes: HierarchicalModel(sizes, 1, 1, 3, 3),
    "hierarchical, one step": lambda sizes: HierarchicalModel(sizes, 1, 1, 1, 1),
    "recursive": lambda sizes: RecursiveModel(sizes, 2, 3, 2),
    "recursive, one recursion": lambda sizes: RecursiveModel(sizes, 1, 1, 3),
    "recursive, mixing by layers": lambda sizes: RecursiveModel(sizes, 2, 2, 2, "mlp"),
}


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[Sizes], ReasoningModel]:
    torch.manual_seed(0)
    return MODELS[request.param]


def inputs_of(sizes: Sizes, batch: int = 2) -> Tensor:
    return torch.randint(sizes.vocabulary, (batch, sizes.length))


def as_double(model: ReasoningModel) -> ReasoningModel:
    """The model in float64, with weights of halting, which are 0 at first.

    Its tables, whose float32 has tests of its own, are those of the reference.
    """
    model = model.double()
    torch.nn.init.normal_(model.halting.weight)
    if model.tables is not None:
        half = model.tables.shape[-1] // 2
        ones = torch.ones(model.sizes.positions, 2 * half, dtype=torch.float64)
        ones[:, half:] = 0  # turned, (1, 0) is (cos, sin)
        turned = references.turned(ones)
        model.tables = torch.stack([turned[:, :half], turned[:, half:]]).repeat(1, 1, 2)
    return model


def reference(model: ReasoningModel, state: State, inputs: Tensor, rows: Tensor | None):
    if isinstance(model, HierarchicalModel):
        return references.hierarchical(model, state["z_H"], state["z_L"], inputs, rows)
    assert isinstance(model, RecursiveModel)
    return references.recursive(model, state["z_H"], state["z_L"], inputs, rows)


def test_a_segment_and_its_gradient_are_those_of_the_formulas(make) -> None:
    model = as_double(make(SIZES))
    inputs = inputs_of(SIZES)
    rows = torch.randn(2, 11, dtype=torch.float64, requires_grad=True)
    state = {key: torch.randn_like(value) for key, value in model.initial(2).items()}
    leaves = [*model.parameters(), rows]

    new, logits, q_halt, q_continue = model(state, inputs, rows)
    q = [q_halt] if q_continue is None else [q_halt, q_continue]
    z_H, z_L, expected, expected_q = reference(model, state, inputs, rows)

    def close(found: object, of: object) -> None:
        torch.testing.assert_close(found, of, rtol=1e-7, atol=1e-9)

    close([new["z_H"], new["z_L"]], [z_H.detach(), z_L.detach()])
    close(logits, expected)
    close(torch.stack(q, 1), expected_q.float())
    weights = torch.randn_like(logits)

    def gradients(logits: Tensor, q: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad((logits * weights).sum() + q.square().sum(), leaves)]

    close(gradients(logits, torch.stack(q, 1)), gradients(expected, expected_q.float()))


def test_states_go_on_from_segment_to_segment_as_constants(make) -> None:
    model = as_double(make(SIZES))
    inputs = inputs_of(SIZES)
    state = model.initial(2)
    once = model(state, inputs)[0]
    assert not any(value.requires_grad for value in once.values())
    twice = model(once, inputs)[0]
    expected = reference(model, once, inputs, None)
    torch.testing.assert_close(twice["z_H"], expected[0].detach())
    assert not torch.equal(once["z_H"], twice["z_H"])


def test_no_row_is_a_row_of_zeros(make) -> None:
    model = make(SIZES)
    inputs, state = inputs_of(SIZES), model.initial(2)
    without, zeros = model(state, inputs), model(state, inputs, torch.zeros(2, 11))
    assert torch.equal(without[1], zeros[1])
    assert not torch.equal(without[1], model(state, inputs, torch.ones(2, 11))[1])


def test_answers_have_the_shape_of_inputs(make) -> None:
    for sizes in (SIZES, Sizes(5, 4, 8, 2, multiple=4), Sizes(5, 4, 8, 2, 4.0, 4, 3, 5)):
        model = make(sizes)
        state, logits, q_halt, q_continue = model(model.initial(3), inputs_of(sizes, 3))
        assert logits.shape == (3, 4, 5)
        assert state["z_L"].shape == (3, sizes.positions, 8)
        assert q_halt.shape == (3,)
        assert (q_continue is None) == isinstance(model, RecursiveModel)


def test_a_model_hardly_halts_at_first(make) -> None:
    model = make(SIZES)
    _, _, q_halt, q_continue = model(model.initial(2), inputs_of(SIZES))
    assert q_halt.tolist() == [-5, -5]
    assert q_continue is None or q_continue.tolist() == [-5, -5]


def test_initial_states_are_fixed_and_saved(make) -> None:
    model = make(SIZES)
    assert {"initial_H", "initial_L"} <= model.state_dict().keys()
    assert not {"initial_H", "initial_L"} & dict(model.named_parameters()).keys()
    assert "tables" not in model.state_dict()
    state = model.initial(3)
    assert torch.equal(state["z_H"], model.initial_H.expand(3, SIZES.positions, 8))
    assert torch.equal(state["z_L"], model.initial_L.expand(3, SIZES.positions, 8))
    assert not torch.equal(model.initial_H, model.initial_L)
    state["z_H"].zero_()
    assert model.initial_H.any()


def test_every_parameter_is_trained_under_autocast(make) -> None:
    model = make(SIZES)
    rows = torch.randn(2, 11, requires_grad=True)
    inputs = inputs_of(SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        state, logits, q_halt, q_continue = model(model.initial(2), inputs, rows)
        loss = stablemax_cross_entropy(logits, inputs).sum()
        for q in (q_halt, q_continue):
            if q is not None:
                loss = loss + halting_loss(q, exact(logits, inputs)).sum()
    assert logits.dtype == torch.bfloat16
    assert q_halt.dtype == torch.float32
    assert state["z_H"].dtype == torch.float32  # as was given
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    grads["rows"] = rows.grad
    for name, grad in grads.items():
        assert grad is not None, name
        assert grad.dtype == torch.float32
        assert grad.any(), name
        assert grad.isfinite().all(), name


def test_autocast_is_close_to_float32(make) -> None:
    model, inputs = make(SIZES), inputs_of(SIZES)
    exactly = model(model.initial(2), inputs)[1]
    with torch.autocast("cpu", torch.bfloat16):
        state, logits, *_ = model(model.initial(2, torch.bfloat16), inputs)
    assert state["z_H"].dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), exactly, rtol=0, atol=0.15)


def test_float32_holds_the_states_of_autocast_without_loss(make) -> None:
    model, inputs = make(SIZES), inputs_of(SIZES)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            state = model.initial(2, dtype)
            for _ in range(3):
                state, logits, *_ = model(state, inputs)
        found.append(logits)
    assert torch.equal(*found)


def test_a_model_is_a_function_of_the_seed(make) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model = make(SIZES)
        inputs = inputs_of(SIZES)
        logits = model(model.initial(2), inputs, torch.ones(2, 11))[1]
        logits.square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 5
    assert all(map(torch.equal, *found))


def test_samples_do_not_see_one_another(make) -> None:
    model = as_double(make(SIZES))
    inputs, rows = inputs_of(SIZES, 3), torch.randn(3, 11, dtype=torch.float64)
    together = model(model.initial(3), inputs, rows)[1]
    alone = model(model.initial(1), inputs[1:2], rows[1:2])[1]
    torch.testing.assert_close(together[1:2], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hierarchical", "recursive, mixing by layers"])
def test_a_segment_is_one_graph_for_the_compiler(name: str) -> None:
    """A value that the host had to wait for would break the graph."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](SIZES), inputs_of(SIZES)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (m(model.initial(2), inputs)[1] for m in (compiled, model))
    assert torch.equal(found, expected)


def test_the_published_size_has_the_published_parameters() -> None:
    with torch.device("meta"):
        model = HierarchicalModel(Sizes(vocabulary=11, length=81, puzzle_dim=512))
    assert sum(p.numel() for p in model.parameters()) == 27_275_266
    assert model.sizes.positions == 82


def test_the_recursive_model_has_one_network_of_two_blocks() -> None:
    with torch.device("meta"):
        model = RecursiveModel(Sizes(vocabulary=11, length=81, puzzle_dim=512, num_leading=16))
    block = 4 * 512 * 512 + 3 * 512 * 1536
    assert sum(p.numel() for p in model.parameters()) == 2 * block + 2 * 11 * 512 + 513


def test_plain_attention_gives_the_same_answers() -> None:
    found = []
    for kind in ("fused", "plain"):
        torch.manual_seed(0)
        sizes = Sizes(5, 4, 8, 2, multiple=4, attention=kind)
        model = HierarchicalModel(sizes)
        found.append(model(model.initial(1), torch.tensor([[1, 2, 3, 4]]))[1])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: Sizes(0, 4), "vocabulary=0: must be at least 1"),
        (lambda: Sizes(5, 4, puzzle_dim=-1), "puzzle_dim=-1: must be at least 0"),
        (lambda: Sizes(5, 4, 8, puzzle_dim=9, num_leading=1), "num_leading=1: .* at least 2"),
        (lambda: Sizes(5, 4, num_leading=2), "num_leading=2: needs a puzzle_dim"),
        (lambda: HierarchicalModel(Sizes(5, 4, 9, 2)), "dim=9: must be a multiple"),
        (lambda: HierarchicalModel(Sizes(5, 4, 8, 0)), "num_heads=0: must be at least 1"),
        (lambda: HierarchicalModel(SIZES, h_cycles=0), "h_cycles=0: must be at least 1"),
        (lambda: HierarchicalModel(SIZES, 1, 0), "num_blocks=0: must be at least 1"),
        (lambda: RecursiveModel(SIZES, num_updates=0), "num_updates=0: must be at least 1"),
        (lambda: RecursiveModel(SIZES, mixing="conv"), "mixing='conv': must be"),  # type: ignore[arg-type]
    ],
)
def test_bad_sizes_of_models_are_refused(make_model, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model()


@pytest.mark.parametrize(
    ("inputs", "rows", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.long), None, r"inputs are torch.int64 \[2, 5\]"),
        (torch.zeros(2, 4), None, "inputs are torch.float32"),
        (torch.zeros(3, 4, dtype=torch.long), None, r"z_H is \[2, 6, 8\], must be \[3, 6, 8\]"),
        (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 8), r"rows are \[2, 8\], must be"),
    ],
)
def test_bad_inputs_are_refused(inputs: Tensor, rows: Tensor | None, message: str) -> None:
    model = RecursiveModel(SIZES)
    with pytest.raises(TaskError, match=message):
        model(model.initial(2), inputs, rows)


def test_rows_and_states_that_have_no_place_are_refused() -> None:
    model = RecursiveModel(Sizes(5, 4, 8, 2, multiple=4))
    inputs = torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(TaskError, match="set puzzle_dim"):
        model(model.initial(2), inputs, torch.zeros(2, 8))
    with pytest.raises(TaskError, match="z_L is missing"):
        model({"z_H": model.initial(2)["z_H"]}, inputs)
