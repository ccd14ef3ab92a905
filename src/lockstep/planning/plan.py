"""A plan: predictions for layouts, the best of them with reasons, and its file.

Losses come at random, each rank's independently of the others'. With the time between two of them
large against the time that one costs, the best interval of checkpoints is sqrt(2 C T), where C is
the time in which training stands still for a checkpoint and T the mean time between two losses
(J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974).

The file is a JSON object; `format` names it and `version` says how its fields are to be read.
Bytes are bytes and times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.parsing import as_type, parse_object
from lockstep.engine.recovery import SURVIVABLE
from lockstep.planning.measurements import Facts, Network
from lockstep.planning.prediction import Layout, Prediction, layouts, predict
from lockstep.planning.profile import check_format, read_json

_HOUR_S = 3600.0
REGROUP_S = 1.0
"""Seconds until survivors go on: more than docs/benchmarks/recovery.md has measured."""


@dataclass(frozen=True)
class Losses:
    """The cost of checkpoints and of lost ranks.

    Attributes:
        interval_s: seconds between checkpoints, the best for starting again after each loss.
        interval_steps: the same in steps, at least 1.
        checkpoints: part of the time in which training stands still for checkpoints at this
            interval.
        in_place: part of the time that losses cost where the others go on; None where they cannot.
        restarted: part of the time that losses cost where all ranks start again from the newest
            checkpoint; 1.0 where the run would make no progress.
    """

    interval_s: float
    interval_steps: int
    checkpoints: float
    in_place: float | None
    restarted: float


def losses(facts: Facts, prediction: Prediction, hours_between: float) -> Losses:
    """The cost of checkpoints and losses in a layout.

    Args:
        facts: measurements of the task.
        prediction: cost of a step.
        hours_between: mean hours between two losses of one rank.
    """
    between_s = hours_between * _HOUR_S / prediction.layout.num_ranks
    interval_s = max(math.sqrt(2 * facts.checkpoint_s * between_s), prediction.step_s)
    again_s = facts.start_s + interval_s / 2
    in_place = None
    if facts.launcher in SURVIVABLE and _survives(prediction.layout, facts):
        in_place = min(1.0, (REGROUP_S + prediction.step_s / 2) / between_s)
    return Losses(
        interval_s=interval_s,
        interval_steps=max(1, round(interval_s / prediction.step_s)),
        checkpoints=facts.checkpoint_s / (interval_s + facts.checkpoint_s),
        in_place=in_place,
        restarted=min(1.0, again_s / between_s),
    )


def _survives(layout: Layout, facts: Facts) -> bool:
    """Whether all state is still there when one rank is gone."""
    return layout.num_replicas > 1 and (layout.sharding == "none" or facts.buddy)


FORMAT = "lockstep plan"
VERSION = 2
_WORTH = 1.05
"""Least speedup for which more ranks, stages or slices are recommended."""
_LEAST_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Row:
    """A layout.

    Attributes:
        prediction: cost of a step.
        losses: cost of checkpoints and lost ranks.
    """

    prediction: Prediction
    losses: Losses


@dataclass(frozen=True)
class Plan:
    """Measurements, and the predictions that follow from them.

    Attributes:
        format: always `FORMAT`.
        version: version of the format.
        facts: measurements of the task.
        ranks_per_host: most ranks of a host.
        hours_between: mean hours between two losses of one rank.
        rows: all layouts, fewest ranks first.
        best: number of the row that is recommended.
        reasons: why it is recommended.
        assumptions: assumptions that the predictions depend on.
    """

    format: str
    version: int
    facts: Facts
    ranks_per_host: int
    hours_between: float
    rows: tuple[Row, ...]
    best: int
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def recommended(self) -> Row:
        """The best layout."""
        return self.rows[self.best]

    def find(self, layout: Layout) -> Row | None:
        """The row of a layout; None if there is none."""
        return next((row for row in self.rows if row.prediction.layout == layout), None)


def make_plan(
    facts: Facts,
    network: Network,
    numbers: Sequence[int],
    ranks_per_host: int,
    hours_between: float,
) -> Plan:
    """Predict all layouts of some numbers of ranks, and choose one.

    Args:
        facts: measurements of the task.
        network: costs of collectives.
        numbers: numbers of ranks, at least one.
        ranks_per_host: most ranks of a host.
        hours_between: mean hours between two losses of one rank.
    """
    replicas = {(timed.pp, timed.tp) for timed in facts.timed}
    rows = []
    for layout in layouts(numbers, facts.anatomy, replicas):
        prediction = predict(facts, network, layout, ranks_per_host)
        rows.append(Row(prediction, losses(facts, prediction, hours_between)))
    best, reasons = _choose(facts, rows)
    return Plan(
        FORMAT,
        VERSION,
        facts,
        ranks_per_host,
        hours_between,
        tuple(rows),
        best,
        tuple(reasons),
        tuple(_assumptions(facts, network, rows)),
    )


def _choose(facts: Facts, rows: Sequence[Row]) -> tuple[int, list[str]]:
    """The number of the best row, and why it is."""
    ways = [row.prediction for row in rows]
    fitting = [way for way in ways if way.fits]
    if not fitting:
        least = min(ways, key=lambda way: way.peak_bytes)
        missing = f"no layout fits into memory; {least.layout.name} needs least"
        return ways.index(least), [missing, "use a smaller model, or more ranks on more hosts"]
    fastest = min(fitting, key=lambda way: way.step_s)
    # Of those that are hardly slower, the one with the fewest ranks, and of these the plainest.
    best = next(way for way in fitting if way.step_s <= fastest.step_s * _WORTH)
    speed = f"{best.samples_per_s:,.0f} samples/s"
    reasons = [f"{speed}, {best.efficiency:.0%} of what so many single ranks would do"]
    if best is not fastest:
        reasons.append(f"{fastest.layout.name} would be less than 5 % faster")
    slower = [way for way in fitting if way.layout.num_ranks > best.layout.num_ranks]
    if slower:
        reasons.append(f"more ranks bring nothing: {_limit(facts, slower[-1])}")
    if best.efficiency < _LEAST_EFFICIENCY:
        lean = [way for way in fitting if way.efficiency >= _LEAST_EFFICIENCY]
        if lean:
            thrifty = min(lean, key=lambda way: way.step_s)
            reasons.append(
                f"{thrifty.layout.name} needs less time of all ranks together "
                f"({thrifty.efficiency:.0%})"
            )
    unfit = [way.layout.name for way in ways if not way.fits]
    if unfit:
        reasons.append(f"do not fit into memory: {', '.join(unfit[:4])}")
    return ways.index(best), reasons


def _limit(facts: Facts, way: Prediction) -> str:
    """What keeps a layout from being faster."""
    if way.num_spares:
        return f"a step has {facts.num_microbatches} microbatches (num_microbatches)"
    if way.num_hosts == 1 and way.layout.num_ranks > facts.cores:
        return f"the host has {facts.cores} cores"
    parts = {"exchange": way.exchange_s, "waiting for the slowest rank": way.waiting_s}
    name = max(parts, key=lambda part: parts[part])
    return f"{name} would take {parts[name] / way.step_s:.0%} of a step"


def _assumptions(facts: Facts, network: Network, rows: Sequence[Row]) -> Iterator[str]:
    """The assumptions of the predictions, and costs that they leave out."""
    numbers = sorted({row.prediction.layout.num_ranks for row in rows})
    said = dict.fromkeys(line for number in numbers for line in network.assumes(number))
    yield from said
    measured = max(timed.num_ranks for timed in facts.timed)
    if max(numbers) > measured:
        yield (
            f"other hosts are as fast as {facts.host}; at most {measured} of its ranks were "
            "measured at the same time"
        )
    if any(1 < way.num_hosts < way.layout.num_ranks for way in (row.prediction for row in rows)):
        yield "sums go to all ranks at once: host by host (exchange=auto) less goes between hosts"
    if any(row.prediction.layout.sharding != "none" for row in rows):
        yield "an optimizer in slices takes as long as a whole one: it is faster"
    if facts.anatomy.has_tables:
        yield "rows of tables cost nothing to exchange: they do, as many as a step looks up"
    if not facts.jitter:
        yield "no rank waits for another: single steps were not told apart"
    yield "evaluation and the start are not part of a step"


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        DataError: the file cannot be read, is damaged, or is something else.
    """
    return read_json(path, _from_json, "plan", "lockstep plan TASK --json FILE")


def _from_json(text: str) -> Plan:
    values = parse_object(text)
    check_format(values, FORMAT, VERSION)
    plan = as_type(Plan, values)
    for problem in _problems(plan):
        raise ValueError(problem)
    return plan


def _problems(plan: Plan) -> Iterator[str]:
    """Errors in a plan: what `make_plan` cannot have written."""
    if not 0 <= plan.best < len(plan.rows):
        yield f"best={plan.best}: there is no such row"
    for number, row in enumerate(plan.rows):
        layout, way = row.prediction.layout, row.prediction
        if min(layout.num_ranks, layout.pp, layout.tp) < 1:
            yield f"rows.{number}.prediction.layout: sizes must be at least 1"
        if not 0 < way.step_s < math.inf or way.peak_bytes < 0:
            yield f"rows.{number}.prediction: times must be greater than 0, and finite"
