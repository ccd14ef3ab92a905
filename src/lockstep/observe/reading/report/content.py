"""The blocks of a report, with what a run has logged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.config.files import read_bytes
from lockstep.engine import events
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.listing import folders
from lockstep.engine.events import picture_path
from lockstep.engine.log import check_name
from lockstep.errors import CheckpointError, TaskError
from lockstep.observe import baselines, text
from lockstep.observe.reading import differences
from lockstep.observe.reading.diagnosis import calls_of
from lockstep.observe.reading.diagnosis.verdict import causes, diagnosis_lines
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.history import KINDS, History
from lockstep.observe.reading.listing import Summary, summarise
from lockstep.observe.reading.report import page
from lockstep.observe.reading.report.pictures import histogram, pictures
from lockstep.observe.step_costs import peak_memory, step_time

_MAX_NAMES = 50
_MAX_BYTES = 8 << 20
_MAX_EVENTS = 200
_PNG = b"\x89PNG\r\n\x1a\n"
_SECONDS_A_DAY = 86_400
_ELSEWHERE = (
    events.Evaluated, events.Improved, events.Checkpointed, events.RunStarted, events.Finished,
)  # fmt: skip
"""Events that curves and tables show."""


def report_of(run_dirs: Sequence[Path]) -> Iterator[page.Block]:
    """The report of a run, or of several that are compared.

    Raises:
        RunDirectoryError: one of them cannot be read.
        ConfigError: matplotlib is not installed.
    """
    summaries = [summarise(run_dir) for run_dir in run_dirs]
    histories = [read_run(run_dir) for run_dir in run_dirs]
    if len(run_dirs) == 1:
        yield page.Heading(f"{summaries[0].task or 'run'}: {run_dirs[0].resolve().name}", 1)
        yield from _outcome(summaries[0], histories[0])
    else:
        yield page.Heading(f"{len(run_dirs)} runs compared", 1)
        names = [[differences.letter(n), str(run_dir)] for n, run_dir in enumerate(run_dirs)]
        yield page.Grid(["", "run"], names)
        yield from _side_by_side(summaries, histories, run_dirs)
    by_name = {differences.letter(n): history for n, history in enumerate(histories)}
    yield from pictures(by_name)
    for name, summary, history in zip(by_name, summaries, histories, strict=True):
        if len(run_dirs) > 1:
            yield page.Heading(f"{name}: {summary.path}")
            yield from _outcome(summary, history)
        prefix = f"{name}_" if len(run_dirs) > 1 else ""
        level = 3 if len(run_dirs) > 1 else 2
        yield from logged_blocks(summary.path, history, level, prefix)
        yield from _beside_baselines(summary.path, level)
        yield from _details(summary, history, level)


def _beside_baselines(run_dir: Path, level: int) -> Iterator[page.Block]:
    found = baselines.kept(run_dir)
    if found:
        yield page.Heading("Beside simple models", level)
    for beside in found:
        title, *rows = baselines.cells(beside)
        yield page.Grid(title, rows)
        yield page.Paragraph(beside.verdict)


def _outcome(summary: Summary, history: History) -> Iterator[page.Block]:
    plan, end = history.plan, history.end
    total = f" of {summary.total_steps:,}" if summary.total_steps else ""
    rows = [["state", summary.state], ["step", f"{summary.step:,}{total}"]]
    if isinstance(end, events.Failed):
        rows.append(["error", end.message])
    if isinstance(end, events.Finished):
        rows.append(["reason", end.reason])
        rows.append(["SHA-256 of the parameters", end.params_sha256])
        more = {"what microbatches carry": end.carry_sha256, "the tables": end.tables_sha256}
        rows += [[f"SHA-256 of {name}", digest] for name, digest in more.items() if digest]
    if plan is not None:
        where = f"{plan.launcher}, {plan.transport}, {plan.device}"
        rows.append(["ranks", f"{plan.world_size} ({where})"])
        rows.append(["parameters", f"{plan.num_parameters:,}"])
        rows.append(["batch", f"{plan.batch_size:,} samples, {plan.num_microbatches} microbatches"])
    if history.started:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(history.started))
        rows.append(["started", began])
        days, rest = divmod(history.newest - history.started, _SECONDS_A_DAY)
        took = (f"{text.count(int(days), 'day')} " if days else "") + text.duration(rest)
        rows.append(["from the first event to the newest", took])
    cost = differences.cost_of_run(summary, history)
    costs = [["time of a step", step_time(cost)], ["memory of a rank", peak_memory(cost)]]
    rows += [row for row in costs if row[1]]
    rows += [[name, repr(value)] for name, value in summary.metrics.items()]
    if summary.tags:
        rows.append(["tags", " ".join(summary.tags)])
    yield page.Grid(["", ""], rows)


def _side_by_side(
    summaries: Sequence[Summary], histories: Sequence[History], run_dirs: Sequence[Path]
) -> Iterator[page.Block]:
    found = differences.config_differences([run.config for run in summaries])
    yield page.Heading("Differences")
    letters = [differences.letter(n) for n in range(len(summaries))]
    if found:
        rows = [[key, *map(str, values)] for key, values in found.items()]
        yield page.Grid(["key of the config", *letters], rows)
    else:
        yield page.Paragraph("All have the same config.")
    names = dict.fromkeys(name for run in summaries for name in run.metrics)
    pairs = zip(summaries, histories, strict=True)
    costs = differences.costs_of_runs([differences.cost_of_run(*pair) for pair in pairs])
    rows = [
        ["state", *(run.state for run in summaries)],
        ["step", *(f"{run.step:,}" for run in summaries)],
        ["SHA-256", *(run.sha256[:16] for run in summaries)],
        *costs,
        *([name, *(repr(run.metrics.get(name, "")) for run in summaries)] for name in names),
    ]
    yield page.Grid(["result", *letters], rows)
    for name, history, run_dir in list(zip(letters, histories, run_dirs, strict=True))[1:]:
        try:
            found_here = differences.partings((histories[0], history), (run_dirs[0], run_dir))
        except CheckpointError as error:
            yield page.Paragraph(str(error))
            continue
        lines = differences.lines_of_partings(f"{letters[0]} and {name}", found_here)
        yield page.Listing(list(lines))


def _details(summary: Summary, history: History, level: int) -> Iterator[page.Block]:
    yield page.Heading("Diagnosis", level)
    found = causes(summary, history, calls_of(summary))
    yield page.Listing(list(diagnosis_lines(summary, history, found)))
    if history.processes:
        yield page.Heading("Processes", level)
        yield page.Grid(
            ["slot", "rank", "host", "pid", "device", "microbatches", "lost",
             *text.KINDS_OF_WORK, "sent", "received", "calls", "gradient"],
            list(_processes(history)),
        )  # fmt: skip
        if any(process.times.grad_norm for process in history.processes):
            # Of the newest step that each has reported, as the curve's last point is.
            summed = text.number(history.curves["grad_norm"].values[-1])
            yield page.Paragraph(
                f"Gradients are norms before the sum over ranks; that of all is {summed}."
            )
    saved = [h.event for h in history.happenings if isinstance(h.event, events.Checkpointed)]
    if saved:
        stall, write = sum(s.stall_s for s in saved), sum(s.write_s for s in saved)
        yield page.Heading("Checkpoints", level)
        yield page.Paragraph(
            f"{text.count(len(saved), 'checkpoint')}, the newest of step {saved[-1].step:,} with "
            f"{text.size(saved[-1].num_bytes)}. Training waited {stall:.2f} s for them altogether; "
            f"writing took {write:.2f} s beside it."
        )
    happened = [h for h in history.happenings if not isinstance(h.event, _ELSEWHERE)]
    if happened:
        yield page.Heading("What happened", level)
        shown = happened[-_MAX_EVENTS:]
        rows = [[_clock(h.time - history.started), text.line(h.event)] for h in shown]
        yield page.Grid(["time", "event"], rows)
        if len(happened) > len(shown):
            yield page.Paragraph(
                f"{len(happened) - len(shown):,} earlier ones are in events.jsonl."
            )
    yield from _environment(summary, level)
    problems = [*summary.problems, *history.problems]
    if problems:
        yield page.Heading("What cannot be read", level)
        yield page.Listing(problems)


def _processes(history: History) -> Iterator[list[str]]:
    for process in history.processes:
        joined = process.joined
        lost = _clock(process.until - history.started) if process.until is not None else ""
        yield [
            str(joined.slot), str(process.rank), joined.host, str(joined.pid), joined.device,
            str(len(range(*joined.microbatches))), lost,
            *(f"{process.seconds[kind]:.2f} s" for kind in KINDS),
            text.size(process.times.sent_bytes), text.size(process.times.received_bytes),
            f"{process.times.num_calls:,.0f}", _norm(process.times.grad_norm),
        ]  # fmt: skip


def _norm(value: float) -> str:
    return text.number(value) if value else ""


def _environment(summary: Summary, level: int) -> Iterator[page.Block]:
    yield page.Heading("Config and versions", level)
    newest = folders(summary.path / "checkpoints")
    if newest:
        try:
            versions: Mapping[str, object] = checkpoint.read_manifest(newest[0])["versions"]
            yield page.Grid(["version", ""], [[key, str(value)] for key, value in versions.items()])
        except (CheckpointError, KeyError, AttributeError):
            yield page.Paragraph(f"The newest checkpoint, {newest[0].name}, cannot be read.")
    lines = [f"{key}: {value}" for key, value in summary.config.items()]
    if lines:
        yield page.Listing(lines, summary="config")


def _clock(seconds: float) -> str:
    return text.clock(max(0.0, seconds))


def logged_blocks(run_dir: Path, history: History, level: int, prefix: str) -> Iterator[page.Block]:
    """Texts, histograms and pictures; scalars are among the curves.

    Args:
        run_dir: path of the run directory.
        history: events of the run.
        level: level of the heading.
        prefix: prefix of the names of pictures.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    newest = [logged[-1] for _, logged in sorted(history.logged.items()) if logged]
    if newest:
        yield page.Heading("Logged", level)
    for number, event in enumerate(newest[:_MAX_NAMES]):
        title = f"{event.name} at step {event.step:,}"
        name = f"{prefix}logged_{number}"
        try:
            if event.kind == "text":
                yield page.Listing([f"{title}:", *event.text.splitlines()])
            elif event.kind == "histogram":
                yield page.Picture(name, title, histogram(event.value))
            else:
                yield page.Image(name, title, _png(run_dir, event))
        except (OSError, TaskError, KeyError, TypeError, ValueError, OverflowError) as error:
            yield page.Paragraph(f"{title}: cannot be shown: {error}")
    if len(newest) > _MAX_NAMES:
        yield page.Paragraph(f"{len(newest) - _MAX_NAMES:,} further names are in events.jsonl.")


def _png(run_dir: Path, event: events.Logged) -> bytes:
    """The file of a picture, by name and step: a path in a row could lead anywhere."""
    check_name(event.name)
    if event.step < 0:
        raise ValueError(f"step {event.step} is negative")
    content = read_bytes(run_dir / picture_path(event.name, event.step), _MAX_BYTES)
    if not content.startswith(_PNG):
        raise ValueError("is no PNG file")
    return content
