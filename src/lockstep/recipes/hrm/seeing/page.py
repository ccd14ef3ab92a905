"""One self-contained page about a trained model: scores, charts and puzzles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

import numpy as np

from lockstep.recipes.hrm.seeing.charts import histogram, line_chart
from lockstep.recipes.hrm.seeing.gathered import Gathered, Seen
from lockstep.recipes.hrm.seeing.grids import drawn, drawn_kind, drawn_symbols, hexed, window
from lockstep.recipes.hrm.seeing.kinds import Kind
from lockstep.recipes.hrm.seeing.shown import probability

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    title: str, facts: Mapping[str, str], kind: Kind, found: Gathered, shown: Sequence[Seen]
) -> str:
    """The HTML of a page, which loads nothing.

    Args:
        title: heading.
        facts: names and values to show below it.
        kind: kind of the puzzles.
        found: scores.
        shown: puzzles.
    """
    return "\n".join([*_head(title), *_body(title, facts, kind, found, shown), "</html>"]) + "\n"


def _head(title: str) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield '<head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>\n{_asset('page.css')}</style></head>"


def _body(
    title: str, facts: Mapping[str, str], kind: Kind, found: Gathered, shown: Sequence[Seen]
) -> Iterator[str]:
    yield "<body>"
    yield f"<h1>{escape(title)}</h1>"
    yield "<dl>"
    for name, value in facts.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"
    yield from _charts(found)
    yield f"<h2>{len(shown)} of {len(found.inputs):,} puzzles</h2>"
    yield (
        '<p class="note">Those with mistakes first. Mistakes have a red frame; the slider goes '
        "through the segments, and marks what has changed since the one before.</p>"
    )
    yield (
        '<p id="filter" hidden><label><input type="checkbox"> only puzzles with mistakes'
        "</label></p>"
    )
    for seen in shown:
        yield from _puzzle(kind, seen)
    symbols = json.dumps(drawn_symbols(kind)).replace("<", "\\u003c")
    yield f'<script type="application/json" id="symbols">{symbols}</script>'
    yield f"<script>\n{_asset('page.js')}</script>"
    yield "</body>"


def _charts(found: Gathered) -> Iterator[str]:
    most = len(found.exact)
    curves = [
        ("exact", "exact", found.exact.tolist()),
        ("accuracy", "part", found.accuracy.tolist()),
    ]
    names = [*(str(number) for number in range(1, most + 1)), "not"]
    yield '<h2>By segment</h2><div class="charts">'
    yield "<figure>"
    yield from line_chart(curves, "exact and accuracy after each segment", "segments")
    yield "<figcaption>Right puzzles (exact) and cells (accuracy) after each segment.</figcaption>"
    yield "</figure><figure>"
    yield from histogram(names, found.halting.tolist(), "segments until halting", "segments")
    yield "<figcaption>After how many segments puzzles halt by themselves.</figcaption>"
    yield "</figure></div>"


def _puzzle(kind: Kind, seen: Seen) -> Iterator[str]:
    """A puzzle: its question, its right answer, and the model's that is scored."""
    cut = window(kind, [seen.question, seen.label, *seen.answers])
    small = drawn_kind(kind, cut)
    question, label = seen.question[cut.cells], seen.label[cut.cells]
    answers = seen.answers[:, cut.cells]
    most, last = len(answers), answers[seen.used - 1]
    halting = [f"{probability(float(logit)):.3f}" for logit in seen.q_halt]
    num_wrong = int(((label != 0) & (last != label)).sum())
    halted = f"halts by itself after {seen.halted}" if seen.halted else "does not halt by itself"
    yield (
        f'<section class="puzzle {"right" if seen.is_right else "wrong"}" '
        f'data-question="{hexed(question)}" data-label="{hexed(label)}" '
        f'data-answers="{" ".join(map(hexed, answers))}" data-halting="{" ".join(halting)}">'
    )
    verdict = "right" if seen.is_right else "with mistakes"
    yield f'<h3>Puzzle {seen.number} <span class="verdict">{verdict}, {halted}</span></h3>'
    given = kind.given(seen.question)[cut.cells]
    right = np.where(label == 0, question if kind.name != "arc" else 0, label)
    yield '<div class="grids">'
    for name, style, tokens, wrong in (
        ("question", "question", question, None),
        ("right answer", "label", right, None),
        ("answer of the model", "answer", last, (label != 0) & (last != label)),
    ):
        marks = given if style != "question" else np.ones_like(given)
        yield f"<figure>{drawn(small, tokens, style, name, marks, wrong)}"
        if style != "answer":
            yield f"<figcaption>{name}</figcaption></figure>"
    at = f"after segment {seen.used} of {most}, mistakes: {num_wrong}, "
    yield f'<figcaption class="at">{at}halting {halting[seen.used - 1]}</figcaption>'
    yield (
        f'<label class="control" hidden>segment <input type="range" min="1" max="{most}" '
        f'value="{seen.used}" autocomplete="off"></label></figure>'
    )
    yield "</div></section>"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
