"""Measurements of a state: probabilities, expectation values of Pauli sums, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_count, as_integer, as_number, kind_of
from lockstep.systems.quantum.simulation.adjoint import is_transformed

_MOST_CATEGORIES = 1 << 24
"""Most outcomes that `torch.multinomial` supports."""


def probabilities(states: Tensor, qubits: Sequence[int] | None = None) -> Tensor:
    """The probability of each outcome.

    Args:
        states: complex tensor [..., 2^n].
        qubits: qubits that are measured, the first being the low bit of an outcome; all by default.

    Returns:
        Probabilities [..., 2^len(qubits)], real; differentiable.

    Raises:
        ConfigError: `states` is not such a tensor, or a qubit is not one of its n.
    """
    num_qubits = qubits_of(states)
    squares = torch.view_as_real(states).square().sum(-1)
    if qubits is None:
        return squares
    qubits = checked_qubits(qubits, num_qubits)
    lead = squares.dim() - 1
    split = squares.reshape(*squares.shape[:-1], *(2,) * num_qubits)
    axes = [lead + num_qubits - 1 - q for q in reversed(qubits)]
    others = [lead + i for i in range(num_qubits) if lead + i not in axes]
    split = split.permute(*range(lead), *axes, *others)
    outcomes = 1 << len(qubits), 1 << (num_qubits - len(qubits))
    return split.reshape(*squares.shape[:-1], *outcomes).sum(-1)


def checked_qubits(qubits: Sequence[int], num_qubits: int) -> tuple[int, ...]:
    """Some of n qubits.

    Raises:
        ConfigError: they are not different integers from 0 to n - 1.
    """
    if not isinstance(qubits, Iterable):
        raise ConfigError(f"qubits: must be numbers of qubits, not {qubits!r}")
    numbers = tuple(as_integer(qubit, "qubit") for qubit in qubits)
    if any(not 0 <= n < num_qubits for n in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(f"qubits {list(numbers)}: must be different ones of {num_qubits}")
    return numbers


def qubits_of(states: Tensor) -> int:
    """The number of qubits of states [..., 2^n].

    Raises:
        ConfigError: `states` is not a complex tensor of such a shape.
    """
    if isinstance(states, Tensor) and states.is_complex() and states.dim():
        size = states.shape[-1]
        if size and not size & (size - 1):
            return size.bit_length() - 1
    raise ConfigError(f"states must be a complex tensor [..., 2^n], not {kind_of(states)}")


def check_letters(string: str, num_qubits: int) -> None:
    """Check a Pauli string.

    Raises:
        ConfigError: it has not `num_qubits` letters of I, X, Y and Z.
    """
    if not isinstance(string, str) or len(string) != num_qubits or set(string) - set("IXYZ"):
        raise ConfigError(f"Pauli string {string!r}: must have {num_qubits} letters of I, X, Y, Z")


class PauliSum:
    """Σ coefficient · string, such as {"ZZI": 0.5, "IXY": -1.0}.

    The last letter is for qubit 0, as in Qiskit.

    Attributes:
        num_qubits: number of letters of each string.
        coefficients: coefficient of each string.
        strings: strings of the letters I, X, Y and Z.
    """

    def __init__(self, terms: Mapping[str, float]) -> None:
        """Check and keep the terms.

        Raises:
            ConfigError: there are none, or a string has other letters or another length, or a
                coefficient is no finite number.
        """
        if not isinstance(terms, Mapping):
            raise ConfigError(f"a Pauli sum needs {{string: coefficient}}, not {kind_of(terms)}")
        self.strings = tuple(terms)
        self.coefficients = tuple(terms.values())
        if not terms:
            raise ConfigError("a Pauli sum needs at least one term")
        for string in self.strings:
            if not isinstance(string, str) or not string:
                raise ConfigError(f"Pauli string {string!r}: must have letters of I, X, Y, Z")
        self.num_qubits = len(self.strings[0])
        for string, coefficient in terms.items():
            as_number(coefficient, f"Pauli string {string!r}: its coefficient")
            check_letters(string, self.num_qubits)
        self._diagonals: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def pairs(self) -> tuple[tuple[str, float], ...]:
        """Each string with its coefficient."""
        return tuple(zip(self.strings, self.coefficients, strict=True))

    def expectation(self, states: Tensor) -> Tensor:
        """The expectation value <ψ|H|ψ> of the sum.

        Args:
            states: complex tensor [..., 2^n].

        Returns:
            Values [...], real, differentiable in the states.

        Raises:
            ConfigError: the states are of another number of qubits.
        """
        self.check(qubits_of(states))
        values = []
        if any(not set(s) & set("XY") for s in self.strings):
            values.append(_diagonal_value(states, self._diagonal(states)))
        for string, coefficient in self.pairs:
            if set(string) & set("XY"):
                values.append(coefficient * _string_value(states, string))
        return reduce(torch.add, values)

    def terms(self, states: Tensor) -> Tensor:
        """The expectation value of each string, without its coefficient.

        Args:
            states: complex tensor [..., 2^n].

        Returns:
            Values [..., terms], real, differentiable in the states.

        Raises:
            ConfigError: the states are of another number of qubits.
        """
        self.check(qubits_of(states))
        return torch.stack([_string_value(states, s) for s in self.strings], dim=-1)

    def sample(self, states: Tensor, shots: int, generator: torch.Generator | None) -> Tensor:
        """An estimate of the expectation value by `shots` measurements of each string.

        Args:
            states: complex tensor [..., 2^n].
            shots: number of measurements of each string, at least 1.
            generator: generator of the measurement noise; torch's global one if None.

        Returns:
            The sum of the strings' mean values with their coefficients, [...], real.

        Raises:
            ConfigError: `shots` is less than 1, or the states are of another number of qubits.
        """
        as_count(shots, "shots")
        likely = ((1 + self.terms(states)) / 2).clamp(0, 1)  # P(+1) of each string
        counts = torch.binomial(torch.full_like(likely, shots), likely, generator=generator)
        return (2 * counts / shots - 1) @ likely.new_tensor(self.coefficients)

    def check(self, num_qubits: int) -> None:
        """Check that the strings fit states of a number of qubits.

        Raises:
            ConfigError: the strings have more or fewer letters.
        """
        if num_qubits != self.num_qubits:
            raise ConfigError(
                f"Pauli strings of {self.num_qubits} letters for a state of {num_qubits} qubits"
            )

    def _diagonal(self, states: Tensor) -> Tensor:
        key = (states.dtype.to_real(), states.device)
        if key not in self._diagonals:
            total = torch.zeros(1 << self.num_qubits, dtype=key[0], device=key[1])
            for string, coefficient in self.pairs:
                if not set(string) & set("XY"):
                    signs = [total.new_tensor([1, -1 if c == "Z" else 1]) for c in string]
                    total += coefficient * reduce(torch.kron, signs)
            self._diagonals[key] = total
        return self._diagonals[key]


def _diagonal_value(states: Tensor, diagonal: Tensor) -> Tensor:
    if is_transformed(states):
        return probabilities(states) @ diagonal
    values: Tensor = _Diagonal.apply(states, diagonal)  # type: ignore[no-untyped-call]
    return values


class _Diagonal(torch.autograd.Function):
    """Σ_i h_i |ψ_i|², with one pass over the state less than autograd would take each way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, diagonal: Tensor) -> Tensor:
        weighted = states * diagonal
        ctx.save_for_backward(states, diagonal, weighted)
        left, right = (torch.view_as_real(t).flatten(-2) for t in (states, weighted))
        values: Tensor = torch.linalg.vecdot(left, right)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        states, diagonal, weighted = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the product must depend on the states
            weighted = states * diagonal
        return weighted * (2 * gradient[..., None]), None


def _string_value(states: Tensor, string: str) -> Tensor:
    lead = states.shape[:-1]
    axes = states.reshape(*lead, *(2,) * len(string))
    after = axes
    for axis, letter in enumerate(string, -len(string)):
        if letter in "XY":
            after = after.flip(axis)
        if letter in "YZ":
            signs = [1, -1] if letter == "Z" else [-1j, 1j]
            factors = torch.tensor(signs, dtype=states.dtype, device=states.device)
            after = after * factors.view(2, *(1,) * (-1 - axis))
    products = axes.conj() * after
    return products.reshape(*lead, -1).sum(-1).real


def sample_frequencies(
    likely: Tensor, shots: int, generator: torch.Generator | None = None
) -> Tensor:
    """The relative frequency of each outcome in `shots` measurements.

    Args:
        likely: probabilities of the outcomes, real, [..., outcomes].
        shots: number of measurements, at least 1.
        generator: generator of the measurement noise; torch's global one if None.

    Returns:
        Frequencies [..., outcomes], real, of sum 1; without gradient.

    Raises:
        ConfigError: `shots` is less than 1, or `likely` is not a real tensor.
    """
    as_count(shots, "shots")
    check_probabilities(likely)
    rows = likely.detach().reshape(-1, likely.shape[-1]).clamp(min=0)
    drawn = draw(rows, shots, generator)
    counts = torch.zeros_like(rows).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=rows.dtype))
    return (counts / shots).view(likely.shape)


def check_probabilities(likely: Tensor) -> None:
    """Check that probabilities are a real tensor [..., outcomes].

    Raises:
        ConfigError: they are not.
    """
    if not isinstance(likely, Tensor) or not likely.is_floating_point() or not likely.dim():
        raise ConfigError(f"probabilities must be a real tensor, not {kind_of(likely)}")


def draw(rows: Tensor, shots: int, generator: torch.Generator | None = None) -> Tensor:
    """Outcomes that are drawn with replacement, by probabilities.

    Args:
        rows: probabilities up to a factor, real and at least 0, [rows, outcomes].
        shots: number of outcomes to draw for each row.
        generator: generator of the random numbers; torch's global one if None.

    Returns:
        Numbers of outcomes, int64 [rows, shots].
    """
    if rows.shape[-1] <= _MOST_CATEGORIES:
        return torch.multinomial(rows, shots, replacement=True, generator=generator)
    # Inversion of the distribution function (Devroye 1986, section III.2).
    sums = rows.double().cumsum(-1)
    shape = (len(rows), shots)
    levels = torch.rand(shape, dtype=torch.float64, device=rows.device, generator=generator)
    drawn = torch.searchsorted(sums, levels * sums[:, -1:], right=True)
    return drawn.clamp(max=rows.shape[-1] - 1)
