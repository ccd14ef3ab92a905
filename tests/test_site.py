"""The documentation site: built without warnings, complete, and readable without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lockstep as ls
from lockstep import errors, nn, optim, quantum, sketch
from lockstep.systems.hrm import reasoning

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """What a page loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(given.get("src", ""))
        if tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        # The page for missing addresses is for servers; it names files from the server's root.
        loaded = Page(page.read_text(encoding="utf-8")).loaded
        assert loaded
        for source in loaded:
            assert "//" not in source, f"{page.name} loads {source}"
            if source and page.name != "404.html":
                assert (page.parent / source).is_file(), f"{page.name} loads {source}"
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert "url(http" not in text
        assert "@import" not in text
    assert (site / "search" / "search_index.js").is_file()


def test_the_gallery_shows_the_code(site: Path) -> None:
    for page in (ROOT / "docs" / "gallery").glob("[!i]*.md"):
        html = (site / "gallery" / f"{page.stem}.html").read_text(encoding="utf-8")
        assert 'class="nc">' in html, f"{page.name}: shows no class"


def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = site / "reference"
    pages = [Page(page.read_text(encoding="utf-8")) for page in reference.glob("*.html")]
    anchors = set().union(*(page.anchors for page in pages))
    kinds = [
        k
        for k in vars(errors).values()
        if isinstance(k, type) and k.__module__ == "lockstep.errors"
    ]
    modules = {"hooks", "nn", "quantum", "sketch"}  # their names have places of their own
    names = {f"lockstep.{name}" for name in {*ls.__all__} - {"LockstepError"} - modules}
    names |= {"lockstep.hooks.EMA", "lockstep.hooks.EarlyStopping"}
    entry = {"SYSTEM"}  # what entry points load
    names |= {f"lockstep.quantum.{name}" for name in {*quantum.__all__} - entry}
    names |= {f"lockstep.nn.{name}" for name in nn.__all__}
    names |= {f"lockstep.systems.hrm.reasoning.{name}" for name in reasoning.__all__}
    names |= {f"lockstep.optim.{name}" for name in optim.__all__}
    names |= {f"lockstep.sketch.{name}" for name in {*sketch.__all__} - entry}
    names |= {f"lockstep.errors.{kind.__name__}" for kind in kinds}
    assert not names - anchors
    assert "lockstep.Task.after_step" in anchors
