"""`lockstep init`: a task to start from, and a config with all its keys."""

from __future__ import annotations

import os
import shlex
from importlib.resources import files
from pathlib import Path

from lockstep.commands.config import as_yaml
from lockstep.errors import ConfigError

_TEMPLATE_NAME = "task.py"
"""Name of its own file in the template."""
_CLASS = "Spirals"
"""Name of its task."""


def init(file: Path) -> list[str]:
    """Write a script with a small task, which trains at once, and a YAML file that sets no key yet.

    Args:
        file: path of the script; must end in .py. The config gets its name with .yaml. Neither may
            exist yet.

    Returns:
        Lines for people.

    Raises:
        ConfigError: there is such a file, or it cannot be written; then neither is.
    """
    if file.suffix != ".py":
        raise ConfigError(f"init {file}: must end in .py, such as my_task.py")
    config = file.with_suffix(".yaml")
    if os.path.lexists(config):
        raise ConfigError(f"init {config}: is there already; name another file")
    text = files("lockstep.commands").joinpath("template.py").read_text(encoding="utf-8")
    _write(file, text.replace(_TEMPLATE_NAME, file.name))
    target = f"{file}:{_CLASS}"
    try:
        _write(config, "\n".join(as_yaml(target, is_unset=True)) + "\n")
    except BaseException:
        file.unlink()
        raise
    quoted, named = shlex.quote(str(file)), shlex.quote(target)
    return [
        f"wrote {file}; train it with: lockstep train {quoted} -n 2",
        f"wrote {config}, all its keys; set some, and train it with: "
        f"lockstep train {named} --config {shlex.quote(str(config))} -n 2",
    ]


def _write(file: Path, text: str) -> None:
    """Write a new file.

    Raises:
        ConfigError: it is there, or cannot be written.
    """
    try:
        opened = file.open("x", encoding="utf-8")
        try:
            with opened:
                opened.write(text)
        except BaseException:
            file.unlink()
            raise
    except FileExistsError:
        raise ConfigError(f"init {file}: is there already; name another file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"init {file}: cannot be written: {reason}") from error
