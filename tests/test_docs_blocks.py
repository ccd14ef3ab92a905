"""The code on the pages of the documentation works, when it is followed from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import environment
from tests.pages import PAGES, script

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
SLOW = {"how-to/diagnose.md", "how-to/monitor.md", "how-to/runs.md"}
"""Pages of commands that tests of their own run as well."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, and beside it the commands that pages use."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in {"python": "", "lockstep": " -m lockstep"}.items():
        file = commands / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n', encoding="utf-8")
        file.chmod(0o755)
    empty = tmp_path / "empty"
    empty.mkdir()
    return empty


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES],
)
def test_a_page_works_from_top_to_bottom(page: str, folder: Path) -> None:
    env = environment()
    env["PATH"] = f"{folder.parent / 'bin'}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script(page)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    check(page, folder)


def check(page: str, folder: Path) -> None:
    """What pages say of the SHA-256s of their runs."""
    equal = {
        "start/tutorial.md": ("one", "two", "parts"),
        "tutorials/lost-rank.md": ("calm", "hit"),
    }
    results = [folder / "runs" / run / "result.json" for run in equal.get(page, ())]
    lines = [re.findall('"params_sha256.*', file.read_text(encoding="utf-8")) for file in results]
    assert all(line == lines[0] for line in lines)
    assert all(len(line) == 1 for line in lines)


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or (ROOT / target).exists(), f"{page.name}: {target}"


def test_every_page_is_two_clicks_from_the_first() -> None:
    docs = ROOT / "docs"

    def linked(page: Path) -> set[Path]:
        targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        return {(page.parent / target).resolve() for target in targets}

    near = linked(docs / "index.md")
    near |= {page for first in near for page in linked(first)}
    assert not {page.resolve() for page in docs.rglob("*.md")} - near - {docs / "index.md"}


def test_the_readme_shows_the_example_and_a_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "digits.py").read_text(encoding="utf-8") in readme
    (picture,) = re.findall(r"!\[[^\]]+\]\((\S+)\)", readme)
    shown = "".join(ElementTree.parse(ROOT / picture).getroot().itertext())
    assert "killed (SIGKILL)" in shown
    (digest,) = {*re.findall(r"SHA-256 (\w+)", shown)}  # of both runs
    assert len(digest) == 40
    assert len(readme.split()) <= 700
