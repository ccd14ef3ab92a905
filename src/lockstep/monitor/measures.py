"""What Prometheus is told of: names, kinds, labels and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple


class Measure(NamedTuple):
    """A family of Prometheus' samples.

    Attributes:
        kind: `gauge` or `counter`; a counter's name ends in `_total`.
        labels: names of labels beside `run` and `task`.
        meaning: one line.
    """

    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    meaning: str


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "lockstep_run_info": Measure(
            "gauge", ("state", "sha256", "config_hash"), "1, with what the run is as labels."
        ),
        "lockstep_run_up": Measure("gauge", (), "1 if the run goes on, 0 if not."),
        "lockstep_step": Measure("gauge", (), "Steps that are committed."),
        "lockstep_steps_planned": Measure("gauge", (), "Steps of the whole run."),
        "lockstep_left_seconds": Measure("gauge", (), "Time to the last step."),
        "lockstep_ranks": Measure("gauge", (), "Ranks that take part."),
        "lockstep_ranks_asked": Measure("gauge", (), "Ranks that the run was started on."),
        "lockstep_metric_value": Measure("gauge", ("split", "metric"), "Newest value."),
        "lockstep_learning_rate": Measure("gauge", (), "Of the newest step."),
        "lockstep_gradient_norm": Measure("gauge", (), "Of the newest report, before clipping."),
        "lockstep_samples_per_second": Measure("gauge", (), "Of all ranks, in the newest report."),
        "lockstep_compute_efficiency_ratio": Measure(
            "gauge", (), "Part of the ranks' time in which they compute, in the newest report."
        ),
        "lockstep_checkpoint_bytes": Measure("gauge", (), "Size of the newest checkpoint."),
        "lockstep_last_event_timestamp_seconds": Measure(
            "gauge", (), "Unix time of the newest event."
        ),
        "lockstep_unreadable_rows": Measure("gauge", (), "Rows of events that cannot be read."),
        "lockstep_rank_up": Measure(
            "gauge", ("rank", "host"), "1 if the rank takes part, 0 if it is lost or has ended."
        ),
        "lockstep_rank_peak_memory_bytes": Measure(
            "gauge", ("rank",), "The most memory that the rank has had."
        ),
        "lockstep_rank_microbatches": Measure(
            "gauge", ("rank",), "Microbatches that the rank computes in a step."
        ),
        "lockstep_rank_seconds_total": Measure(
            "counter", ("rank", "kind"), "What the rank has spent its time with."
        ),
        "lockstep_rank_lost_total": Measure("counter", (), "Ranks that died or were ended."),
        "lockstep_recoveries_total": Measure("counter", (), "How often the others went on."),
        "lockstep_checkpoints_total": Measure("counter", (), "Checkpoints written."),
        "lockstep_evaluations_total": Measure("counter", (), "Evaluations done."),
        "lockstep_warnings_total": Measure("counter", (), "Warnings."),
    }
)
"""By name, each with the labels `run` and `task` before its own."""
