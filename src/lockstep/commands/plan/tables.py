"""A plan for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.table import Table

from lockstep.observe.text import brief, count, duration, size
from lockstep.planning.plan import Plan, Row

_COLUMNS = ("ranks", "mesh", "step", "c/s/w %", "samples/s", "ideal", "memory", "sends")
_WORTH = 0.98
"""Slices are shown where a rank then needs at most this part of the memory."""


def table(plan: Plan) -> Table:
    """A row for each layout; the recommended one is marked."""
    shown = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name == "mesh" else "right", no_wrap=True)
    for number, row in enumerate(plan.rows):
        if number != plan.best and not _is_shown(plan, row):
            continue
        style = "green" if number == plan.best else None if row.prediction.fits else "red"
        shown.add_row(*_cells(row), style=style)
    return shown


def lines(plan: Plan) -> Iterator[str]:
    """What is recommended and why, what checkpoints and losses cost, and what is assumed."""
    yield "c/s/w: parts of a step that are computing, sums of gradients, waiting for the slowest"
    best, facts = plan.recommended, plan.facts
    way = best.prediction
    hosts = f" on {count(way.num_hosts, 'host')}" if way.num_hosts > 1 else ""
    keys = " ".join(way.layout.overrides)
    yield f"recommended: {count(way.layout.num_ranks, 'rank')}{hosts}, mesh {way.layout.name}" + (
        f" ({keys})" if keys else ""
    )
    yield from (f"  {reason}" for reason in plan.reasons)
    if facts.total_steps:
        steps = count(facts.total_steps, "step")
        took = duration(facts.total_steps * way.step_s)
        yield f"  {steps} take {took}, after a start of {facts.start_s:.1f} s"
    yield (
        f"checkpoints: {size(facts.checkpoint_bytes)} in {brief(facts.write_s)}, of which "
        f"training stands still for {brief(facts.checkpoint_s)}; {_interval(plan)}"
    )
    yield f"lost ranks: {_losses(plan)}"
    yield "assumed:"
    yield from (f"  {line}" for line in plan.assumptions)


def _is_shown(plan: Plan, row: Row) -> bool:
    """Whether a layout differs enough from the one without slices."""
    way = row.prediction
    whole = plan.find(replace(way.layout, sharding="none"))
    if way.layout.sharding == "none" or whole is None:
        return True
    return way.peak_bytes <= _WORTH * whole.prediction.peak_bytes


def _interval(plan: Plan) -> str:
    """How often a checkpoint is best, which may be less often than a run has steps."""
    lost, total_steps = plan.recommended.losses, plan.facts.total_steps
    steps = count(lost.interval_steps, "step")
    if 0 < total_steps <= lost.interval_steps:
        return (
            f"best at the end only: the best interval, {steps}, is not shorter than the run "
            f"({count(total_steps, 'step')})"
        )
    return f"best every {steps} ({duration(lost.interval_s)}), which costs {lost.checkpoints:.2%}"


def _losses(plan: Plan) -> str:
    lost, way = plan.recommended.losses, plan.recommended.prediction
    between_s = plan.hours_between * 3600 / way.layout.num_ranks
    every = f"one in {duration(between_s)} (each rank one in {plan.hours_between:g} hours)"
    again = f"to start again costs {lost.restarted:.2%} of the time"
    if lost.in_place is None:
        return f"{every}; {again}; the others cannot go on without it"
    return f"{every}; going on without it costs {lost.in_place:.3%} of the time, {again}"


def _cells(row: Row) -> list[str]:
    way = row.prediction
    parts = (way.compute_s, way.exchange_s, way.waiting_s)
    return [
        str(way.layout.num_ranks),
        way.layout.name,
        brief(way.step_s),
        f"{'/'.join(f'{100 * part / way.step_s:.0f}' for part in parts)}",
        f"{way.samples_per_s:,.0f}",
        f"{way.efficiency:.0%}",
        size(way.peak_bytes),
        size(way.sent_bytes),
    ]
