"""`lockstep init`: a task to start from."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

from lockstep.errors import ConfigError

_TEMPLATE_NAME = "task.py"
"""Name of its own file in the template."""


def init(file: Path) -> list[str]:
    """Write a script with a small task, which trains at once.

    Args:
        file: path of the script; must end in .py, and must not exist yet.

    Returns:
        Lines for people.

    Raises:
        ConfigError: there is such a file, or it cannot be written.
    """
    if file.suffix != ".py":
        raise ConfigError(f"init {file}: must end in .py, such as my_task.py")
    text = files("lockstep.commands").joinpath("template.py").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as script:
            script.write(text.replace(_TEMPLATE_NAME, file.name))
    except FileExistsError:
        raise ConfigError(f"init {file}: is there already; name another file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"init {file}: cannot be written: {reason}") from error
    return [f"wrote {file}; train it with: lockstep train {shlex.quote(str(file))} -n 2"]
