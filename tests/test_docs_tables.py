"""What is generated in the documentation is up to date: tables of keys, the page of commands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.config import TrainConfig
from lockstep.config.help import describe
from lockstep.launching.systems import recipe_names

DOCS = Path(__file__).parents[1] / "docs"
CORE = [group.name for group in describe(TrainConfig)]


def script(name: str) -> ModuleType:
    """A script of docs/, imported."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("tables")


def test_the_page_is_up_to_date(tables: ModuleType) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.written(page) == page, "run `make docs-tables`"


def test_no_section_and_no_recipe_is_left_out(tables: ModuleType) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    subjects = re.findall(r"<!-- keys: (.+?) -->", page)
    assert subjects == [f"core {name}".strip() for name in CORE] + [
        "digits",
        "cifar",
        "ufs",
        "hrm",
        "sketched",
        "quantum",
    ]
    assert sorted(subjects[len(CORE) :]) == recipe_names()


def test_a_stale_table_is_written_again(tables: ModuleType) -> None:
    stale = "before\n<!-- keys: core data -->\n\n| old |\n\n<!-- end -->\nafter\n"
    new = tables.written(stale)
    assert new.startswith("before\n<!-- keys: core data -->\n")
    assert new.endswith("\n<!-- end -->\nafter\n")
    assert "| old |" not in new
    assert "| `data.shuffle` | bool | `true` | yes | Draw a new order for each epoch. |" in new
    assert tables.written(new) == new


def test_every_extra_of_users_is_on_the_page_of_installation() -> None:
    page = (DOCS / "start" / "install.md").read_text(encoding="utf-8")
    project = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    _, _, section = project.partition("[project.optional-dependencies]\n")
    extras = {*re.findall(r"^(\w+) = \[", section.partition("\n[")[0], re.MULTILINE)}
    listed = {*re.findall(r"`([a-z0-9]+)`", "".join(re.findall(r"^\|[^|]*", page, re.MULTILINE)))}
    assert extras - {"bench", "dev", "docs"} == listed


def test_the_page_of_commands_is_up_to_date() -> None:
    commands = script("commands")
    page = commands.PAGE.read_text(encoding="utf-8")
    assert commands.written() == page, "run `make docs-tables`"
    assert "| `-q`, `--quiet` | Show warnings, errors and the last line only. |" in page
    assert "## lockstep quantum predict" in page
