from __future__ import annotations

import math

import pytest
import torch
from tests.systems.hrm.reasoning import references
from torch import nn

from lockstep.errors import ConfigError
from lockstep.systems.hrm.reasoning.blocks import (
    Attention,
    Block,
    Blocks,
    SwiGLU,
    embed,
    gated_width,
    linear,
    rms_norm,
    rotary_tables,
    rotate,
    truncated_normal_,
    truncated_std,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_the_std_of_a_truncated_normal_is_that_of_its_density() -> None:
    """The variance by the midpoint rule over the density itself."""
    count = 200_000
    xs = [-2 + 4 * (i + 0.5) / count for i in range(count)]
    density = [math.exp(-x * x / 2) for x in xs]
    variance = sum(x * x * d for x, d in zip(xs, density, strict=True)) / sum(density)
    assert truncated_std(2.0) == pytest.approx(variance**0.5, abs=1e-9)


@pytest.mark.parametrize("std", [1.0, 0.03])
def test_start_values_have_the_std_that_is_asked_for(std: float) -> None:
    values = truncated_normal_(torch.empty(400_000), std)
    # The variance of the estimate follows from the fourth moment, which is below 3 std⁴.
    assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * 400_000))
    assert values.mean().abs().item() < 5 * std / math.sqrt(400_000)
    bound = 2 * std / truncated_std()
    assert 0.99 * bound < values.abs().max().item() <= bound * (1 + 1e-6)
    # A fifth of all, as the distribution says, is within this distance of 0.
    inside = math.erf(0.25 / math.sqrt(2)) / math.erf(2 / math.sqrt(2))
    assert (values.abs() < bound / 8).double().mean().item() == pytest.approx(inside, abs=0.004)


def test_a_std_of_0_gives_zeros() -> None:
    assert torch.equal(truncated_normal_(torch.ones(5), 0.0), torch.zeros(5))


def test_linear_layers_begin_with_a_std_of_their_width() -> None:
    assert linear(400, 600).weight.std().item() == pytest.approx(400**-0.5, rel=0.01)


def test_embedded_tokens_are_of_unit_variance() -> None:
    table = nn.Embedding(2000, 64)
    truncated_normal_(table.weight, 64**-0.5)
    found = embed(table, torch.arange(2000))
    assert torch.equal(found, table.weight * 8)
    assert found.std().item() == pytest.approx(1, rel=0.02)


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = drawn(2, 3, 8)
    torch.testing.assert_close(rms_norm(x), references.rms(x), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(rms_norm, (x[0].requires_grad_(),))


def test_rms_norm_of_bf16_is_computed_in_float32() -> None:
    x = torch.randn(4, 512).bfloat16()
    assert torch.equal(rms_norm(x), rms_norm(x.float()).bfloat16())


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_rotary_positions_are_products_of_complex_numbers() -> None:
    x = drawn(82, 64)
    found = rotate(x, rotary_tables(82, 64))
    torch.testing.assert_close(found, references.turned(x), rtol=0, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = drawn(1, 16).expand(30, 16), drawn(1, 16).expand(30, 16)
    tables = rotary_tables(30, 16)
    scores = rotate(q, tables) @ rotate(k, tables).T
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_attention_is_that_of_each_head_and_position(kind: str) -> None:
    layer = Attention(24, 3, kind).double()
    x, tables = drawn(2, 7, 24), rotary_tables(7, 8)
    torch.testing.assert_close(layer(x, tables), references.attention(layer, x), rtol=0, atol=1e-6)


def test_both_kinds_of_attention_agree_with_their_gradients() -> None:
    tables, x = rotary_tables(9, 8), torch.randn(2, 9, 16)
    found = []
    for kind in ("fused", "plain"):
        torch.manual_seed(1)
        layer = Attention(16, 2, kind)
        out = layer(x, tables)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*layer.parameters()])])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "expansion", "multiple", "width"),
    [(512, 4, 256, 1536), (97, 4, 256, 512), (96, 4, 256, 256), (32, 4, 16, 96), (1, 0.1, 8, 8)],
)
def test_inner_widths_are_rounded_up(dim: int, expansion: float, multiple: int, width: int) -> None:
    assert gated_width(dim, expansion, multiple) == width
    assert SwiGLU(dim, expansion, multiple).down.weight.shape == (dim, width)


def test_a_gated_layer_is_its_formula_and_has_its_gradient() -> None:
    layer, x = SwiGLU(6, 2.0, 4).double(), drawn(2, 3, 6)
    torch.testing.assert_close(layer(x), references.swiglu(layer, x), rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(),))


def mixers(dim: int, tokens: int) -> list[Attention | SwiGLU]:
    return [Attention(dim, 2), SwiGLU(tokens, 4.0, 4)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_block_norms_behind_each_sum(number: int) -> None:
    layer = Block(mixers(8, 5)[number], SwiGLU(8, 4.0, 4)).double()
    h = drawn(2, 5, 8)
    found = layer(h, rotary_tables(5, 4))
    torch.testing.assert_close(found, references.block(layer, h), rtol=0, atol=1e-6)


def test_what_is_injected_is_added_once() -> None:
    layers = Blocks([Block(mixers(8, 5)[i], SwiGLU(8, 4.0, 4)) for i in (0, 1)]).double()
    h, injection = drawn(2, 5, 8), drawn(2, 5, 8)
    expected = references.blocks(layers, h + injection)
    torch.testing.assert_close(
        layers(h, injection, rotary_tables(5, 4)), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(10, 3), "dim=10: must be a multiple of num_heads=3"),
        (lambda: Attention(8, 0), "num_heads=0: must be at least 1"),
        (lambda: Attention(8, 2, "flash"), "attention='flash': must be fused or plain"),
        (lambda: SwiGLU(8, 0), "expansion=0: must be a number above 0"),
        (lambda: SwiGLU(8, math.nan), "expansion=nan: must be a number above 0"),
        (lambda: SwiGLU(8, multiple=0), "multiple=0: must be at least 1"),
        (lambda: rotary_tables(4, 5), "head_dim=5: must be even"),
    ],
)
def test_bad_sizes_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
