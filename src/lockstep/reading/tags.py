"""Words that people put on their runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.files import read_text, replacing
from lockstep.parsing import parse_json, shown

TAGS = "tags.json"
_WORD = re.compile(r"[^\s,=<>!~\x00-\x1f\x7f-\x9f]{1,64}")


def read_tags(run_dir: Path) -> tuple[str, ...]:
    """The tags of a run, sorted; none if their file is missing or damaged."""
    try:
        tags = parse_json(read_text(run_dir / TAGS))
    except (OSError, ValueError):
        return ()
    there = tags if isinstance(tags, list) else []
    return tuple(sorted({tag for tag in there if isinstance(tag, str)}))


def change_tags(run_dir: Path, add: Iterable[str], remove: Iterable[str]) -> tuple[str, ...]:
    """Put tags on a run, and take others off.

    Returns:
        Those that it has now.

    Raises:
        ConfigError: one is no word of at most 64 characters.
        RunDirectoryError: the folder is not writable.
    """
    added, removed = list(add), set(remove)
    for tag in added:
        if not _WORD.fullmatch(tag):
            raise ConfigError(
                f"tag {shown(tag)}: must be a word of at most 64 characters without , = < > ! ~"
            )
    tags = sorted({*read_tags(run_dir), *added} - removed)
    try:
        with replacing(run_dir / TAGS) as file:
            file.write(json.dumps(tags) + "\n")
    except OSError as error:
        raise RunDirectoryError(f"{run_dir}: is not writable: {error.strerror}") from None
    return tuple(tags)
