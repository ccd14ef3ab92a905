"""What the way out of a host is like: its rate, delay and loss."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.config.parsing import parse_float, shown
from lockstep.errors import ConfigError

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LOSSES = {"%": 0.01}

_LEAST_RATE, _MOST_RATE = 1e5, 1e11
_MOST_DELAY_S = 10.0
_ADVICE = "write it like lan, 100mbit, 20ms or rate=100mbit,delay=20ms,loss=1%"


@dataclass(frozen=True)
class Shape:
    """The network as each host's way out makes it; the way in is not shaped.

    Attributes:
        rate: bits per second, headers included; None where nothing but the machine limits it.
        delay_s: seconds that a frame takes longer; there and back is twice that.
        loss: share of the frames that are lost, in [0, 1).
    """

    rate: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0


NAMED = {
    "lan": Shape(),
    "1gbit": Shape(rate=1e9),
    "100mbit": Shape(rate=1e8),
    "20ms": Shape(delay_s=0.02),
    "lossy": Shape(loss=0.01),
}
"""Shapes that have a name."""


def parse_shape(text: str) -> Shape:
    """A shape by its name, or spelt as `rate=100mbit,delay=20ms,loss=1%` in any order.

    Raises:
        ConfigError: the text is neither, or a value is out of range.
    """
    if text in NAMED:
        return NAMED[text]
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in ("rate", "delay", "loss"):
            names = ", ".join(NAMED)
            raise ConfigError(f"shape {shown(text)}: {shown(part)} is none of {names}; {_ADVICE}")
        if name in found:
            raise ConfigError(f"shape {shown(text)}: {name} is there twice; leave one out")
        found[name] = value
    rate = _quantity(text, found["rate"], _RATES) if "rate" in found else None
    delay_s = _quantity(text, found.get("delay", "0s"), _DELAYS)
    loss = _quantity(text, found.get("loss", "0%"), _LOSSES)
    if rate is not None and not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ConfigError(f"shape {shown(text)}: the rate must lie between 100kbit and 100gbit")
    if delay_s > _MOST_DELAY_S:
        raise ConfigError(f"shape {shown(text)}: the delay must be at most {_MOST_DELAY_S:g}s")
    if loss >= 1:
        raise ConfigError(f"shape {shown(text)}: the loss must be below 100%")
    return Shape(rate, delay_s, loss)


def _quantity(text: str, value: str, units: dict[str, float]) -> float:
    """A number of at least 0 with one of these units."""
    match = re.fullmatch(r"([0-9.]+)([a-z%]+)", value)
    try:
        if match is None or match[2] not in units:
            raise ValueError
        return parse_float(match[1]) * units[match[2]]
    except ValueError:
        raise ConfigError(
            f"shape {shown(text)}: {shown(value)} is not a number with one of the units "
            f"{', '.join(units)}; {_ADVICE}"
        ) from None
