"""`lockstep init` and `lockstep config`: a task to start from, and the keys of a config."""

from __future__ import annotations

import os
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import yaml

from lockstep.config.help import Group, Key, describe
from lockstep.errors import ConfigError
from lockstep.launching.targets import is_script, task_class

_MOST_COLUMNS = 100


def keys(target: str) -> list[str]:
    """Each key of a target with its default, its type, and what it means; for people.

    Raises:
        ConfigError: there is no such recipe, file or class.
    """
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    lines = []
    for group in describe(task_class(target).Config):
        if group.name:
            of = "each of " if group.is_list else ""
            lines += ["", *textwrap.wrap(f"{of}{group.name}: {group.about}", columns), ""]
        for key in group.keys:
            lines += _key_lines(key, columns)
    lines += ["", "*: cannot change the result, so it may be changed at every resume"]
    return [line.replace("`", "") for line in lines]


def _key_lines(key: Key, columns: int) -> list[str]:
    mark = "" if key.is_outcome else " *"
    head = key.name if key.is_needed else f"{key.name} = {key.shown}"
    kind = f"{key.type}{', needed' if key.is_needed else ''}{mark}"
    indent = " " * 4
    meaning = textwrap.wrap(key.meaning, columns, initial_indent=indent, subsequent_indent=indent)
    start = f"{head:<34}  "
    types = textwrap.wrap(kind, columns, initial_indent=start, subsequent_indent=" " * len(start))
    return [*types, *meaning]


def as_yaml(target: str, is_unset: bool = False) -> list[str]:
    """A YAML file with all keys of a target, their defaults, and comments that explain them.

    Args:
        target: recipe or task.
        is_unset: whether keys and sections are comments too, so that the file sets nothing.

    Raises:
        ConfigError: there is no such recipe, file or class, or it is a script, which takes none.
    """
    kind = task_class(target)
    if is_script(target):
        raise ConfigError(
            f"{target}: is a script, which brings its own config and takes no --config; name its "
            f"task: {target}:{kind.__name__}"
        )
    groups = describe(kind.Config)
    lines = [f"# All keys of {target}: lockstep train {target} --config FILE"]
    if is_unset:
        lines.append(
            "# Take away the # of what you set; a key of a section needs its section's too."
        )
    others = [group for group in groups[1:] if not group.is_list]
    return [*lines, *_section(groups[0], others, 0, "#" if is_unset else "")]


def _section(group: Group, others: Sequence[Group], depth: int, mark: str) -> Iterator[str]:
    """The lines of a section, and of the sections in it.

    Args:
        group: keys of the section.
        others: groups of keys of all other sections.
        depth: number of sections that this one is nested in.
        mark: prefix of each key and section name.
    """
    indent = "  " * depth
    for key in group.keys:
        leaf = key.name.rpartition(".")[2]
        needed = " (has no default)" if key.is_needed else ""
        yield ""
        yield from _comment(f"{key.meaning} [{key.type}]{needed}".strip().replace("`", ""), indent)
        yield f"{indent}{mark}" + (f"# {leaf}:" if key.is_needed else _item(leaf, key))
    for other in others:
        outer, _, leaf = other.name.rpartition(".")
        if outer == group.name:
            yield ""
            yield from _comment(other.about.replace("`", ""), indent)
            yield f"{indent}{mark}{leaf}:"
            yield from _section(other, others, depth + 1, mark)


def _item(leaf: str, key: Key) -> str:
    text = yaml.safe_dump(
        {leaf: key.default}, default_flow_style=True, allow_unicode=True, width=10**9
    )
    return text.strip()[1:-1]


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, _MOST_COLUMNS, initial_indent=start, subsequent_indent=start)


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
    text = files(__package__).joinpath("template.py").read_text(encoding="utf-8")
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
