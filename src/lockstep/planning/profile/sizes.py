"""Sizes of messages: how they are written, and which ones a range stands for."""

from __future__ import annotations

import re

from lockstep.errors import ConfigError
from lockstep.parsing import shown

FACTOR = 4
"""From one size of a range to the next."""
DEFAULT = "1KB:256MB"
MOST_BYTES = 16 << 30

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,11})\s*([KMG]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes that the option `--sizes` means, in bytes, ascending.

    Args:
        text: `FIRST:LAST`, which stands for FIRST, four times as much, and so on, and LAST; or
            sizes with commas between them. A size is a whole number with KB, MB or GB behind it,
            of 1,024 bytes and its powers, or of bytes.

    Raises:
        ConfigError: it is not that, or a size is 0 or more than 16 GB.
    """
    if ":" not in text:
        return tuple(sorted({_parse(part, text) for part in text.split(",")}))
    first_text, _, last_text = text.partition(":")
    size, last = _parse(first_text, text), _parse(last_text, text)
    if size > last:
        raise _wrong(text, "the first size is larger than the last")
    sizes = []
    while size < last:
        sizes.append(size)
        size *= FACTOR
    return (*sizes, last)


def size_text(num_bytes: int) -> str:
    """A size as people write it and as `parse_sizes` reads it, such as `64KB`."""
    for unit in ("G", "M", "K"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}B"
    return f"{num_bytes}B"


def _parse(part: str, text: str) -> int:
    match = _SIZE.fullmatch(part.strip())
    if match is None:
        raise _wrong(text, f"{shown(part)} is no size")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size <= MOST_BYTES:
        raise _wrong(text, f"{shown(part)} is not between 1 byte and {size_text(MOST_BYTES)}")
    return size


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--sizes {shown(text)[1:-1]}: {why}; write a range such as {DEFAULT}, or sizes such as "
        "1KB,64KB"
    )
