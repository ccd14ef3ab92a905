"""The blocks of a report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.listing import folders
from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Failed,
    Finished,
    Improved,
    RunStarted,
)
from lockstep.errors import CheckpointError
from lockstep.observe import text
from lockstep.observe.costs import peak_memory, step_time
from lockstep.reading.configs import config_differences
from lockstep.reading.diagnosis.calls import calls_of
from lockstep.reading.diagnosis.verdict import causes, told
from lockstep.reading.differences import partings
from lockstep.reading.follow import read_run
from lockstep.reading.history import KINDS, Happening, History
from lockstep.reading.listing import Summary, summarise
from lockstep.reading.report.blocks import Block, Grid, Heading, Listing, Paragraph
from lockstep.reading.report.figures import pictures
from lockstep.reading.report.logged import logged_blocks
from lockstep.reading.telling import cost_of_run, costs_of_runs, letter, lines_of_partings

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
    yield Listing(list(told(summary, history, found)))
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
