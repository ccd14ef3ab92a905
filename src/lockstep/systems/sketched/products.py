"""The products of a sketched layer and their gradients, with signs that are pure functions.

Each sign is a bit of an integer hash, and none is drawn from a generator. So any part of a sign
matrix can be made alone, on any device and in any order, with the same bits as in the whole.

A sketch U is either dense, [r, n], or folded: signs [n], where feature i adds to entry i mod r of
the sketch (CountSketch with the buckets in turn; Charikar, Chen and Farach-Colton 2002). A folded
sketch takes n additions, where a dense one takes n r.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError

SEEDS = 2**63
"""Seeds and layers are from 0 up to here, since checkpoints keep them as int64."""

_WORD = 64
"""Signs that one evaluation of the hash gives."""
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class SignKey(NamedTuple):
    """The key of a matrix of signs, which depend on it, the row and the column.

    Attributes:
        seed: seed in 0 … 2⁶³ - 1.
        layer: number of the layer, so that layers of one seed differ; in 0 … 2⁶³ - 1.
        stream: name of the matrix, so that matrices of one layer differ.
    """

    seed: int
    layer: int
    stream: str

    def mixed(self) -> int:
        """64 bits that depend on all of the key.

        Raises:
            ConfigError: seed or layer is out of range.
        """
        for name, value in (("seed", self.seed), ("layer", self.layer)):
            if not 0 <= value < SEEDS:
                raise ConfigError(f"{name}={value}: must be in 0 … 2^63 - 1")
        text = f"{self.seed} {self.layer} {self.stream}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def hashed(key: SignKey, rows: Tensor, columns: Tensor) -> Tensor:
    """A 64-bit hash for each pair of a row and a column.

    SplitMix64 (Steele, Lea and Flood 2014) from a start that depends on key and row.

    Args:
        key: what else the hash depends on.
        rows: int64, broadcast against `columns`.
        columns: int64, on the same device.

    Returns:
        Int64, of the broadcast shape; all 64 bits are used.
    """
    start = _mix(rows * _signed(_GOLDEN) + _signed(key.mixed()))
    return _mix(start + (columns + 1) * _signed(_GOLDEN))


def packed_signs(
    key: SignKey, num_rows: int, columns: range, device: torch.device | str = "cpu"
) -> Tensor:
    """Signs as bits, eight to a byte, along columns; a set bit is -1.

    Args:
        key: what the signs depend on.
        num_rows: rows 0 … num_rows - 1.
        columns: columns to make; a range of step 1.
        device: where the bits are to be.

    Returns:
        Uint8, [num_rows, ceil(len(columns) / 8)]; bit i of byte j is column 8 j + i of the range.

    Raises:
        ConfigError: the range of columns has another step or begins below 0.
    """
    bits = _bits(key, num_rows, columns, device)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(num_rows, -1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=device)).sum(2, dtype=torch.uint8)


def unpacked(packed: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """The signs ±1 of `packed_signs`, [rows, num_columns]."""
    return _by_table(packed, (1 - 2 * _bits_of_bytes(packed.device)).to(dtype))[:, :num_columns]


def sign_matrix(
    key: SignKey,
    num_rows: int,
    columns: range,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Signs ±1, exact in every floating-point dtype.

    Args:
        key: what the signs depend on.
        num_rows: rows 0 … num_rows - 1.
        columns: columns to make; a range of step 1.
        dtype: of the result.
        device: of the result.

    Returns:
        [num_rows, len(columns)].

    Raises:
        ConfigError: the range of columns has another step or begins below 0.
    """
    return 1 - 2 * _bits(key, num_rows, columns, device).to(dtype)


def normals(key: SignKey, num_rows: int, num_columns: int) -> Tensor:
    """Standard normal numbers by the same hash, float64 on the CPU, [num_rows, num_columns].

    The transform of Box and Muller uses the mathematical library, so the bits are those of one type
    of hardware and build.
    """
    rows = torch.arange(num_rows)[:, None]
    columns = torch.arange(num_columns)[None]

    def uniform(pair: int) -> Tensor:
        """Uniform in (0, 1), from the upper 53 bits."""
        bits = (hashed(key, rows, 2 * columns + pair) >> 11) & (2**53 - 1)
        return (bits.double() + 0.5) / 2**53

    return (-2 * uniform(0).log()).sqrt() * (2 * torch.pi * uniform(1)).cos()


def _bits(key: SignKey, num_rows: int, columns: range, device: torch.device | str) -> Tensor:
    """0 and 1 as uint8, [num_rows, len(columns)]."""
    if columns.step != 1 or columns.start < 0:
        raise ConfigError(f"columns={columns}: must be a range from 0 or more, of step 1")
    first, stop = columns.start // _WORD, -(-columns.stop // _WORD)
    rows = torch.arange(num_rows, device=device)[:, None]
    words = hashed(key, rows, torch.arange(first, max(first, stop), device=device)[None])
    shifts = torch.arange(0, _WORD, 8, device=device)  # whatever the machine's order of bytes
    packed = ((words[..., None] >> shifts) & 255).to(torch.uint8).flatten(1)
    bits = _by_table(packed, _bits_of_bytes(packed.device).to(torch.uint8))
    skipped = columns.start - first * _WORD
    return bits[:, skipped : skipped + len(columns)]


def _bits_of_bytes(device: torch.device) -> Tensor:
    """The bits of each byte, the lowest first, int64 [256, 8]."""
    return (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1


def _by_table(packed: Tensor, table: Tensor) -> Tensor:
    """Each byte replaced by its eight entries of a table, [rows, 8 × bytes]."""
    return table.index_select(0, packed.flatten().int()).view(packed.shape[0], -1)


def _mix(word: Tensor) -> Tensor:
    """The finalizer of SplitMix64; int64 wraps around like uint64."""
    word = (word ^ _shifted(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shifted(word, 27)) * _signed(_MIX_2)
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, count: int) -> Tensor:
    """A logical shift to the right; that of int64 copies the sign bit."""
    return (word >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


class Fused(NamedTuple):
    """The operands of a layer's fused product, except its input.

    Attributes:
        S1: [r, in], trained.
        S2: [r, out], trained.
        U1: sketch of the output's features.
        U2: sketch of the input's features.
        bias: [out], or None.
        scale: factor of the product.
        first_in: number of the first input feature.
        first_out: the same for the output.
    """

    S1: Tensor
    S2: Tensor
    U1: Tensor
    U2: Tensor
    bias: Tensor | None
    scale: float
    first_in: int = 0
    first_out: int = 0


def into_sketch(x: Tensor, U: Tensor, rank: int, first: int = 0) -> Tensor:
    """The product x Uᵀ.

    Args:
        x: [N, n].
        U: dense [rank, n], or folded [n].
        rank: size of the sketch.
        first: number of the first of the n features.

    Returns:
        [N, rank].
    """
    if U.dim() == 2:
        return x @ U.t()
    before = first % rank
    padded = F.pad(x * U, (before, -(before + len(U)) % rank))
    return padded.view(x.shape[0], -1, rank).sum(1)


def out_of_sketch(h: Tensor, U: Tensor, first: int = 0) -> Tensor:
    """H U, the transpose of `into_sketch`: [N, rank] to [N, n]."""
    if U.dim() == 2:
        return h @ U
    before = first % h.shape[1]
    times = -(-(before + len(U)) // h.shape[1])
    return h.repeat(1, times)[:, before : before + len(U)] * U


def plain(x: Tensor, parts: Fused) -> Tensor:
    """The sum b + scale · (x S1ᵀ U1 + x U2ᵀ S2), [N, in] to [N, out], as autograd can follow it."""
    h_1, h_2 = x @ parts.S1.t(), into_sketch(x, parts.U2, len(parts.S2), parts.first_in)
    return from_sketch(h_1, h_2, parts)


def from_sketch(h_1: Tensor, h_2: Tensor, parts: Fused) -> Tensor:
    """The sum b + scale · (H1 U1 + H2 S2), [N, r] each to [N, out]."""
    scale = parts.scale
    if parts.U1.dim() == 2:
        if parts.bias is None:
            y = torch.mm(h_1 * scale, parts.U1)
        else:
            y = torch.addmm(parts.bias, h_1, parts.U1, alpha=scale)
    else:
        y = out_of_sketch(h_1 * scale, parts.U1, parts.first_out)
        y = y if parts.bias is None else y + parts.bias
    return torch.addmm(y, h_2, parts.S2, alpha=scale)


def sketched_rows(x: Tensor, parts: Fused) -> Tensor:
    """The first product, x A: [..., in] to [..., 2 r]."""
    rows = x.reshape(-1, x.shape[-1])
    h_2 = into_sketch(rows, parts.U2, len(parts.S1), parts.first_in)
    return torch.cat([rows @ parts.S1.t(), h_2], 1).view(*x.shape[:-1], 2 * len(parts.S1))


def expanded_rows(h: Tensor, parts: Fused) -> Tensor:
    """The second product, b + c h B: [..., 2 r] to [..., out]."""
    h_1, h_2 = h.reshape(-1, h.shape[-1]).chunk(2, dim=1)
    y = from_sketch(h_1, h_2, parts)
    return y.view(*h.shape[:-1], y.shape[-1])


class FusedProduct(torch.autograd.Function):
    """`plain` with fewer passes over memory, forward and backward.

    Autograd would add two gradients of x and two outputs in passes of their own, which is a quarter
    of the time where the sketch is narrow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Any) -> Tensor:
        """As `plain`; `parts` are those of a `Fused`."""
        p = Fused(*parts)
        h_2 = into_sketch(x, p.U2, len(p.S2), p.first_in)
        h_1 = x @ p.S1.t()
        if p.U1.dim() == 2 and p.bias is not None:
            y = torch.addmm(p.bias, h_1, p.U1, alpha=p.scale)
        else:
            y = out_of_sketch(h_1.mul_(p.scale), p.U1, p.first_out)
            y = y if p.bias is None else y.add_(p.bias)
        ctx.save_for_backward(x, h_2, p.S1, p.S2, p.U1, p.U2)
        ctx.numbers = (p.scale, p.first_in, p.first_out)
        return y.addmm_(h_2, p.S2, alpha=p.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of x, S1, S2 and the bias; U has none."""
        x, h_2, S1, S2, U1, U2 = ctx.saved_tensors
        scale, first_in, first_out = ctx.numbers
        rank = len(S2)
        needs_x, needs_1, needs_2, _, _, needs_bias = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # second derivatives need what h_2 depends on
            h_2 = into_sketch(x, U2, rank, first_in)
        of_x = of_1 = of_2 = None
        g_1 = into_sketch(grad, U1, rank, first_out) * scale if needs_x or needs_1 else None
        if needs_x:
            assert g_1 is not None
            g_2 = grad @ S2.t() * scale
            if U2.dim() == 2:
                of_x = torch.mm(g_1, S1).addmm_(g_2, U2)
            else:
                of_x = out_of_sketch(g_2, U2, first_in).addmm_(g_1, S1)
        if needs_1:
            assert g_1 is not None
            of_1 = g_1.t() @ x
        if needs_2:
            of_2 = (h_2 * scale).t() @ grad
        of_bias = grad.sum(0) if needs_bias else None
        return (of_x, of_1, of_2, None, None, of_bias, None, None, None)
