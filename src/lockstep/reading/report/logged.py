"""What a run has logged by `lockstep.log`, for a report: the newest of each name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.engine.events import Logged, picture_path
from lockstep.engine.logs.log import check_name
from lockstep.errors import TaskError
from lockstep.files import read_bytes
from lockstep.observe.layout import printable
from lockstep.reading.history import History
from lockstep.reading.report.blocks import Block, Heading, Image, Listing, Paragraph, Picture
from lockstep.recipes.pictures import new_figure

_MOST_NAMES = 50
_MOST_BYTES = 8 << 20
_PNG = b"\x89PNG\r\n\x1a\n"


def logged_blocks(run_dir: Path, history: History, level: int, prefix: str) -> Iterator[Block]:
    """Texts, histograms and pictures; scalars are among the curves.

    Args:
        run_dir: path of the run directory.
        history: of the run.
        level: of the heading.
        prefix: what names of pictures begin with.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    newest = [events[-1] for _, events in sorted(history.logged.items()) if events]
    if newest:
        yield Heading("Logged", level)
    for number, event in enumerate(newest[:_MOST_NAMES]):
        title = f"{event.name} at step {event.step:,}"
        name = f"{prefix}logged_{number}"
        try:
            if event.kind == "text":
                yield Listing([f"{title}:", *event.text.splitlines()])
            elif event.kind == "histogram":
                yield Picture(name, title, _histogram(event.value))
            else:
                yield Image(name, title, _png(run_dir, event))
        except (OSError, TaskError, KeyError, TypeError, ValueError, OverflowError) as error:
            yield Paragraph(f"{title}: cannot be shown: {error}")
    if len(newest) > _MOST_NAMES:
        yield Paragraph(f"{len(newest) - _MOST_NAMES:,} further names are in events.jsonl.")


def _png(run_dir: Path, event: Logged) -> bytes:
    """The file of a picture: by name and step, for the path in a row may lead anywhere."""
    check_name(event.name)
    if event.step < 0:
        raise ValueError(f"step {event.step} is negative")
    content = read_bytes(run_dir / picture_path(event.name, event.step), _MOST_BYTES)
    if not content.startswith(_PNG):
        raise ValueError("is no PNG file")
    return content


def _histogram(value: Any) -> Any:
    """A figure with the counts of a histogram.

    Raises:
        KeyError: a part is missing.
        OverflowError: a count is infinite.
        TypeError: a part is no number.
        ValueError: a part is no number.
    """
    least, greatest = float(value["min"]), float(value["max"])
    counts = [int(count) for count in value["counts"]]
    if not counts or not -1e300 < least <= greatest < 1e300:
        raise ValueError(f"from {least:g} to {greatest:g} nothing can be drawn")
    width = (greatest - least) / len(counts)
    figure = new_figure(5.2, 2.7, "", "report")
    figure.suptitle(None)
    axes = figure.add_subplot(1, 1, 1)
    places = [least + width * (number + 0.5) for number in range(len(counts))]
    axes.bar(places, counts, width=width or 1.0, color="#3b76af")
    apart = {name: int(value[f"num_{name}"]) for name in ("nan", "inf")}
    beside = ", ".join(f"{count:,} {name}" for name, count in apart.items() if count)
    axes.set_xlabel(printable(f"value (beside {beside})" if beside else "value"), fontsize=8)
    axes.tick_params(labelsize=8)
    return figure
