"""Events as text: pure functions from events to lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Event,
    Failed,
    Finished,
    Improved,
    Joined,
    RankLost,
    Rebalanced,
    Recovered,
    Resumed,
    RunStarted,
    StepDone,
    Warned,
)

Pairs = list[tuple[str, str]]
"""A name and a text for each line of a block."""


def banner(plan: RunStarted, joined: Sequence[Joined]) -> Pairs:
    """What a run is about to do, and on which ranks."""
    return [
        (
            "task",
            f"{plan.task}, {count(plan.num_parameters, 'parameter')}, "
            + (count(plan.num_samples, "sample") if plan.num_samples else "a stream of samples"),
        ),
        ("ranks", f"{_who(plan, joined)} ({plan.launcher}, {plan.transport})"),
        ("device", f"{plan.device}, {count(plan.threads, 'thread')} a rank"),
        (
            "batch",
            f"{count(plan.batch_size, 'sample')} in "
            f"{count(plan.num_microbatches, 'microbatch', 'microbatches')}"
            f"{_share(joined)}",
        ),
        (
            "plan",
            count(plan.total_steps, "step")
            + (f", {plan.steps_per_epoch:,} an epoch" if plan.steps_per_epoch else "")
            + (f", going on from step {plan.step:,}" if plan.step else ""),
        ),
        ("run", f"{plan.run_dir} (config {plan.config_hash})"),
    ]


def summary(plan: RunStarted | None, end: Finished) -> Pairs:
    """How a run ended."""
    pairs = [
        (
            "status",
            f"{end.status} at step {end.step:,}" + (f": {end.reason}" if end.reason else ""),
        ),
        ("metrics", "  ".join(measures(end.metrics))),
        ("parameters", f"SHA-256 {end.params_sha256}"),
        ("time", f"{duration(end.wall_s)} on {count(end.world_size, 'rank')}"),
        ("checkpoint", end.checkpoint),
        ("run", plan.run_dir if plan else ""),
    ]
    return [(name, text) for name, text in pairs if text]


def outcome(plan: RunStarted | None, end: Finished) -> str:
    """How a run ended, in one line."""
    where = [plan.run_dir] if plan else []
    return ", ".join([f"{end.status} at step {end.step:,}", f"SHA-256 {end.params_sha256}", *where])


def progress(done: StepDone) -> list[str]:
    """The state of training as short items, the most important first."""
    return [
        f"epoch {done.epoch}",
        f"loss {number(done.loss)}",
        *measures(done.metrics),
        f"lr {number(done.lr)}",
        f"{number(done.samples_per_s)} samples/s",
        f"efficiency {done.compute_efficiency:.0%}",
    ]


def line(event: Event) -> str:
    """One line for any event but those of the banner, the bar and the summary."""
    at = f"step {event.step:,}"
    if isinstance(event, Evaluated):
        return f"{at}: {event.split}: {'  '.join(measures(event.metrics))}"
    if isinstance(event, Improved):
        return f"{at}: best {event.metric} so far: {number(event.value)}"
    if isinstance(event, Checkpointed):
        return (
            f"{at}: checkpoint {event.path} ({size(event.num_bytes)}, "
            f"{event.stall_s:.2f} s of training, {event.write_s:.2f} s in all)"
        )
    if isinstance(event, Resumed):
        passed = "".join(f"; passed over {reason}" for reason in event.skipped)
        return f"{at}: resumed from {event.path}{passed}"
    if isinstance(event, Warned):
        return f"{at}: warning: {event.message}"
    if isinstance(event, Failed):
        return event.message
    if isinstance(event, Joined):
        return f"{at}: rank {event.rank} joined from {event.host} (pid {event.pid})"
    if isinstance(event, RankLost):
        why = event.reason.partition(";")[0]
        return f"{at}: rank {event.rank} (slot {event.slot}) is lost{why and f': it {why}'}"
    if isinstance(event, Recovered):
        return (
            f"{at}: going on with {count(event.world_size, 'rank')}, "
            f"{1000 * event.seconds:.1f} ms after the loss was noticed"
        )
    if isinstance(event, Rebalanced):
        return (
            f"{at}: rank {event.slowest} takes {event.slowdown:.1f} times as long as the fastest; "
            f"microbatches of each rank from now on: {', '.join(map(str, event.microbatches))}"
        )
    # Kinds of event this module does not know are shown, not swallowed: RankGone -> "rank gone".
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


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:05."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def _who(plan: RunStarted, joined: Sequence[Joined]) -> str:
    ranks = count(plan.world_size, "rank")
    if not joined:
        return ranks
    return f"{ranks} on {count(len({process.host for process in joined}), 'host')}"


def _share(joined: Sequence[Joined]) -> str:
    shares = [last - first for first, last in (process.microbatches for process in joined)]
    if not shares:
        return ""
    least, most = min(shares), max(shares)
    return f", {most} a rank" if least == most else f", {least} to {most} a rank"
