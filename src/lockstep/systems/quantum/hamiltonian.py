"""Pauli operators: sums of Pauli strings, their algebra, and their texts.

The string with masks (x, z) is i^|x∧z| X^x Z^z: bit q of x is set for X or Y on qubit q, and of z
for Z or Y (Aaronson and Gottesman, Phys. Rev. A 70, 052328 (2004), section III).
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Complex
from types import MappingProxyType

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, kind_of
from lockstep.systems.quantum.simulation.measure import PauliSum, check_letters
from lockstep.systems.quantum.simulation.parts import check_fits

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


MOST_QUBITS = 10_000
"""Most qubits of an operator."""
TOLERANCE = 1e-12
"""Magnitude up to which a coefficient, or its imaginary part, counts as 0."""


class PauliOperator:
    """Σ coefficient · string, with complex coefficients: an algebra.

        hamiltonian = 0.5 * PauliOperator({"XX": 1, "ZI": -2}) + PauliOperator.parse("0.1 [Z0]", 2)
        energy = hamiltonian.observable().expectation(states)

    `+`, `-`, multiplication with numbers by `*` and `/`, and products of operators by `@`. The last
    letter of a string is for qubit 0, as in Qiskit.

    Attributes:
        num_qubits: number of letters of each string.
        terms: coefficient of each string; none of them is exactly 0.
    """

    def __init__(self, terms: Mapping[str, complex], num_qubits: int | None = None) -> None:
        """Check and keep the terms.

        Args:
            terms: coefficient of each string of the letters I, X, Y and Z.
            num_qubits: number of letters; by default that of the first string. Without terms (the
                operator 0) it must be given.

        Raises:
            ConfigError: a string has other letters or another length, a coefficient is not a finite
                number, or there are neither terms nor a number of qubits.
        """
        if not isinstance(terms, Mapping):
            raise ConfigError(
                f"a Pauli operator needs {{string: coefficient}}, not {kind_of(terms)}"
            )
        if num_qubits is None:
            if not terms:
                raise ConfigError("a Pauli operator without terms needs num_qubits")
            num_qubits = len(str(next(iter(terms))))
        self.num_qubits = _checked_num_qubits(num_qubits)
        nonzero = {}
        for string, coefficient in terms.items():
            check_letters(string, self.num_qubits)
            value = _number(coefficient, f"Pauli string {string!r}: its coefficient")
            if value:
                nonzero[string] = value
        self.terms: Mapping[str, complex] = MappingProxyType(nonzero)

    @classmethod
    def from_sparse(
        cls, terms: Iterable[tuple[str, Sequence[int], complex]], num_qubits: int
    ) -> PauliOperator:
        """An operator from letters with the qubits that they act on.

        Args:
            terms: (letters, qubits, coefficient) of each term, as ("XY", (0, 3), 0.5); terms of the
                same string are added up.
            num_qubits: number of qubits.

        Raises:
            ConfigError: a term is not such a triple, or names a qubit twice or one that does not
                exist.
        """
        count = _checked_num_qubits(num_qubits)
        total: dict[str, complex] = {}
        for term in terms:
            try:
                letters, qubits, coefficient = term
                numbers = [as_integer(q, "qubit") for q in qubits]
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"term {term!r}: must be (letters, qubits, coefficient)"
                ) from error
            if not isinstance(letters, str) or len(letters) != len(numbers):
                raise ConfigError(f"term {term!r}: needs a letter for each qubit")
            if len(set(numbers)) < len(numbers):
                raise ConfigError(f"term {term!r}: a qubit is named twice")
            if not all(0 <= q < count for q in numbers):
                raise ConfigError(f"term {term!r}: its qubits must be from 0 to {count - 1}")
            string = ["I"] * count
            for letter, qubit in zip(letters, numbers, strict=True):
                string[count - 1 - qubit] = letter
            name = "".join(string)
            total[name] = total.get(name, 0) + _number(coefficient, f"term {term!r}: coefficient")
        return cls(total, count)

    @classmethod
    def parse(cls, text: str, num_qubits: int | None = None) -> PauliOperator:
        """An operator from text as OpenFermion writes it: `0.5 [X0 Y1] + (0.1-0.2j) [Z3] - 2 []`.

        Args:
            text: terms with signs between them, on any number of lines; without a coefficient it
                is 1.
            num_qubits: number of qubits; by default, the highest that is named plus one.

        Raises:
            ConfigError: the text is not such a sum; the message says where.
        """
        terms = read_terms(text)
        highest = max((q for _, qubits, _ in terms for q in qubits), default=0)
        return cls.from_sparse(terms, highest + 1 if num_qubits is None else num_qubits)

    def text(self) -> str:
        """The operator as OpenFermion writes it; `parse` reads it."""
        return written(self.terms)

    def __repr__(self) -> str:
        """The first terms, for people."""
        shown = " + ".join(f"{c:g}·{s}" for s, c in [*self.terms.items()][:8])
        more = f" + … ({len(self.terms)} terms)" if len(self.terms) > 8 else ""
        return f"PauliOperator({shown or 0}{more})"

    def __add__(self, other: PauliOperator) -> PauliOperator:
        """The sum of two operators on the same qubits."""
        if not isinstance(other, PauliOperator):
            return NotImplemented
        self._check_same(other)
        total = dict(self.terms)
        for string, coefficient in other.terms.items():
            total[string] = total.get(string, 0) + coefficient
        return PauliOperator(total, self.num_qubits)

    def __neg__(self) -> PauliOperator:
        """The operator times -1."""
        return -1 * self

    def __sub__(self, other: PauliOperator) -> PauliOperator:
        """The difference of two operators on the same qubits."""
        if not isinstance(other, PauliOperator):
            return NotImplemented
        return self + -other

    def __mul__(self, factor: complex) -> PauliOperator:
        """The operator times a number."""
        if not isinstance(factor, Complex):
            return NotImplemented
        value = _number(factor, "factor")
        return PauliOperator({s: value * c for s, c in self.terms.items()}, self.num_qubits)

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> PauliOperator:
        """The operator divided by a number."""
        if not isinstance(divisor, Complex):
            return NotImplemented
        if not divisor:
            raise ConfigError("a Pauli operator cannot be divided by 0")
        return self * (1 / complex(divisor))

    def __matmul__(self, other: PauliOperator) -> PauliOperator:
        """The product of two operators on the same qubits; `other` acts first."""
        if not isinstance(other, PauliOperator):
            return NotImplemented
        self._check_same(other)
        right = [(masks_of(s), c) for s, c in other.terms.items()]
        total: dict[Masks, complex] = {}
        for string, coefficient in self.terms.items():
            left = masks_of(string)
            for masks, factor in right:
                product, phase = multiplied(left, masks)
                total[product] = total.get(product, 0) + phase * coefficient * factor
        named = {string_of(masks, self.num_qubits): c for masks, c in total.items()}
        return PauliOperator(named, self.num_qubits)

    def adjoint(self) -> PauliOperator:
        """The adjoint operator: coefficients are conjugated."""
        return PauliOperator({s: c.conjugate() for s, c in self.terms.items()}, self.num_qubits)

    def simplified(self, tolerance: float = TOLERANCE) -> PauliOperator:
        """The operator without terms whose coefficient has at most this magnitude."""
        large = {s: c for s, c in self.terms.items() if abs(c) > tolerance}
        return PauliOperator(large, self.num_qubits)

    def is_hermitian(self, tolerance: float = TOLERANCE) -> bool:
        """Whether all coefficients are real, up to this magnitude of their imaginary part."""
        return all(abs(c.imag) <= tolerance for c in self.terms.values())

    def norm(self) -> float:
        """The sum of the coefficients' magnitudes: a bound on the magnitude of eigenvalues."""
        return math.fsum(abs(c) for c in self.terms.values())

    def observable(self, tolerance: float = TOLERANCE) -> PauliSum:
        """The operator as an observable, whose expectation values are differentiable.

        Raises:
            ConfigError: it is not Hermitian up to this tolerance.
        """
        for string, coefficient in self.terms.items():
            if abs(coefficient.imag) > tolerance:
                raise ConfigError(
                    f"Pauli string {string!r}: its coefficient {coefficient} is not real; only "
                    "Hermitian operators can be measured"
                )
        real = {s: c.real for s, c in self.terms.items()}
        return PauliSum(real or {"I" * self.num_qubits: 0.0})

    def matrix(self) -> Tensor:
        """The dense matrix [2^n, 2^n], complex128.

        Raises:
            ConfigError: it does not fit into memory.
        """
        check_fits(f"the matrix of {self.num_qubits} qubits", 3 * 16 << 2 * self.num_qubits)
        size = 1 << self.num_qubits
        index = torch.arange(size)
        total = torch.zeros(size, size, dtype=torch.complex128)
        for string, coefficient in self.terms.items():
            x, _ = masks_of(string)
            total[index ^ x, index] += coefficient * pauli_phases(string, index)
        return total

    def _check_same(self, other: PauliOperator) -> None:
        if self.num_qubits != other.num_qubits:
            raise ConfigError(
                f"operators of {self.num_qubits} and of {other.num_qubits} qubits: must be equal"
            )


def hamiltonian_terms(hamiltonian: PauliSum | PauliOperator) -> dict[str, float]:
    """The real coefficient of each string of a Hamiltonian.

    Raises:
        ConfigError: it is neither a `PauliSum` nor a Hermitian `PauliOperator`.
    """
    if isinstance(hamiltonian, PauliOperator):
        hamiltonian = hamiltonian.observable()
    if not isinstance(hamiltonian, PauliSum):
        raise ConfigError(
            f"a Hamiltonian must be a PauliSum or a PauliOperator, not {kind_of(hamiltonian)}"
        )
    return {string: float(coefficient) for string, coefficient in hamiltonian.pairs}


def pauli_phases(string: str, index: Tensor) -> Tensor:
    """The factor that a string gives to each amplitude before it flips bits, complex128.

    String (x, z) takes the amplitude at index i, times this power of i, to index i ⊕ x.
    """
    x, z = masks_of(string)
    return 1j ** (x & z).bit_count() * parity_signs(index, z)


def bits_of(mask: int) -> list[int]:
    """The bits that are set, low bit first."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def parity_signs(index: Tensor, mask: int) -> Tensor:
    """+1 where an index has an even number of the mask's bits, else -1; float64, as `index`."""
    bits = index & mask
    for shift in (32, 16, 8, 4, 2, 1):
        bits = bits ^ bits >> shift
    return 1.0 - 2.0 * (bits & 1).double()


def _checked_num_qubits(num_qubits: int) -> int:
    count = as_integer(num_qubits, "num_qubits")
    if not 1 <= count <= MOST_QUBITS:
        raise ConfigError(f"{count} qubits: an operator has from 1 to {MOST_QUBITS:,}")
    return count


def _number(value: object, name: str) -> complex:
    if isinstance(value, bool) or not isinstance(value, Complex) or not cmath.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    return complex(value)


_TERM = re.compile(
    r"\s*(?P<sign>[+-]?)\s*(?:(?P<number>\([^()\[\]]*\)|[^\s\[\]()*]+)\s*(?:\*\s*)?)?"
    r"\[(?P<letters>[^\[\]]*)\]\s*"
)
_LETTER = re.compile(r"([XYZ])([0-9]{1,9})")

Term = tuple[str, tuple[int, ...], complex]
"""Letters, the qubits that they act on, and the coefficient."""


def read_terms(text: str) -> list[Term]:
    """The terms of a sum such as `0.5 [X0 Y1] + (0.1-0.2j) [Z3] - 2 []`.

    Raises:
        ConfigError: the text is not such a sum; the message says where.
    """
    if not isinstance(text, str):
        raise ConfigError(f"Pauli text: must be a string, not {kind_of(text)}")
    terms: list[Term] = []
    position, length = 0, len(text.rstrip())
    while position < length:
        found = _TERM.match(text, position)
        if found is None or (terms and not found["sign"]):
            raise ConfigError(
                "Pauli text: expected a term such as '+ 0.5 [X0 Y1]' at "
                f"{text[position : position + 40]!r}"
            )
        terms.append(_term(found))
        position = found.end()
    if not terms:
        raise ConfigError("Pauli text: there are no terms; a constant is written as '0.5 []'")
    return terms


def _term(found: re.Match[str]) -> Term:
    term = found[0].strip()
    number = (found["number"] or "1").strip("()").replace(" ", "")
    try:
        coefficient = complex(number)
    except ValueError as error:
        raise ConfigError(f"Pauli text: {term!r}: {number!r} is no number") from error
    letters, qubits = "", []
    for word in found["letters"].split():
        factor = _LETTER.fullmatch(word)
        if factor is None:
            raise ConfigError(f"Pauli text: {term!r}: {word!r} is no factor such as X0, Y1 or Z2")
        letters += factor[1]
        qubits.append(int(factor[2]))
    return letters, tuple(qubits), -coefficient if found["sign"] == "-" else coefficient


def written(terms: Mapping[str, complex]) -> str:
    """Terms as OpenFermion writes them, one on each line; `0 []` where there are none."""
    lines = []
    for string, coefficient in terms.items():
        factors = [f"{c}{q}" for q, c in enumerate(reversed(string)) if c != "I"]
        lines.append(f"({coefficient.real!r}{coefficient.imag:+}j) [{' '.join(factors)}]")
    return " +\n".join(lines) or "0 []"
