"""Expectation values and variances of many observables of the same states, all at once.

A Pauli string flips some bits of an amplitude's index, and gives it a sign and a power of i.
Strings that flip the same bits need the same products of amplitudes, so they are one matrix
product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.quantum.simulation.measure import PauliSum

_MOST_WEIGHTS = 1 << 24
"""Most numbers in the matrices of the strings; with more, observables are measured one by one."""

_PRODUCTS = {("X", "Y"): "Z", ("Y", "Z"): "X", ("Z", "X"): "Y"}
"""Letters whose product is i times the third one."""


class Readout:
    """Measures observables.

    Args:
        observables: M observables of the same number of qubits n.
        dtype: real dtype of the values.
        device: device of the states.
    """

    def __init__(
        self, observables: Sequence[PauliSum], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._observables = observables
        self._num_qubits = observables[0].num_qubits
        self._weights: dict[tuple[int, ...], Tensor] | None = None
        flips = dict.fromkeys(_flipped(s) for o in observables for s in o.strings)
        size = 2 << self._num_qubits
        if len(flips) * size * len(observables) <= _MOST_WEIGHTS:
            self._weights = {
                places: torch.zeros(size, len(observables), dtype=torch.float64) for places in flips
            }
            for column, observable in enumerate(observables):
                for string, factor in zip(observable.strings, observable.coefficients, strict=True):
                    own = self._weights[_flipped(string)][:, column]
                    own += factor * torch.view_as_real(_phases(string).conj_physical()).flatten()
            self._weights = {
                places: (weights if places else weights[::2]).to(device, dtype).contiguous()
                for places, weights in self._weights.items()
            }

    def __call__(self, states: Tensor) -> Tensor:
        """The expectation values [..., M], real, of states [..., 2^n]."""
        if self._weights is None:
            return torch.stack([o.expectation(states) for o in self._observables], -1)
        lead = states.shape[:-1]
        axes = states.reshape(*lead, *(2,) * self._num_qubits)
        total: Tensor | None = None
        for places, weights in self._weights.items():
            if places:
                flipped = axes.flip([len(lead) + place for place in places]).reshape(states.shape)
                products = torch.view_as_real(states * flipped.conj()).flatten(-2)
            else:
                products = torch.view_as_real(states).square().sum(-1)
            value = products @ weights
            total = value if total is None else total + value
        assert total is not None
        return total


def squared(observable: PauliSum) -> PauliSum:
    """The square of a Pauli sum, as a Pauli sum: strings that anticommute cancel."""
    terms: dict[str, float] = {}
    pairs = list(zip(observable.strings, observable.coefficients, strict=True))
    for number, (one, factor) in enumerate(pairs):
        for two, other in pairs[number:]:
            string, power = _times(one, two)
            if power % 2 == 0:
                twice = 1 if one == two else 2
                value = twice * factor * other * (1 - power)
                terms[string] = terms.get(string, 0.0) + value
    return PauliSum(terms)


def _times(one: str, two: str) -> tuple[str, int]:
    """The product of two strings: i to a power from 0 to 3, and a string."""
    letters, power = [], 0
    for left, right in zip(one, two, strict=True):
        if "I" in (left, right):
            letters.append(left if right == "I" else right)
        elif left == right:
            letters.append("I")
        elif (left, right) in _PRODUCTS:
            letters.append(_PRODUCTS[left, right])
            power += 1
        else:
            letters.append(_PRODUCTS[right, left])
            power += 3
    return "".join(letters), power % 4


def _flipped(string: str) -> tuple[int, ...]:
    """Places of the letters that flip a bit."""
    return tuple(place for place, letter in enumerate(string) if letter in "XY")


def _phases(string: str) -> Tensor:
    """The factor [2^n] that a string gives to each amplitude, before it flips bits."""
    factors = {"I": (1, 1), "X": (1, 1), "Y": (1j, -1j), "Z": (1, -1)}
    phases = torch.ones(1, dtype=torch.complex128)
    for letter in string:
        phases = torch.kron(phases, torch.tensor(factors[letter], dtype=torch.complex128))
    return phases
