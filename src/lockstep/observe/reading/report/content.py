"""The blocks of a report, with what a run has logged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.files import read_bytes
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.listing import folders
from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Failed,
    Finished,
    Improved,
    Logged,
    RunStarted,
    picture_path,
)
from lockstep.engine.log import check_name
from lockstep.errors import CheckpointError, TaskError
from lockstep.observe import text
from lockstep.observe.figures import new_figure, pictures
from lockstep.observe.reading.diagnosis.facts import calls_of
from lockstep.observe.reading.diagnosis.verdict import causes, diagnosis_lines
from lockstep.observe.reading.differences import (
    config_differences,
    cost_of_run,
    costs_of_runs,
    letter,
    lines_of_partings,
    partings,
)
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.history import KINDS, Happening, History
from lockstep.observe.reading.listing import Summary, summarise
from lockstep.observe.reading.report.page import (
    Block,
    Grid,
    Heading,
    Image,
    Listing,
    Paragraph,
    Picture,
)
from lockstep.observe.step_costs import peak_memory, step_time
from lockstep.observe.text import printable

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


_MOST_HAPPENINGS = 200
_SECONDS_A_DAY = 86_400


def report_of(run_dirs: Sequence[Path]) -> Iterator[Block]:
    """What one or more runs came to.

    Raises:
        RunDirectoryError: one of them cannot be read.
        ConfigError: matplotlib is not installed.
    """
    summaries = [summarise(run_dir) for run_dir in run_dirs]
    histories = [read_run(run_dir) for run_dir in run_dirs]
    if len(run_dirs) == 1:
        yield Heading(f"{summaries[0].task or 'run'}: {run_dirs[0].resolve().name}", 1)
        yield from _outcome(summaries[0], histories[0])
    else:
        yield Heading(f"{len(run_dirs)} runs compared", 1)
        names = [[letter(n), str(run_dir)] for n, run_dir in enumerate(run_dirs)]
        yield Grid(["", "run"], names)
        yield from _side_by_side(summaries, histories, run_dirs)
    by_name = {letter(n): history for n, history in enumerate(histories)}
    yield from pictures(by_name)
    for name, summary, history in zip(by_name, summaries, histories, strict=True):
        if len(run_dirs) > 1:
            yield Heading(f"{name}: {summary.path}")
            yield from _outcome(summary, history)
        prefix = f"{name}_" if len(run_dirs) > 1 else ""
        level = 3 if len(run_dirs) > 1 else 2
        yield from logged_blocks(summary.path, history, level, prefix)
        yield from _details(summary, history, level)


def _outcome(summary: Summary, history: History) -> Iterator[Block]:
    plan, end = history.plan, history.end
    total = f" of {summary.total_steps:,}" if summary.total_steps else ""
    rows = [["state", summary.state], ["step", f"{summary.step:,}{total}"]]
    if isinstance(end, Failed):
        rows.append(["error", end.message])
    if isinstance(end, Finished):
        rows.append(["reason", end.reason])
        rows.append(["SHA-256 of the parameters", end.params_sha256])
        rows += (
            [["SHA-256 of what microbatches carry", end.carry_sha256]] if end.carry_sha256 else []
        )
        rows += [["SHA-256 of the tables", end.tables_sha256]] if end.tables_sha256 else []
    if plan is not None:
        rows.append(
            ["ranks", f"{plan.world_size} ({plan.launcher}, {plan.transport}, {plan.device})"]
        )
        rows.append(["parameters", f"{plan.num_parameters:,}"])
        rows.append(["batch", f"{plan.batch_size:,} samples, {plan.num_microbatches} microbatches"])
    if history.started:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(history.started))
        rows.append(["started", began])
        rows.append(["from the first event to the newest", _long(history.newest - history.started)])
    cost = cost_of_run(summary, history)
    told = [["time of a step", step_time(cost)], ["memory of a rank", peak_memory(cost)]]
    rows += [row for row in told if row[1]]
    rows += [[name, repr(value)] for name, value in summary.metrics.items()]
    if summary.tags:
        rows.append(["tags", " ".join(summary.tags)])
    yield Grid(["", ""], rows)


def _side_by_side(
    summaries: Sequence[Summary], histories: Sequence[History], run_dirs: Sequence[Path]
) -> Iterator[Block]:
    found = config_differences([run.config for run in summaries])
    yield Heading("Differences")
    letters = [letter(n) for n in range(len(summaries))]
    if found:
        rows = [[key, *map(str, values)] for key, values in found.items()]
        yield Grid(["key of the config", *letters], rows)
    else:
        yield Paragraph("All have the same config.")
    names = dict.fromkeys(name for run in summaries for name in run.metrics)
    rows = [
        ["state", *(run.state for run in summaries)],
        ["step", *(f"{run.step:,}" for run in summaries)],
        ["SHA-256", *(run.sha256[:16] for run in summaries)],
        *costs_of_runs([cost_of_run(*run) for run in zip(summaries, histories, strict=True)]),
        *([name, *(repr(run.metrics.get(name, "")) for run in summaries)] for name in names),
    ]
    yield Grid(["result", *letters], rows)
    for number in range(1, len(summaries)):
        try:
            runs = (run_dirs[0], run_dirs[number])
            parted = partings((histories[0], histories[number]), runs)
        except CheckpointError as error:
            yield Paragraph(str(error))
            continue
        yield Listing(list(lines_of_partings(f"{letter(0)} and {letter(number)}", parted)))


def _details(summary: Summary, history: History, level: int) -> Iterator[Block]:
    yield Heading("Diagnosis", level)
    found = causes(summary, history, calls_of(summary))
    yield Listing(list(diagnosis_lines(summary, history, found)))
    if history.processes:
        yield Heading("Processes", level)
        yield Grid(
            ["slot", "rank", "host", "pid", "device", "microbatches", "lost",
             *text.KINDS_OF_WORK, "sent", "received", "calls"],
            list(_processes(history)),
        )  # fmt: skip
    saved = [h.event for h in history.happenings if isinstance(h.event, Checkpointed)]
    if saved:
        stall, write = sum(s.stall_s for s in saved), sum(s.write_s for s in saved)
        yield Heading("Checkpoints", level)
        yield Paragraph(
            f"{text.count(len(saved), 'checkpoint')}, the newest of step {saved[-1].step:,} with "
            f"{text.size(saved[-1].num_bytes)}. Training waited {stall:.2f} s for them altogether; "
            f"writing took {write:.2f} s beside it."
        )
    happened = [h for h in history.happenings if _is_told(h)]
    if happened:
        yield Heading("What happened", level)
        shown = happened[-_MOST_HAPPENINGS:]
        rows = [[_clock(h.time - history.started), text.line(h.event)] for h in shown]
        yield Grid(["time", "event"], rows)
        if len(happened) > len(shown):
            yield Paragraph(f"{len(happened) - len(shown):,} earlier ones are in events.jsonl.")
    yield from _environment(summary, level)
    problems = [*summary.problems, *history.problems]
    if problems:
        yield Heading("What cannot be read", level)
        yield Listing(problems)


def _processes(history: History) -> Iterator[list[str]]:
    for process in history.processes:
        joined = process.joined
        lost = _clock(process.until - history.started) if process.until is not None else ""
        yield [
            str(joined.slot), str(process.rank), joined.host, str(joined.pid), joined.device,
            str(len(range(*joined.microbatches))), lost,
            *(f"{process.seconds[kind]:.2f} s" for kind in KINDS),
            text.size(process.times.sent_bytes), text.size(process.times.received_bytes),
            f"{process.times.num_calls:,.0f}",
        ]  # fmt: skip


def _is_told(happening: Happening) -> bool:
    """Whether an event is told in words; the rest is in curves and tables."""
    shown_elsewhere = (Evaluated, Improved, Checkpointed, RunStarted, Finished)
    return not isinstance(happening.event, shown_elsewhere)


def _environment(summary: Summary, level: int) -> Iterator[Block]:
    yield Heading("Config and versions", level)
    newest = folders(summary.path / "checkpoints")
    if newest:
        try:
            versions: Mapping[str, object] = checkpoint.read_manifest(newest[0])["versions"]
            yield Grid(["version", ""], [[key, str(value)] for key, value in versions.items()])
        except (CheckpointError, KeyError, AttributeError):
            yield Paragraph(f"The newest checkpoint, {newest[0].name}, cannot be read.")
    lines = [f"{key}: {value}" for key, value in summary.config.items()]
    if lines:
        yield Listing(lines, summary="config")


def _long(seconds: float) -> str:
    days, rest = divmod(seconds, _SECONDS_A_DAY)
    return (f"{text.count(int(days), 'day')} " if days else "") + text.duration(rest)


def _clock(seconds: float) -> str:
    return text.clock(max(0.0, seconds))
