"""How runs differ, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.observe import Measured, text
from lockstep.reading.configs import config_differences
from lockstep.reading.differences import Partings, partings
from lockstep.reading.follow import read_run
from lockstep.reading.listing import Summary, summarise
from lockstep.reading.telling import cost_of_run, costs_of_runs, letter, lines_of_partings

_MOST_KEYS = 40


def compared(runs: Sequence[Path]) -> tuple[list[str], bool]:
    """Lines on the differences of runs, the first of which is compared with each other one.

    Returns:
        The lines, and whether two runs that should be equal are not: equal configs as far as these
        can change the result, and unequal curves or parameters where both have some.

    Raises:
        RunDirectoryError: one of them cannot be read.
        CheckpointError: a checkpoint is damaged.
    """
    summaries = [summarise(run) for run in runs]
    histories = [read_run(run) for run in runs]
    lines = [f"{letter(n)}  {run}" for n, run in enumerate(runs)]
    costs = [cost_of_run(*run) for run in zip(summaries, histories, strict=True)]
    lines += ["", *_configs(summaries), "", *_results(summaries, costs)]
    differ = False
    hashes = [history.plan.config_hash if history.plan else "" for history in histories]
    for number in range(1, len(runs)):
        pair = f"{letter(0)} and {letter(number)}"
        found = partings((histories[0], histories[number]), (runs[0], runs[number]))
        lines += ["", *lines_of_partings(pair, found)]
        if hashes[0] == hashes[number] and summaries[0].task == summaries[number].task:
            verdict = _verdict(found, summaries[0], summaries[number])
            differ = differ or verdict is False
            said = {
                True: "they are",
                False: "they are not",
                None: "they have nothing in common yet",
            }
            lines.append(f"{pair} have one config, so they should be equal: {said[verdict]}")
    return lines, differ


def _verdict(found: Partings, one: Summary, other: Summary) -> bool | None:
    """Whether two runs of one config are equal; None if nothing could be compared."""
    have_ended = bool(one.sha256 and other.sha256) and one.step == other.step
    if found.curves or found.tensors or (have_ended and one.sha256 != other.sha256):
        return False
    return True if have_ended or found.num_steps or found.num_checkpoints else None


def _configs(summaries: Sequence[Summary]) -> Iterator[str]:
    found = config_differences([run.config for run in summaries])
    if not found:
        yield "config: the same"
        return
    yield f"config: {text.count(len(found), 'key')} with other values"
    for key, values in list(found.items())[:_MOST_KEYS]:
        yield f"  {key}: " + ", ".join(f"{letter(n)} {value}" for n, value in enumerate(values))
    if len(found) > _MOST_KEYS:
        yield f"  … and {len(found) - _MOST_KEYS} more"


def _results(summaries: Sequence[Summary], costs: Sequence[Measured]) -> Iterator[str]:
    rows = {
        "state": [run.state for run in summaries],
        "step": [f"{run.step:,}" for run in summaries],
        "ranks": [str(run.ranks) for run in summaries],
        "seconds": [text.number(run.value("seconds")) for run in summaries],
        "SHA-256": [run.sha256[:16] or "none" for run in summaries],
    }
    for name, *values in costs_of_runs(costs):
        rows[name] = [value or "none" for value in values]
    for name in dict.fromkeys(name for run in summaries for name in run.metrics):
        rows[name] = [
            repr(run.metrics[name]) if name in run.metrics else "none" for run in summaries
        ]
    widths = [max(len(row[n]) for row in rows.values()) for n in range(len(summaries))]
    first = max(map(len, rows))
    letters = [letter(n).rjust(w) for n, w in enumerate(widths)]
    yield " ".join(["result".ljust(first), *letters])
    for name, values in rows.items():
        cells = [value.rjust(width) for value, width in zip(values, widths, strict=True)]
        yield " ".join([name.ljust(first), *cells])
