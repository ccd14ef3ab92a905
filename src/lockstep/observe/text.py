"""Events as text: pure functions from events to lines of a given width."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from rich.cells import cell_len

from lockstep.engine import events


class Item(NamedTuple):
    """A part of a line.

    Attributes:
        importance: rank of importance; the item with the greatest number is dropped first.
        text: the text.
    """

    importance: int
    text: str


def kept(items: Iterable[Item], width: float) -> list[Item]:
    """The items that fit a line, in their order; the least important ones are dropped.

    The most important one stays, however long it is.

    Args:
        items: parts of the line; those without text are ignored.
        width: columns of the line, in which items are separated by two blanks.
    """
    left = [item for item in items if item.text]
    while len(left) > 1 and cell_len(_joined(left)) > width:
        # Of equally important items the last one is dropped.
        left.pop(max(range(len(left)), key=lambda index: (left[index].importance, index)))
    return left


def fitted(items: Iterable[Item], width: float) -> str:
    """The items that `kept` returns, as one line."""
    return _joined(kept(items, width))


def _joined(items: Iterable[Item]) -> str:
    return "  ".join(item.text for item in items)


def row(name: str, value: str, width: float) -> str:
    """A row of a block: the name, and the value in a second column.

    A value with a digest or path that is too long for that column is on a line of its own.
    """
    room = width - _COLUMN
    if max(map(cell_len, value.split(" "))) > room:
        return f"{name}\n{value}"
    return f"{name:<{_COLUMN - 1}} " + wrapped(value, room, 0).replace("\n", "\n" + " " * _COLUMN)


_COLUMN = 12


def wrapped(line: str, width: float, indent: int = 2) -> str:
    """A line, wrapped to the width of a terminal.

    It is broken between items (two blanks), else between words; never inside a word, so that
    numbers, digests and paths stay whole, even if they are too long for a line.

    Args:
        line: text without line breaks.
        width: columns of the terminal; infinite where lines may be of any length.
        indent: blanks before each line but the first.
    """
    if cell_len(line) <= width or line[:1].isspace():
        return line
    room = width - indent
    lines: list[str] = []
    for item in line.split("  "):
        words = [item] if cell_len(item) <= room else item.split(" ")
        for number, word in enumerate(words):
            gap = " " if number else "  "
            limit = width if len(lines) == 1 else room
            if lines and cell_len(lines[-1] + gap + word) <= limit:
                lines[-1] += gap + word
            else:
                lines.append(word)
    return ("\n" + " " * indent).join(lines)


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor or change a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


Pairs = list[tuple[str, str]]
"""A name and a text for each line of a block."""


def summary(
    plan: events.RunStarted | None,
    end: events.Finished,
    resumable: bool = True,
    step_time: str = "",
    verbose: bool = False,
) -> Pairs:
    """How a run ended.

    Args:
        plan: the start of the run, if it is known.
        end: the end of the run.
        resumable: whether `lockstep resume` can go on with the run.
        step_time: what a step has taken.
        verbose: whether what a step took and the newest checkpoint have rows of their own.
    """
    run_dir = plan.run_dir if plan else ""
    status = f"{end.status} at step {end.step:,}" + (f": {end.reason}" if end.reason else "")
    took = f"{duration(end.wall_s)} on {count(end.world_size, 'rank')}"
    checkpoint = end.checkpoint.rpartition("/")[2]
    if verbose:
        ending = [("status", status), ("time", took), ("step", step_time)]
        places = [("checkpoint", end.checkpoint), ("run", run_dir)]
    else:
        times = ", ".join(filter(None, (took, step_time)))
        ending = [("status", f"{status} ({times})")]
        newest = f" (newest checkpoint: {checkpoint})" if checkpoint else ""
        places = [("run", run_dir and run_dir + newest)]
    pairs = [
        *ending,
        *_by_split(end.metrics, {"test": end.test_step}, end.step),
        ("SHA-256", end.params_sha256),
        ("of the carry", end.carry_sha256),
        ("of tables", end.tables_sha256),
        *places,
        ("go on with", resume_command(run_dir) if resumable and end.status == "stopped" else ""),
    ]
    return [(name, text) for name, text in pairs if text]


def resume_command(run_dir: str) -> str:
    """The shell command that resumes a run; empty without a run."""
    # A relative path may begin with a dash, which would be read as an option.
    path = f"./{run_dir}" if run_dir.startswith("-") else run_dir
    return f"lockstep resume {shlex.quote(path)}" if run_dir else ""


def _by_split(
    metrics: Mapping[str, float], steps: Mapping[str, int | None], last_step: int
) -> Iterator[tuple[str, str]]:
    """A row for each split with metrics named "split/name"; one for all other metrics.

    Args:
        metrics: value by name.
        steps: the step whose parameters a split was evaluated with.
        last_step: the step that needs no mention.
    """
    splits: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        split, _, name = key.rpartition("/")
        splits.setdefault(split, {})[name] = value
    for split, values in splits.items():
        step = steps.get(split)
        mention = [] if step in (None, last_step) else [f"(step {step:,})"]
        yield split or "metrics", "  ".join([*measures(values), *mention])


def outcome(plan: events.RunStarted | None, end: events.Finished) -> str:
    """How a run ended, in one line."""
    where = [plan.run_dir] if plan else []
    return ", ".join([f"{end.status} at step {end.step:,}", f"SHA-256 {end.params_sha256}", *where])


def progress(done: events.StepDone) -> list[Item]:
    """The state of training as short items, each with its importance."""
    first, *others = measures(done.metrics) or [""]
    return [
        Item(1, f"epoch {done.epoch}"),
        Item(0, f"loss {number(done.loss)}"),
        Item(2, first),
        *(Item(4 + index, text) for index, text in enumerate(others)),
        Item(_LAST, f"lr {number(done.lr)}"),
        Item(3, f"{number(done.samples_per_s)} samples/s"),
        Item(_LAST + 1, f"efficiency {done.compute_efficiency:.0%}"),
    ]


_LAST = 1000
"""The importance of what is less important than any metric."""


def evaluation(
    event: events.Evaluated, loss: float | None, notes: Sequence[str], width: int
) -> str:
    """One line for an evaluation and its consequences.

    Args:
        event: the evaluation.
        loss: training loss up to this step; left out if it is None, or if the line would become
            longer than `width`.
        notes: what else is known of this step, such as `best` and `saved`.
        width: columns of the console.
    """
    at = f"step {event.step:,}:"
    which = (
        event.split if event.model_step is None else f"{event.split} of step {event.model_step:,}"
    )
    rest = "  ".join([f"{which}: {'  '.join(measures(event.metrics))}", *notes])
    if loss is not None:
        full = f"{at} train: loss {number(loss)}  {rest}"
        if cell_len(full) <= width:
            return full
    return f"{at} {rest}"


def evaluated_at(event: events.Evaluated) -> str:
    """What was evaluated: `val at 400`."""
    step = event.step if event.model_step is None else event.model_step
    return f"{event.split} at {step:,}"


KINDS_OF_WORK = ("compute", "exchange", "data", "checkpoint")
"""The kinds of work that `shares` are of, in their order."""


def shares(times: events.RankTimes) -> list[str]:
    """The share of each kind of work in a rank's time: `75%`; `-` if nothing was measured."""
    spent = (times.compute_s, times.communication_s, times.data_s, times.checkpoint_s)
    total = sum(spent)
    return [f"{part / total:.0%}" if total > 0 else "-" for part in spent]


def rank_times(done: events.StepDone, times: events.RankTimes) -> str:
    """One line for what a rank has spent its time on, and its gradient before and after the sum."""
    parts = "  ".join(map(" ".join, zip(KINDS_OF_WORK, shares(times), strict=True)))
    norms = f"  gradient {number(times.grad_norm)}, of all {number(done.grad_norm)}"
    parts += traffic(times) + (norms if times.grad_norm else "")
    return f"step {done.step:,}: rank {times.rank}: {parts}"


def traffic(times: events.RankTimes) -> str:
    """What a rank has sent and received, to follow its shares; empty without other ranks."""
    if not times.num_calls:
        return ""
    bytes_of = f"sent {size(times.sent_bytes)}  received {size(times.received_bytes)}"
    return f"  {bytes_of}  in {count(times.num_calls, 'call')}"


def line(event: events.Event) -> str:
    """One line for any event but those of the banner, the bar and the summary."""
    at = f"step {event.step:,}"
    if isinstance(event, events.Evaluated):
        return evaluation(event, None, (), 0)
    if isinstance(event, events.Improved):
        return f"{at}: best {event.metric} so far: {number(event.value)}"
    if isinstance(event, events.Checkpointed):
        return (
            f"{at}: saved {event.path.rpartition('/')[2]} ({size(event.num_bytes)}, "
            f"{event.write_s:.2f} s, training waited {event.stall_s:.2f} s)"
        )
    if isinstance(event, events.Profiled):
        return f"{at}: profile {event.path}"
    if isinstance(event, events.Resumed):
        passed = "".join(f"; passed over {reason}" for reason in event.skipped)
        return f"{at}: resumed from {event.path}{passed}"
    if isinstance(event, events.Warned):
        return f"{at}: warning: {event.message}"
    if isinstance(event, events.Failed):
        return event.message
    if isinstance(event, events.Joined):
        return f"{at}: rank {event.rank} joined from {event.host} (pid {event.pid})"
    if isinstance(event, events.RankLost):
        why = event.reason.partition(";")[0]
        return f"{at}: rank {event.rank} (slot {event.slot}) is lost{why and f': it {why}'}"
    if isinstance(event, events.Recovered):
        assigned = _assigned(event.microbatches)
        return (
            f"{at}: going on with {count(event.world_size, 'rank')}, "
            f"{1000 * event.seconds:.1f} ms after the loss was noticed"
            + (f"; microbatches of each rank: {assigned}" if len(event.microbatches) > 1 else "")
        )
    if isinstance(event, events.ExchangeChosen):
        if event.way == "hierarchical":
            return f"{at}: gradients are exchanged host by host: {event.reason}"
        why = f", not in shared memory: {event.reason}" if event.reason else ""
        return f"{at}: gradients are exchanged by {event.way}{why}"
    if isinstance(event, events.Rebalanced):
        return (
            f"{at}: rank {event.slowest} takes {event.slowdown:.1f} times as long as the fastest; "
            f"microbatches of each rank from now on: {_assigned(event.microbatches)}"
        )
    # Unknown kinds of events are shown by their names and fields: RankGone -> "rank gone".
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(event).__name__).lower()
    values = (f"{f.name} {getattr(event, f.name)}" for f in fields(event) if f.name != "step")
    return f"{at}: {name}: {', '.join(values)}"


def measures(metrics: Mapping[str, float]) -> list[str]:
    """Each metric as `name value`."""
    return [f"{name} {number(value)}" for name, value in metrics.items()]


def number(value: float) -> str:
    """A number in a few characters: 0.03125, 1e-05, 12,345."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def count(num: int, one: str, many: str = "") -> str:
    """`1 rank`, `4 ranks`."""
    return f"{num:,} {one if num == 1 else many or one + 's'}"


def size(num_bytes: float) -> str:
    """A size with its unit: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:05; below ten seconds 1.25 s."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    return clock(seconds)


def brief(seconds: float) -> str:
    """A time in the unit that suits it, with three digits: 85.3 µs, 5.9 ms, 1.25 s, 0:01:05."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:  # rounded to three digits it would be 1,000
            return f"{seconds * scale:.3g} {unit}"
    return duration(seconds)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:05."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


_MOST_RANKS = 16
"""The most ranks that are listed one by one."""


def _assigned(microbatches: Sequence[int]) -> str:
    """The number of microbatches of each rank; of many ranks, the least and the greatest."""
    if len(microbatches) > _MOST_RANKS:
        return f"{min(microbatches)} to {max(microbatches)}"
    return ", ".join(map(str, microbatches))
