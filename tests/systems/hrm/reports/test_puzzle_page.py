"""Grids and charts of a page, one renderer for each kind of puzzle."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.systems.hrm.data import arc
from lockstep.systems.hrm.reports.page import (
    cropped,
    grid,
    hexed,
    histogram,
    line_chart,
    page,
)
from lockstep.systems.hrm.reports.rules import Kind, kind_of
from lockstep.systems.hrm.reports.scores import PuzzleAnswers, SplitAnswers

ARC, MAZE, SUDOKU = kind_of(12, 900), kind_of(6, 900), kind_of(6, 16)


def cells(html: str) -> list[tuple[list[str], str]]:
    """The classes and the text of each cell."""
    return [
        ((cell.get("class") or "").split(), cell.text or "")
        for cell in ElementTree.fromstring(html).iter("i")
    ]


def test_a_sudoku_has_digits_clues_boxes_and_mistakes() -> None:
    tokens = np.array([1, *range(2, 6), *[5] * 11])
    given_cells, wrong = np.arange(16) == 1, np.arange(16) == 15
    found = cells(grid(SUDOKU, tokens, "answer", "an <answer>", given_cells, wrong))
    assert [text for _, text in found] == ["", "1", "2", "3", *["4"] * 12]
    assert [cell for cell, (names, _) in enumerate(found) if "g" in names] == [1]
    assert [cell for cell, (names, _) in enumerate(found) if "w" in names] == [15]
    assert [c for c, (names, _) in enumerate(found) if "r" in names] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert [c for c, (names, _) in enumerate(found) if "b" in names] == [4, 5, 6, 7, *range(12, 16)]


def test_a_maze_has_coloured_cells() -> None:
    tokens = np.resize(np.arange(6), 900)
    found = cells(grid(MAZE, tokens, "question", "question", np.zeros(900, bool)))
    assert [names for names, _ in found] == [[f"k{token}"] for token in tokens]
    assert [text for _, text in found[:6]] == ["?", "", "", "S", "G", ""]


def test_arc_has_ten_colours_and_no_rows_of_padding() -> None:
    question = arc.to_tokens(np.arange(10, dtype=np.uint8).reshape(2, 5))
    answer = arc.to_tokens(np.full((4, 3), 7, np.uint8))
    small, shown = cropped(ARC, [question, answer])
    assert (small.rows, small.columns) == (5, 6)  # one row and column more for the ends
    html = grid(small, question[shown], "question", "q", np.zeros(len(shown), bool))
    assert "--columns:6" in html
    rows = np.array([int(names[0][1:]) for names, _ in cells(html)]).reshape(5, 6)
    assert rows.tolist() == [
        [2, 3, 4, 5, 6, 1], [7, 8, 9, 10, 11, 1], [1, 1, 1, 1, 1, 0], [0] * 6, [0] * 6,
    ]  # fmt: skip
    empty, _ = cropped(ARC, [np.zeros(900, np.uint8)])
    assert (empty.rows, empty.columns) == (1, 1)


def test_each_colour_of_arc_and_each_token_of_a_maze_has_a_look() -> None:
    text = page("", {}, ARC, gathered(900), [])
    looks = re.findall(r"\.arc i\.(k\d+) \{ background: (#\w+)", text)
    assert [name for name, _ in looks] == [f"k{token}" for token in range(2, 12)]
    assert len({colour for _, colour in looks}) == 10
    assert {*re.findall(r"\.maze i\.(k\d) \{", text)} == {"k0", "k1", "k3", "k4", "k5"}


def test_other_tokens_are_numbers() -> None:
    kind = kind_of(7, 10)
    html = grid(kind, np.resize(np.arange(7), 10), "", "", np.zeros(10, bool))
    assert [text for _, text in cells(html)] == [*"0123456012"]


@given(st.lists(st.integers(0, 255), min_size=1))
def test_hexadecimal_tokens_come_back(tokens: list[int]) -> None:
    pairs = re.findall("..", hexed(np.array(tokens)))
    assert [int(pair, 16) for pair in pairs] == tokens


def gathered(length: int) -> SplitAnswers:
    grids = np.ones((1, length), np.uint8)
    numbers = np.ones(1, np.int64)
    return SplitAnswers(
        np.array([0.5, 1.0]), np.array([0.75, 1.0]), np.array([0, 1, 0]), grids, grids, grids,
        numbers, numbers, np.zeros(1, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [ARC, MAZE, SUDOKU, kind_of(7, 10)])
def test_everything_from_data_is_escaped(kind: Kind) -> None:
    hostile = "</script><script>alert(1)</script>\"'&"
    ones = np.ones(kind.cells, np.uint8)
    answers, q_halt = np.stack([ones, ones + 1]), np.zeros(2, np.float32)
    seen = PuzzleAnswers(1, ones, ones, answers, q_halt, None, 2, False)
    text = page(hostile, {hostile: hostile}, kind, gathered(kind.cells), [seen])
    assert "alert(1)</script>" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") == 4
    assert text.count("<script") == text.count("</script>") == 2
    assert f"mistakes: {kind.cells}, halting 0.500" in text


def test_the_answer_that_is_scored_is_there_without_javascript() -> None:
    label = np.full(16, 2, np.uint8)
    answers = np.stack([label, label + 1])
    seen = PuzzleAnswers(7, label, label, answers, np.array([0, 9], np.float32), 1, 1, True)
    text = page("", {}, SUDOKU, gathered(16), [seen])
    assert "Puzzle 7 " in text
    assert 'class="puzzle right"' in text
    assert "after segment 1 of 2, mistakes: 0, halting 0.500" in text
    answer = next(line for line in text.splitlines() if 'class="grid sudoku answer"' in line)
    assert re.findall(r">(\d?)</i>", answer) == ["1"] * 16
    assert f'data-answers="{hexed(answers[0])} {hexed(answers[1])}"' in text
    assert 'min="1" max="2" value="1"' in text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=64))
def test_lines_lie_where_their_values_are(values: list[float]) -> None:
    svg = ElementTree.fromstring("".join(line_chart([("a<b", "exact", values)], "t", "x")))
    (line,) = svg.iter("polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(points) == len(values)
    for (x, y), value in zip(points, values, strict=True):
        assert 44 <= x <= 468
        assert y == pytest.approx(14 + 170 * (1 - value), abs=0.051)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=65))
def test_bars_are_as_high_as_their_counts(counts: list[int]) -> None:
    names = [str(number) for number in range(len(counts))]
    svg = ElementTree.fromstring("".join(histogram(names, counts, "t", "x")))
    heights = [float(bar.attrib["height"]) for bar in svg.iter("rect")]
    most = max(1, *counts)
    assert heights == pytest.approx([170 * count / most for count in counts], abs=0.051)
    assert names[-1] in [text.text for text in svg.iter("text")]
