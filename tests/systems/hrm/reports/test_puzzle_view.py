"""The files of `lockstep hrm view`."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.systems.hrm.reports.scores import by_segments
from lockstep.systems.hrm.reports.trained_model import load_trained

Here = Callable[..., Any]


class Elements(HTMLParser):
    """The elements of a page, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_of_all_there_is(here: Here, sudokus: Path, tmp_path: Path) -> None:
    done = here("hrm", "view", str(sudokus), "--output", "a", "--num", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote a/index.html\nwrote a/predictions.npz\n"
    here("hrm", "view", str(sudokus), "--output", "b", "--num", "5")
    for name in ("index.html", "predictions.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    text = (tmp_path / "a/index.html").read_text(encoding="utf-8")
    page = Elements(text)
    puzzles = [values for tag, values in page.found if "puzzle" in (values.get("class") or "")]
    assert len(puzzles) == 5
    assert [*page.found[0]] == ["html", {"lang": "en"}]
    assert f"{sudokus.name}: puzzles of val" in page.texts  # has <b>&amp; in its name
    assert "<b>" not in text
    (score,) = by_segments(
        load_trained(sudokus, "latest"), *load_trained(sudokus, "latest").puzzles("val"), [4], False
    )
    assert f"{score.accuracy:.2%}" in page.texts
    assert "step 3" in page.texts


def test_a_page_loads_nothing(here: Here, sudokus: Path, tmp_path: Path) -> None:
    here("hrm", "view", str(sudokus), "--output", "view", "--num", "1")
    text = (tmp_path / "view/index.html").read_text(encoding="utf-8")
    for tag, values in Elements(text).found:
        assert tag not in ("link", "img", "iframe", "object", "base", "a")
        assert not {"src", "href", "onload", "srcset"} & {*values}
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|eval\(|innerHTML", text)


def test_predictions_are_those_of_the_model(here: Here, sudokus: Path, tmp_path: Path) -> None:
    done = here("hrm", "view", str(sudokus), "--output", "view", "--segments", "2", "--num", "0",
                "--split", "train")  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = load_trained(sudokus, "latest")
    inputs, labels = run.puzzles("train")
    answers = [answers for _, answers in run.batches(inputs, 2)]
    with np.load(tmp_path / "view/predictions.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["inputs", "labels", "predictions", "q_halt", "segments"]
        assert {arrays[name].dtype.name for name in ("inputs", "labels", "predictions")} == {
            "uint8"
        }
        assert np.array_equal(arrays["inputs"], inputs)
        assert np.array_equal(arrays["labels"], labels)
        assert np.array_equal(
            arrays["predictions"], np.concatenate([found.tokens[1] for found in answers])
        )
        assert np.array_equal(
            arrays["q_halt"], np.concatenate([found.q_halt[1] for found in answers])
        )
        assert arrays["segments"].shape == (24,)


def test_mazes_are_drawn_too(here: Here, mazes: Path, tmp_path: Path) -> None:
    assert here("hrm", "view", str(mazes), "--output", "view").returncode == 0
    page = Elements((tmp_path / "view/index.html").read_text(encoding="utf-8"))
    assert sum(tag == "i" for tag, _ in page.found) == 2 * 3 * 900
