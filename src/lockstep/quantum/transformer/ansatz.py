"""The trainable unitary of a register: rotations and CNOTs in bricks around a ring of qubits.

A layer has one block for each pair of `pairs`. A block on (c, t) rotates both qubits and applies
CNOT(c, t), twice. A rotation is RX, then RY, then RZ. Qubit 0 is the least significant bit of a
row's number, as in Qiskit.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

_CX = torch.tensor([0, 3, 2, 1])
"""CNOT(c, t) as a permutation of 2t + c."""


def _rotation_terms() -> Tensor:
    """The 8 terms of (cos - i sin Z)(cos - i sin Y)(cos - i sin X), as 8 real numbers each."""
    identity = torch.eye(2, dtype=torch.complex128)
    paulis = ([[1, 0], [0, -1]], [[0, -1j], [1j, 0]], [[0, 1], [1, 0]])
    z, y, x = (torch.stack([identity, -1j * torch.tensor(p).to(identity)]) for p in paulis)
    return torch.view_as_real(torch.einsum("aij,bjk,ckl->abcil", z, y, x)).reshape(8, 8)


_TERMS = _rotation_terms()


def pairs(num_qubits: int) -> list[tuple[int, int]]:
    """The (control, target) pairs of a layer: (q, q + 1) for even q, for odd q, and around the end.

    There are `num_qubits` pairs, and none for a single qubit.
    """
    if num_qubits < 2:
        return []
    firsts = [*range(0, num_qubits - 1, 2), *range(1, num_qubits - 1, 2), num_qubits - 1]
    return [(q, (q + 1) % num_qubits) for q in firsts]


def angle_shape(num_qubits: int, num_layers: int) -> tuple[int, int, int, int]:
    """The shape of a register's angles: (layers, blocks, rotations of a block, 3).

    The rotations of a block are on c, t, c, t. A single qubit has one rotation in each layer.
    """
    return (num_layers, num_qubits, 4, 3) if num_qubits > 1 else (num_layers, 1, 1, 3)


def rotations(angles: Tensor) -> Tensor:
    """RZ(angles[2]) RY(angles[1]) RX(angles[0]) as matrices.

    Args:
        angles: angles of RX, RY and RZ in radians, real, [..., 3].

    Returns:
        Matrices [..., 2, 2], complex.
    """
    half = angles * 0.5
    x, y, z = torch.stack([half.cos(), half.sin()], dim=-1).unbind(-2)
    factors = (
        z[..., :, None, None] * (y[..., :, None] * x[..., None, :])[..., None, :, :]
    ).flatten(-3)
    entries = factors @ _TERMS.to(angles)
    return torch.view_as_complex(entries.view(*angles.shape[:-1], 2, 2, 2))


def unitaries(angles: Tensor, num_qubits: int) -> Tensor:
    """The ansatz as matrices.

    Args:
        angles: angles in radians, real, [..., *angle_shape(num_qubits, layers)].
        num_qubits: number of qubits of the register, at least 1.

    Returns:
        Unitary matrices [..., 2^num_qubits, 2^num_qubits], complex.
    """
    single = rotations(angles)
    if num_qubits == 1:
        return _product(single[..., 0, 0, :, :])
    blocks = _blocks(single)
    if num_qubits == 2:
        first, second = blocks.unbind(-3)
        # A block on (1, 0) has its two bits the other way round.
        bits = second.view(*second.shape[:-2], 2, 2, 2, 2)
        swapped = bits.transpose(-1, -2).transpose(-3, -4).reshape(second.shape)
        return _product(swapped @ first)
    return _apply_blocks(blocks, num_qubits)


def _blocks(single: Tensor) -> Tensor:
    """CX (R ⊗ R) CX (R ⊗ R) from rotations [..., 4, 2, 2] on c, t, c, t, rows ordered by 2t + c."""
    controls, targets = single[..., 0::2, :, :], single[..., 1::2, :, :]
    both = targets[..., :, None, :, None] * controls[..., None, :, None, :]
    both = both.flatten(-4, -3).flatten(-2)
    first, second = both.unbind(-3)
    cx = _CX.to(single.device)
    second = second.index_select(-2, cx).index_select(-1, cx)
    blocks: Tensor = second @ first
    return blocks


def _product(layers: Tensor) -> Tensor:
    """The product of matrices [..., L, d, d], the first one rightmost."""
    return reduce(lambda product, layer: layer @ product, layers.unbind(-3))


def _apply_blocks(blocks: Tensor, num_qubits: int) -> Tensor:
    lead, dim = blocks.shape[:-4], 1 << num_qubits
    identity = torch.eye(dim, dtype=blocks.dtype, device=blocks.device)
    product = identity.expand(*lead, dim, dim).view(*lead, *(2,) * num_qubits, dim)
    bits = len(lead) + num_qubits - 1
    for layer in range(blocks.shape[-4]):
        for index, (control, target) in enumerate(pairs(num_qubits)):
            front = (len(lead), len(lead) + 1)
            moved = product.movedim((bits - target, bits - control), front)
            matrix = blocks[..., layer, index, :, :]
            after = matrix @ moved.flatten(len(lead), len(lead) + 1).flatten(len(lead) + 1)
            product = after.view(moved.shape).movedim(front, (bits - target, bits - control))
    whole: Tensor = product.flatten(len(lead), bits)
    return whole
