"""What is generated in the documentation is up to date: tables of keys, the page of commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.config import TrainConfig
from lockstep.config.help import describe
from lockstep.launching.systems import recipe_names
from tests.pages import DOCS, docs_module

CORE = [group.name for group in describe(TrainConfig)]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return docs_module("figures")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return docs_module("tables")


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
    commands = docs_module("commands")
    page = commands.PAGE.read_text(encoding="utf-8")
    assert commands.written() == page, "run `make docs-tables`"
    assert "| `-q`, `--quiet` | Show warnings, errors and the last line only. |" in page
    assert "## lockstep quantum predict" in page


def test_measured_figures_are_those_of_the_benchmarks(figures: ModuleType) -> None:
    for page in figures.pages():
        text = page.read_text(encoding="utf-8")
        assert figures.written(text) == text, f"{page}: run `make docs-tables`"
        assert not figures.unmarked(text), f"{page}: say which cell they are from"
        if page.name != "command-line.md":  # has defaults only
            assert not figures.unlinked(text), f"{page}: name a place, a command, or `given`"
    assert figures.CLAIMS.read_text(encoding="utf-8") == figures.claims_page()
    assert len([*figures.claims()]) > 30


@pytest.mark.parametrize("path", sorted((DOCS / "benchmarks").glob("*.json")), ids=lambda p: p.stem)
def test_a_page_of_benchmarks_has_the_tables_of_its_file(path: Path) -> None:
    lines = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    for section in json.loads(path.read_text(encoding="utf-8"))["sections"]:
        rows = [section["header"], ["---"] * len(section["header"]), *section["rows"]]
        table = [f"| {' | '.join(row)} |" for row in rows]
        start = lines.index(table[0], lines.index(f"## {section['title']}"))
        assert lines[start : start + len(table)] == table
        after = [line for line in lines[start + len(table) :] if line]
        assert after[: len(section["verdicts"])] == section["verdicts"]


def test_a_stale_figure_takes_the_form_of_the_old_one(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {
        "title": "Steps of a model", "header": ["", "ranks", "time", "of it"],
        "rows": [["ours", "2", "1,234.56 ms (1–2)", "0.4567"], ["ours, fast", "2", "7 ms", "1"]],
        "verdicts": ["- Target twice as fast ≥ 2: 2.31 (2.2–2.4) → **met**"],
    }  # fmt: skip
    facts = {"command": "`python benchmarks/x.py`"}
    (tmp_path / "x.json").write_text(json.dumps({"facts": facts, "sections": [section]}))
    monkeypatch.setattr(figures, "BENCHMARKS", tmp_path)
    for old, new in {
        "| 9,999<!-- x: Steps > ours > time --> ms |": "1,235",
        "**.1**<!-- x: Steps > ours, 2 > of -->": ".5",
        "[2.00](x.md)<!-- x: Steps > Target twice as fast ≥ 2: -->": "2.31",
        "about 9 %<!-- x: Steps > ours, fast > time -->": "7",
        "8<!-- x: Steps > ours > time #2 -->": "1",
    }.items():
        number = re.search(r"[\d.,]+", old)
        assert number
        assert figures.written(old) == old.replace(number[0], new, 1)
    for place in ("Steps > theirs > time", "Steps > our > time", "Other > ours > time"):
        with pytest.raises(figures.Stale, match=r"places, not one"):
            figures.written(f"3<!-- x: {place} -->")
    with pytest.raises(figures.Stale, match=r"there is no y\.json"):
        figures.written("3<!-- y: Steps > ours > time -->")
    with pytest.raises(figures.Stale, match=r"is not behind a number"):
        figures.written("3 is the time of two<!-- x: Steps > ours > time -->")
    assert figures.written("in 1:51<!-- measured: y -->") == "in 1:51<!-- measured: y -->"
    link = "[4.05](docs/benchmarks/host.md)"
    assert figures.unmarked(f"{link}, {link}<!-- host: a > b -->") == [link]


def test_a_number_with_a_unit_is_measured_or_given(figures: ModuleType) -> None:
    for text in ("5 s", "**5.5** % less", "[1:51](a.md) minutes", "4 times as fast", "−3\nms"):
        assert figures.unlinked(f"It {text}."), text
    for text in (
        "5<!-- x: a > b --> s", "5<!-- measured: y --> s", "5 s<!-- given -->", "`5 s`", "5 steps",
        "**99 %**<!-- given -->", "```\n5 s\n```", "4 x 4", "1<!-- x: of 90 % > b --> of 3",
    ):  # fmt: skip
        assert not figures.unlinked(text), text
    assert figures.unlinked("5 s<!-- given -->, 6 s and 7 ms<!-- given -->") == ["6 s"]
