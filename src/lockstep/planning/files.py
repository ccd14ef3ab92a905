"""Files of measurements and plans: JSON objects whose `format` and `version` say what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.errors import DataError
from lockstep.files import MAX_TEXT_BYTES, read_text, replacing
from lockstep.parsing import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def write(path: Path, value: DataclassInstance) -> None:
    """Write a dataclass to a file.

    Raises:
        DataError: it cannot be written.
    """
    text = json.dumps(asdict(value), indent=1, allow_nan=False)
    try:
        with replacing(path) as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def read(path: Path, parse: Callable[[str], T], what: str, command: str) -> T:
    """What is in a file.

    Args:
        path: path of the file.
        parse: makes it of the file's text; raises ValueError if it cannot.
        what: what it is, for messages.
        command: command that writes such a file.

    Raises:
        DataError: the file cannot be read, is damaged, or is something else.
    """
    advice = f"write one with `{command}`"
    try:
        return parse(read_text(path, MAX_TEXT_BYTES, follow_links=True))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; {advice}") from None
    except ValueError as error:
        raise DataError(f"{path}: is no {what}: {error}; {advice}") from None


def check_format(values: dict[str, Any], name: str, version: int) -> None:
    """Refuse an object of another kind, or of another version.

    Raises:
        ValueError: it is one.
    """
    if values.get("format") != name:
        raise ValueError(f"format={shown(values.get('format'))}: must be {name!r}")
    if values.get("version") != version:
        found = shown(values.get("version"))
        raise ValueError(f"version={found}: this Lockstep reads version {version}")
