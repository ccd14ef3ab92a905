"""Blocks of reasoning models: attention and gated layers, with norms after the residual sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError

AttentionKind = Literal["fused", "plain"]

_CUT = 2.0
"""Standard deviations of the normal distribution at which initial values are truncated."""


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        ConfigError: names the first one.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}={size}: must be at least 1")


def truncated_std(cut: float = _CUT) -> float:
    """Standard deviation of a standard normal that is truncated to [-cut, cut].

    Its variance is 1 - 2 · cut · φ(cut) / (2 Φ(cut) - 1), with the density φ and the distribution
    Φ of the normal (Johnson, Kotz and Balakrishnan 1994, "Continuous Univariate Distributions",
    volume 1, chapter 13). For 2 it is 0.8796….
    """
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor from a normal truncated at two of its standard deviations.

    Unlike in `torch.nn.init.trunc_normal_`, `std` is that of the truncated distribution, so the
    normal before truncation is wider by 1 / `truncated_std()`. Samples come from torch's global
    generator by inversion, so always one number for each element.

    Args:
        tensor: any shape, of floating-point numbers; changed in place.
        std: standard deviation of its elements; 0 fills with zeros.

    Returns:
        `tensor`.
    """
    wide, bound = std / truncated_std(), math.erf(_CUT / math.sqrt(2))
    with torch.no_grad():
        drawn = torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        drawn.uniform_(-bound, bound).erfinv_().mul_(math.sqrt(2) * wide)
        # The rounded inverse may be slightly outside at the ends.
        return tensor.copy_(drawn.clamp_(-_CUT * wide, _CUT * wide))


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer without bias; weights [out, in] of standard deviation 1/√in_features."""
    layer = nn.Linear(in_features, out_features, bias=False)
    truncated_normal_(layer.weight, in_features**-0.5)
    return layer


def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of a table, times √dim: unit variance for rows of standard deviation 1/√dim.

    Args:
        table: [num, dim].
        ids: integers of any shape.

    Returns:
        [..., dim], of the table's dtype.
    """
    rows: Tensor = table(ids)
    return rows * math.sqrt(table.embedding_dim)


def rms_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Divide by √(mean(x²) + eps) along the last dim, without parameters, in float32.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467).

    Args:
        x: [..., dim]; float64 stays float64.
        eps: added to the mean of squares.

    Returns:
        [..., dim], of the dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype)


def rotary_tables(num_positions: int, head_dim: int, theta: float = 10000.0) -> Tensor:
    """Cosines and sines of rotary positions: [2, num_positions, head_dim], float32.

    Su et al. 2021, "RoFormer" (arXiv:2104.09864): pair i of position p is rotated by the angle
    p · theta^(-2i / head_dim). The two elements of pair i are i and i + head_dim / 2, so both
    halves of a table are equal.

    Raises:
        ConfigError: head_dim is odd.
    """
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim}: must be even, for rotary positions turn pairs")
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = torch.outer(positions, theta ** (-pairs / head_dim)).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, tables: Tensor) -> Tensor:
    """Queries or keys, rotated by their positions; computed in float32.

    Args:
        x: [..., positions, head_dim].
        tables: from `rotary_tables`.

    Returns:
        Of the shape and dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, tables.dtype))
    first, second = wide.chunk(2, -1)
    rotated = wide * tables[0] + torch.cat([-second, first], -1) * tables[1]
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Attention of every token to all tokens of its sample, by several heads, without biases.

    Attributes:
        qkv: linear layer to the queries, keys and values of all heads.
        out: linear layer after the heads.
        kind: `fused`: `F.scaled_dot_product_attention`, which selects a kernel; `plain`: products
            and a softmax, whose order of summation does not depend on a kernel.
    """

    def __init__(self, dim: int, num_heads: int, kind: AttentionKind = "fused") -> None:
        """A layer with random initial values.

        Raises:
            ConfigError: dim is not a multiple of num_heads, or there is no such kind.
        """
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        if dim % num_heads:
            raise ConfigError(f"dim={dim}: must be a multiple of num_heads={num_heads}")
        if kind not in get_args(AttentionKind):
            raise ConfigError(f"attention={kind!r}: must be fused or plain")
        self.num_heads = num_heads
        self.kind: AttentionKind = kind
        self.qkv, self.out = linear(dim, 3 * dim), linear(dim, dim)

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        """[B, S, dim] to [B, S, dim], with tables [2, S, head_dim] from `rotary_tables`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, head_dim]
        q, k = rotate(q, tables), rotate(k, tables)
        if self.kind == "plain":
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return joined


def gated_width(dim: int, expansion: float, multiple: int = 256) -> int:
    """The inner width of `SwiGLU`: expansion · dim · 2/3, rounded up to a multiple."""
    return max(1, math.ceil(round(expansion * dim * 2 / 3) / multiple)) * multiple


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) along the last dim (Shazeer 2020, arXiv:2002.05202).

    Attributes:
        gate_up: both inner layers as one linear layer.
        down: linear layer back to dim.
    """

    def __init__(self, dim: int, expansion: float = 4.0, multiple: int = 256) -> None:
        """A layer with random initial values, of inner width `gated_width`.

        Raises:
            ConfigError: a size is not positive.
        """
        super().__init__()
        check_sizes(dim=dim, multiple=multiple)
        if not 0 < expansion < math.inf:
            raise ConfigError(f"expansion={expansion}: must be a number above 0")
        width = gated_width(dim, expansion, multiple)
        self.gate_up, self.down = linear(dim, 2 * width), linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        narrow: Tensor = self.down(F.silu(gate) * up)
        return narrow


class Block(nn.Module):
    """A transformer block with norms after its sums: h = rms(h + f(h)), twice.

    Attributes:
        mixer: mixes tokens: `Attention`, or a `SwiGLU` along the tokens.
        gated: mixes each token's features.
    """

    def __init__(self, mixer: Attention | SwiGLU, gated: SwiGLU) -> None:
        super().__init__()
        self.mixer, self.gated = mixer, gated

    def forward(self, h: Tensor, tables: Tensor | None) -> Tensor:
        """[B, S, dim] to [B, S, dim]; attention needs the tables of positions."""
        if isinstance(self.mixer, Attention):
            assert tables is not None
            h = rms_norm(h + self.mixer(h, tables).to(h.dtype))
        else:
            # The norm is along the tokens too: the published code transposes the whole half block.
            transposed = h.transpose(1, 2)
            h = rms_norm(transposed + self.mixer(transposed).to(h.dtype)).transpose(1, 2)
        return rms_norm(h + self.gated(h).to(h.dtype))


class Blocks(nn.Module):
    """Blocks after the sum of a state and its injection."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, h: Tensor, injection: Tensor, tables: Tensor | None) -> Tensor:
        """A new state [B, S, dim] from the state and its injection, of these shapes."""
        h = h + injection
        for block in self.blocks:
            h = block(h, tables)
        return h
