"""Writes the tables of keys in docs/configuration.md, and of axes in docs/systems/index.md.

`make docs-tables` does.

A table stands between two comments and is made from the fields of a config class:

    <!-- keys: core -->             keys of TrainConfig outside sections
    <!-- keys: core optimizer -->   those of its section `optimizer`
    <!-- keys: digits -->           what a recipe changes, and its own keys
    <!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.config import TrainConfig
from lockstep.config.help import Group, Key, describe
from lockstep.launching.systems import load_recipe

PAGE = Path(__file__).with_name("configuration.md")
AXES_PAGE = Path(__file__).parent / "systems" / "index.md"

AXES = (
    "mesh.pp=2",
    "mesh.tp=2 num_shards=2",
    "sharding=optimizer",
    "sharding=gradients",
    "sharding=parameters",
)
"""Items that cut a model over two ranks."""

NO_AXES = {
    "cifar": {"mesh.pp=2", "mesh.tp=2 num_shards=2", "sharding=parameters"},
    "digits": set(),
    "hrm": {"mesh.pp=2", "mesh.tp=2 num_shards=2", "sharding=parameters"},
    "quantum": {"mesh.pp=2", "mesh.tp=2 num_shards=2", "sharding=parameters"},
    "sketched": set(),
    "ufs": {"mesh.pp=2", "mesh.tp=2 num_shards=2", "sharding=parameters"},
}
"""Those of them that a recipe refuses; a slow test starts each one of each recipe."""

_BLOCK = re.compile(r"(<!-- keys: (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = ("key", "type", "default", "hash", "meaning")


def written(page: str) -> str:
    """A page with all its tables as the config classes have them now."""

    def block(match: re.Match[str]) -> str:
        start, subject, section, end = match.groups()
        lines = _core(section or "") if subject == "core" else _recipe(subject)
        return "\n".join([start, *lines, "", end])

    return _BLOCK.sub(block, page)


def with_axes(page: str) -> str:
    """The page of systems, with its table of axes."""
    rows = [("recipe", *(f"`{items}`" for items in AXES)), ("---",) * (len(AXES) + 1)]
    rows += [
        (f"`{name}`", *("no" if items in refused else "yes" for items in AXES))
        for name, refused in NO_AXES.items()
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return re.sub(
        r"(<!-- axes -->\n).*?(<!-- end -->)", rf"\1\n{table}\n\n\2", page, flags=re.DOTALL
    )


def _core(section: str) -> list[str]:
    group = next(group for group in describe(TrainConfig) if group.name == section)
    about = [group.about, ""] if section else []
    return [*about, *_table([(_name(group, key), key) for key in group.keys])]


def _recipe(name: str) -> list[str]:
    core = {key.name: key for group in describe(TrainConfig) for key in group.keys}
    groups = describe(load_recipe(name).Config)
    keys = [(_name(group, key), key) for group in groups for key in group.keys]
    own = [pair for pair in keys if pair[1].name not in core or _differs(core, pair[1])]
    changed = [
        f"`{key.name}={key.shown}`"
        for shown, key in keys
        if (shown, key) not in own and key.default != core[key.name].default
    ]
    return [f"Other defaults than above: {', '.join(changed)}.", "", *_table(own)]


def _differs(core: dict[str, Key], key: Key) -> bool:
    """Whether a recipe's key takes other values than the key of that name elsewhere."""
    return key.type != core[key.name].type


def _name(group: Group, key: Key) -> str:
    """What a key is called where it is set; keys in a list of sections have no section's name."""
    return key.name.rpartition(".")[2] if group.is_list else key.name


def _table(keys: list[tuple[str, Key]]) -> list[str]:
    rows = [
        (f"`{name}`", key.type, f"`{key.shown}`", "yes" if key.is_outcome else "no", key.meaning)
        for name, key in keys
    ]
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, make in ((PAGE, written), (AXES_PAGE, with_axes)):
        path.write_text(make(path.read_text(encoding="utf-8")), encoding="utf-8")
