"""What a run is about to do, as the lines that a console begins with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lockstep.engine.events import Joined, RunStarted
from lockstep.observe.text import Pairs, count
from lockstep.parallel.layout import split


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
        *_samples(plan, joined),
        (
            "plan",
            count(plan.total_steps, "step")
            + (f", {plan.steps_per_epoch:,} an epoch" if plan.steps_per_epoch else "")
            + (f", going on from step {plan.step:,}" if plan.step else ""),
        ),
        ("run", f"{plan.run_dir} (config {plan.config_hash})"),
    ]


def _who(plan: RunStarted, joined: Sequence[Joined]) -> str:
    ranks = count(plan.world_size, "rank")
    if not joined:
        return ranks
    return f"{ranks} on {count(len({process.host for process in joined}), 'host')}"


def _samples(plan: RunStarted, joined: Sequence[Joined]) -> Pairs:
    """The samples of a step that each of several ranks computes; like neighbours as one.

    Ranks with the same microbatches are a replica, and compute them together.
    """
    if len(joined) < 2:
        return []
    sizes = [len(part) for part in split(plan.batch_size, plan.num_microbatches)]
    replicas: list[tuple[int, list[int]]] = []
    in_order = sorted(joined, key=lambda process: process.rank)
    for own, alike in groupby(in_order, key=lambda process: process.microbatches):
        num, ranks = sum(sizes[i] for i in range(*own)), [process.rank for process in alike]
        replicas += [(num, ranks)] if num else [(0, [rank]) for rank in ranks]
    parts = []
    for (num, size), equal in groupby(replicas, key=lambda one: (one[0], len(one[1]))):
        ranks = [rank for _, members in equal for rank in members]
        who = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        how = ", together" if len(ranks) == size else f", each {size} together"
        if size == 1:
            how = ", each" if len(ranks) > 1 else ""
        parts.append(f"{who}{how} {num:,}")
    return [("samples", f"of a step: {'; '.join(parts)}")]


def _share(joined: Sequence[Joined]) -> str:
    shares = [len(range(*process.microbatches)) for process in joined]
    if not shares:
        return ""
    least, most = min(shares), max(shares)
    return f", {most} a rank" if least == most else f", {least} to {most} a rank"
