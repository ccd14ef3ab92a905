"""Pauli operators as OpenFermion writes them: `(0.5+0j) [X0 Y1] +` and so on."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import kind_of

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
        ConfigError: the text is no such sum; says where.
    """
    if not isinstance(text, str):
        raise ConfigError(f"Pauli text: must be a string, not {kind_of(text)}")
    terms: list[Term] = []
    place, length = 0, len(text.rstrip())
    while place < length:
        found = _TERM.match(text, place)
        if found is None or (terms and not found["sign"]):
            raise ConfigError(
                "Pauli text: expected a term such as '+ 0.5 [X0 Y1]' at "
                f"{text[place : place + 40]!r}"
            )
        terms.append(_term(found))
        place = found.end()
    if not terms:
        raise ConfigError("Pauli text: there are no terms; a constant is written as '0.5 []'")
    return terms


def _term(found: re.Match[str]) -> Term:
    said = found[0].strip()
    number = (found["number"] or "1").strip("()").replace(" ", "")
    try:
        coefficient = complex(number)
    except ValueError as error:
        raise ConfigError(f"Pauli text: {said!r}: {number!r} is no number") from error
    letters, qubits = "", []
    for word in found["letters"].split():
        factor = _LETTER.fullmatch(word)
        if factor is None:
            raise ConfigError(f"Pauli text: {said!r}: {word!r} is no factor such as X0, Y1 or Z2")
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
