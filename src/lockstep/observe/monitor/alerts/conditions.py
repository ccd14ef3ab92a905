"""The conditions of rules: what each of them finds in runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lockstep.engine.events import Failed
from lockstep.observe import text
from lockstep.observe.monitor.alerts import Condition
from lockstep.observe.monitor.watch import Watched


@dataclass(frozen=True)
class Finding:
    """Something that a condition has found.

    Attributes:
        key: tells it from other findings of the same rule and run.
        run: run that it was found in.
        message: one line.
        is_past: whether it is an event, whose alert ends at once.
    """

    key: str
    run: Watched
    message: str
    is_past: bool = False


@dataclass(frozen=True)
class Look:
    """The times of a look.

    Attributes:
        now: Unix time of the look.
        since: Unix time of the first look.
        silent_since: Unix time since which each run has reported no step.
    """

    now: float
    since: float
    silent_since: Mapping[str, float]


def found_in(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    """What a condition finds in a run."""
    find = _IN_ONE_RUN.get(condition.kind)
    return iter(()) if find is None else find(condition, run, look)


def found_over(condition: Condition, runs: Sequence[Watched]) -> Iterator[Finding]:
    """What a condition finds over all runs of its rule."""
    if condition.kind == "digest_differs":
        yield from _digests(runs)
    elif condition.is_of_disk:
        yield from _disks(condition, [run for run in runs if run.summary.state == "running"])


def _metric(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    name, above, below = condition.metric or "", condition.above, condition.below
    value = _newest(run, name)
    if value is not None and above is not None and value > above:
        yield Finding(name, run, f"{name} {text.number(value)} is above {text.number(above)}")
    elif value is not None and below is not None and value < below:
        yield Finding(name, run, f"{name} {text.number(value)} is below {text.number(below)}")


def _not_finite(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    pattern = condition.not_finite or ""
    for name, curve in run.history.curves.items():
        if fnmatchcase(name, pattern) and len(curve.values):
            value = curve.values[-1]
            if not math.isfinite(value):
                yield Finding(name, run, f"{name} is {value} at step {curve.steps[-1]:,}")
    end = run.history.end
    if isinstance(end, Failed) and end.error == "NonFiniteError":
        first = end.message.partition("\n")[0]
        yield Finding("end", run, f"ended at step {end.step:,}: {first}")


def _silence(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    silent_s = look.now - look.silent_since.get(str(run.path), look.now)
    if run.summary.state == "running" and silent_s > (condition.no_step_for_s or 0):
        message = f"no step since step {run.summary.step:,}, for {text.duration(silent_s)}"
        yield Finding("", run, message)


def _rank_lost(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    history = run.history
    total = history.plan.world_size if history.plan else 0
    missing = max(0, total - len(history.living)) if run.summary.state == "running" else 0
    lost = [(process.until, process) for process in history.processes if process.until]
    lost.sort(key=lambda pair: pair[0])
    for number, (until, process) in enumerate(reversed(lost)):
        is_replaced = number >= missing  # joining ranks replace those that were lost first
        if is_replaced and until < look.since:
            continue
        slot, why = process.joined.slot, process.reason.partition(";")[0]
        message = (
            f"slot {slot} (rank {process.joined.rank} on {process.joined.host}) is lost"
            f"{why and f': it {why}'}; {len(history.living)} of {text.count(total, 'rank')}"
        )
        yield Finding(f"{slot} {process.since}", run, message, is_past=is_replaced)


def _few_ranks(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    living, least = len(run.history.living), condition.ranks_below or 0
    if run.summary.state == "running" and run.history.plan and living < least:
        yield Finding("", run, f"{text.count(living, 'rank')}, fewer than {least}")


def _efficiency(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    value, least = _newest(run, "compute_efficiency"), condition.efficiency_below or 0.0
    if run.summary.state == "running" and value is not None and value < least:
        yield Finding("", run, f"ranks compute for {value:.0%} of the time, below {least:.0%}")


def _ended(condition: Condition, run: Watched, look: Look) -> Iterator[Finding]:
    state = run.summary.state
    if state in (condition.ended or ()):
        end = run.history.end
        why = f": {end.error}" if isinstance(end, Failed) else ""
        yield Finding(state, run, f"{state} at step {run.summary.step:,}{why}")


_IN_ONE_RUN: Mapping[str, Callable[[Condition, Watched, Look], Iterator[Finding]]] = {
    "metric": _metric, "not_finite": _not_finite, "no_step_for_s": _silence,
    "rank_lost": _rank_lost, "ranks_below": _few_ranks, "efficiency_below": _efficiency,
    "ended": _ended,
}  # fmt: skip


def _newest(run: Watched, name: str) -> float | None:
    curves = run.history.curves
    if name in curves and len(curves[name].values):
        return float(curves[name].values[-1])
    return run.summary.metrics.get(name)


def _digests(runs: Sequence[Watched]) -> Iterator[Finding]:
    """Runs whose digest differs from that of the first run of the same task and config."""
    ended = [r for r in runs if r.summary.state == "completed" and r.summary.sha256]
    first: dict[tuple[str, str], Watched] = {}
    for run in sorted(ended, key=lambda r: (r.summary.newest, str(r.path))):
        summary = run.summary
        if not summary.config_hash:
            continue
        known = first.setdefault((summary.task, summary.config_hash), run)
        if known.summary.sha256 != summary.sha256:
            message = (
                f"SHA-256 {summary.sha256[:16]}… differs from {known.summary.sha256[:16]}… of "
                f"{known.path} with the same config; lockstep runs compare says where they part"
            )
            yield Finding(f"{known.path} {summary.sha256}", run, message)


def _disks(condition: Condition, runs: Sequence[Watched]) -> Iterator[Finding]:
    """A finding for each full disk, with the first run on it."""
    seen: set[int] = set()
    for run in runs:
        try:
            device, disk = run.path.stat().st_dev, os.statvfs(run.path)
        except OSError:
            continue
        if device in seen:
            continue
        seen.add(device)
        free = disk.f_bavail * disk.f_frsize
        share = disk.f_bavail / disk.f_blocks if disk.f_blocks else 1.0
        is_full = free < (condition.disk_free_bytes_below or 0)
        is_full |= share < (condition.disk_free_share_below or 0.0)
        if is_full:
            message = f"the disk has {text.size(free)} left, {share:.1%}"
            yield Finding(f"disk {device}", run, message)
