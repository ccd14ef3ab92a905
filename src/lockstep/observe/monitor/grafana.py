"""A dashboard for Grafana, of what the exporter tells Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.files import replacing
from lockstep.errors import DataError

_WIDTH = 24
"""Columns of Grafana's grid."""
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_CHOSEN = 'run=~"$run"'


class Panel(NamedTuple):
    """A panel of the dashboard.

    Attributes:
        title: above it.
        query: what is drawn, in PromQL.
        legend: of each line, with names of labels in double braces.
        unit: Grafana's name of the unit.
        kind: Grafana's name of the kind of panel.
        width: in columns.
    """

    title: str
    query: str
    legend: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = _WIDTH // 2


PANELS = (
    Panel("Progress", f"lockstep_step{{{_CHOSEN}}} / lockstep_steps_planned{{{_CHOSEN}}}",
          "{{run}}", "percentunit", "bargauge", 8),
    Panel("Time left", f"lockstep_left_seconds{{{_CHOSEN}}}", "{{run}}", "s", "stat", 8),
    Panel("Ranks", f"lockstep_ranks{{{_CHOSEN}}}", "{{run}}", "short", "stat", 8),
    Panel("Metrics", f'lockstep_metric_value{{{_CHOSEN}, metric=~"$metric"}}',
          "{{run}} {{split}} {{metric}}", width=_WIDTH),
    Panel("Samples", f"lockstep_samples_per_second{{{_CHOSEN}}}", "{{run}}", "cps"),
    Panel("Part of the time in which ranks compute",
          f"lockstep_compute_efficiency_ratio{{{_CHOSEN}}}", "{{run}}", "percentunit"),
    Panel("What each rank spends its time with",
          f"rate(lockstep_rank_seconds_total{{{_CHOSEN}}}[$__rate_interval])",
          "{{run}} rank {{rank}} {{kind}}", "percentunit", width=_WIDTH),
    Panel("Ranks that take part", f"lockstep_rank_up{{{_CHOSEN}}}", "{{run}} rank {{rank}}",
          kind="state-timeline"),
    Panel("Lost ranks and recoveries",
          f"increase(lockstep_rank_lost_total{{{_CHOSEN}}}[$__rate_interval]) or "
          f"increase(lockstep_recoveries_total{{{_CHOSEN}}}[$__rate_interval])",
          "{{run}} {{__name__}}"),
    Panel("Peak memory of ranks", f"lockstep_rank_peak_memory_bytes{{{_CHOSEN}}}",
          "{{run}} rank {{rank}}", "bytes"),
    Panel("Microbatches of ranks", f"lockstep_rank_microbatches{{{_CHOSEN}}}",
          "{{run}} rank {{rank}}"),
    Panel("Learning rate", f"lockstep_learning_rate{{{_CHOSEN}}}", "{{run}}"),
    Panel("Norm of the gradient", f"lockstep_gradient_norm{{{_CHOSEN}}}", "{{run}}"),
    Panel("Size of the newest checkpoint", f"lockstep_checkpoint_bytes{{{_CHOSEN}}}", "{{run}}",
          "bytes"),
    Panel("Time since the newest event",
          f"time() - lockstep_last_event_timestamp_seconds{{{_CHOSEN}}}", "{{run}}", "s"),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > _WIDTH:
            x, y = 0, y + _HEIGHT
        place = {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}
        panels.append(_panel(number, panel, place))
        x += panel.width
    return {
        "title": "Lockstep",
        "uid": "lockstep-runs",
        "tags": ["lockstep"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                _variable("run", "label_values(lockstep_run_info, run)"),
                _variable("metric", f"label_values(lockstep_metric_value{{{_CHOSEN}}}, metric)"),
            ]
        },
        "panels": panels,
    }


def write_dashboard(path: Path) -> None:
    """Write the dashboard as JSON.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(json.dumps(dashboard(), indent=2) + "\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    target = {"refId": "A", "expr": panel.query, "legendFormat": panel.legend}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [{**target, "datasource": _SOURCE}],
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
