"""Pauli strings as pairs of bit masks, with phases: products, and whether two commute.

The string with masks (x, z) is i^|x∧z| X^x Z^z: bit q of x is set for X or Y on qubit q, and of z
for Z or Y (Aaronson and Gottesman, Phys. Rev. A 70, 052328 (2004), section III).
"""

from __future__ import annotations

Masks = tuple[int, int]
"""The bits x and z of a Pauli string, bit q being for qubit q."""

_X_BIT = str.maketrans("IXYZ", "0110")
_Z_BIT = str.maketrans("IXYZ", "0011")
_PHASES = (1, 1j, -1, -1j)


def masks_of(string: str) -> Masks:
    """The masks of a string whose last letter is for qubit 0."""
    return int(string.translate(_X_BIT), 2), int(string.translate(_Z_BIT), 2)


def string_of(masks: Masks, num_qubits: int) -> str:
    """The string of `num_qubits` letters with these masks."""
    x, z = masks
    return "".join("IXZY"[(x >> q & 1) + 2 * (z >> q & 1)] for q in reversed(range(num_qubits)))


def multiplied(left: Masks, right: Masks) -> tuple[Masks, complex]:
    """The string of a product of two, and its phase: 1, i, -1 or -i."""
    (x1, z1), (x2, z2) = left, right
    x, z = x1 ^ x2, z1 ^ z2
    quarters = (x1 & z1).bit_count() + (x2 & z2).bit_count() - (x & z).bit_count()
    return (x, z), _PHASES[(quarters + 2 * (z1 & x2).bit_count()) % 4]


def commute(left: Masks, right: Masks) -> bool:
    """Whether two strings commute."""
    return ((left[0] & right[1]).bit_count() + (left[1] & right[0]).bit_count()) % 2 == 0


def commute_qubitwise(left: Masks, right: Masks) -> bool:
    """Whether two strings have the same letter on each qubit on which both have one."""
    (x1, z1), (x2, z2) = left, right
    return not (x1 | z1) & (x2 | z2) & ((x1 ^ x2) | (z1 ^ z2))
