"""Attention in time linear in the number of tokens, by random features."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.sketched.module import Sketched, check_floats, check_positive
from lockstep.systems.sketched.products import SignKey, normals

Kernel = Literal["softmax", "relu"]

_EPS = {"softmax": 1e-6, "relu": 1e-3}
"""Added to features, so that no row of the implied attention matrix is all zero."""


class RandomFeatureAttention(Sketched):
    """Multi-head self-attention by positive random features (FAVOR+).

    Choromanski et al. 2021, "Rethinking attention with Performers" (arXiv:2009.14794). With
    features φ of the queries and keys, φ(q)·φ(k) is the kernel of the pair, for `softmax` in
    expectation exp(q·k / √d), so attention is φ(Q) (φ(K)ᵀ V), divided by φ(Q) (φ(K)ᵀ 1).

    The projections are a function of seed and layer, made without torch's global generator. A
    checkpoint has the two integers `sketch_key`.

    Attributes:
        qkv: queries, keys and values of all heads, from one linear layer.
        out: linear layer behind the heads.
        projections: [heads, features, head_dim], not trained.
    """

    projections: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_features: int = 128,
        kernel: Kernel = "softmax",
        causal: bool = False,
        bias: bool = True,
        *,
        orthogonal: bool = True,
        chunk: int = 64,
        seed: int | None = None,
        layer: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random start values.

        Args:
            embed_dim: size of a token; a multiple of `num_heads`.
            num_heads: number of heads.
            num_features: random features of a head; more of them come closer to exact attention.
            kernel: `softmax`, or `relu` for max(0, w·q) as features.
            causal: whether a token sees itself and those before it only.
            bias: whether the linear layers have biases.
            orthogonal: whether projections are orthogonal in blocks, which lowers their variance.
            chunk: tokens that causal attention takes at a time.
            seed: seed of the projections; None draws one from torch's global generator.
            layer: number of the layer among those of the same seed.
            dtype: of the parameters.
            device: of the parameters.

        Raises:
            ConfigError: a size is not positive or does not divide, or there is no such kernel.
        """
        super().__init__()
        check_positive(
            embed_dim=embed_dim, num_heads=num_heads, num_features=num_features, chunk=chunk
        )
        if embed_dim % num_heads:
            raise ConfigError(f"embed_dim={embed_dim}: must be a multiple of num_heads={num_heads}")
        if kernel not in get_args(Kernel):
            raise ConfigError(f"kernel={kernel!r}: must be softmax or relu")
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.num_features, self.orthogonal = num_features, orthogonal
        self.kernel: Kernel = kernel
        self.causal, self.chunk = causal, chunk
        self.qkv: nn.Module = nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype)
        self.out: nn.Module = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.keep_key(seed, layer, device)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of the tokens of each sample to one another.

        Args:
            x: [N, tokens, embed_dim].

        Returns:
            [N, tokens, embed_dim].

        Raises:
            TaskError: x is of integers.
        """
        check_floats("the input of RandomFeatureAttention", x)
        num, tokens, _ = x.shape
        split = self.qkv(x).view(num, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [N, heads, tokens, head_dim]
        mixed = self.attend(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(num, tokens, -1))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of the heads, without linear layers: [N, heads, tokens, head_dim] each."""
        q, k = self.features(q, -1), self.features(k, (-1, -2))
        ones = torch.ones_like(v[..., :1])
        v = torch.cat([v, ones], -1)  # the last column makes the denominator
        sums = _causal(q, k, v, self.chunk) if self.causal else q @ (k.transpose(-1, -2) @ v)
        return sums[..., :-1] / sums[..., -1:]

    def features(self, x: Tensor, stabilised: int | tuple[int, ...]) -> Tensor:
        """Positive features of queries or keys: [N, heads, tokens, num_features].

        Args:
            x: [N, heads, tokens, head_dim].
            stabilised: dims over which the greatest exponent is subtracted. A factor of a query, or
                of all keys of a sample, cancels in the attention.
        """
        projected: Tensor = x * self.head_dim**-0.25 @ self.projections.transpose(-1, -2)
        if self.kernel == "relu":
            return projected.relu() + _EPS["relu"]
        half_squares = x.square().sum(-1, keepdim=True) / (2 * math.sqrt(self.head_dim))
        exponents: Tensor = projected - half_squares
        exponents = exponents - exponents.detach().amax(stabilised, keepdim=True)
        return exponents.exp() + _EPS["softmax"]

    def made(self, seed: int, layer: int) -> dict[str, Tensor]:
        """The projections, made on the CPU in float64 and then rounded, the same on all devices."""
        shape = (self.num_heads * self.num_features, self.head_dim)
        drawn = normals(SignKey(seed, layer, "projections"), *shape)
        drawn = drawn.view(self.num_heads, self.num_features, self.head_dim)
        if self.orthogonal:
            norms = drawn.norm(dim=-1, keepdim=True)
            blocks = torch.split(drawn, self.head_dim, 1)
            drawn = torch.cat([_orthogonal(block) for block in blocks], 1) * norms
        like = next(self.parameters())  # `qkv` may have been sketched itself
        return {"projections": drawn.to(like.device, like.dtype)}

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return (
            f"num_heads={self.num_heads}, num_features={self.num_features}, kernel={self.kernel}, "
            f"causal={self.causal}"
        )


def _orthogonal(rows: Tensor) -> Tensor:
    """Random rows made orthogonal, uniformly distributed over all rotations."""
    Q, R = torch.linalg.qr(rows.transpose(-1, -2))
    # LAPACK's signs depend on the rows, which would make the kernel's estimate biased.
    signs: Tensor = R.diagonal(dim1=-2, dim2=-1).sign()
    rotated: Tensor = Q * signs.unsqueeze(-2)
    return rotated.transpose(-1, -2)


def _causal(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The masked product tril(q kᵀ) v, in memory linear in the number of tokens.

    Args:
        q: [..., tokens, features].
        k: [..., tokens, features].
        v: [..., tokens, values].
        chunk: tokens at a time.
    """
    state = torch.zeros_like(k[..., :1, :].transpose(-1, -2) @ v[..., :1, :])
    parts = []
    chunks = [torch.split(tensor, chunk, -2) for tensor in (q, k, v)]
    for q_part, k_part, v_part in zip(*chunks, strict=True):
        inside = (q_part @ k_part.transpose(-1, -2)).tril()
        parts.append(q_part @ state + inside @ v_part)
        state = state + k_part.transpose(-1, -2) @ v_part
    return torch.cat(parts, -2)
