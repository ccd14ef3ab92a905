"""Runs for Prometheus: gauges and counters that it asks for over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from lockstep.engine.events import Checkpointed, Evaluated, Event, RankLost, Recovered, Warned
from lockstep.errors import ConfigError
from lockstep.observe.monitor.describe import shown
from lockstep.observe.monitor.watch import Watch, Watched
from lockstep.observe.reading.history import KINDS, History

if TYPE_CHECKING:
    from prometheus_client.core import Metric


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


Samples = dict[str, dict[tuple[str, ...], float]]
"""Values by labels by name of the measure."""

_COUNTED: Mapping[type[Event], str] = MappingProxyType(
    {
        RankLost: "lockstep_rank_lost_total",
        Recovered: "lockstep_recoveries_total",
        Checkpointed: "lockstep_checkpoints_total",
        Evaluated: "lockstep_evaluations_total",
        Warned: "lockstep_warnings_total",
    }
)
_CURVES: Mapping[str, str] = MappingProxyType(
    {
        "lr": "lockstep_learning_rate",
        "grad_norm": "lockstep_gradient_norm",
        "samples_per_s": "lockstep_samples_per_second",
        "compute_efficiency": "lockstep_compute_efficiency_ratio",
    }
)
_KIND_NAMES = ("compute", "exchange", "data", "checkpoint")
"""What `KINDS` are called in labels, in their order."""


class _Growing:
    """Counts that never go back, whatever becomes of what is counted."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, ...], float] = {}
        self._seen: dict[tuple[object, ...], float] = {}

    def add(self, labels: tuple[str, ...], source: tuple[object, ...], value: float) -> None:
        """Count in by how much a source's value has grown; one that has fallen began anew.

        Args:
            labels: of the counter.
            source: whose value it is; several may feed one counter.
            value: what it is now.
        """
        before = self._seen.get(source, 0.0)
        grown = value - before if value >= before else value
        self._seen[source] = value
        self._totals[labels] = self._totals.get(labels, 0.0) + grown

    def of(self, run: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Labels and counts of a run."""
        return ((k, value) for k, value in self._totals.items() if k[0] == run)


class Exporter:
    """What Prometheus gets; brought up to date at each look, and asked by a server's thread.

    Events are read of runs that go on, or have since the exporter began: of others there is what a
    list of runs shows. Counters of a run go on growing when it is resumed.
    """

    def __init__(self) -> None:
        self._samples: Mapping[Path, Samples] = {}
        self._counts = {name: _Growing() for name, m in MEASURES.items() if m.kind == "counter"}
        self._followed: set[Path] = set()
        self._counted: dict[Path, tuple[int, History]] = {}
        self._numbers: dict[Path, dict[str, float]] = {}

    def __call__(self, watch: Watch, changed: Sequence[Watched]) -> None:
        """Take what is known now."""
        samples = {path: of for path, of in self._samples.items() if path in watch.runs}
        for run in changed:
            if run.summary.state == "running":
                self._followed.add(run.path)
            samples[run.path] = self._of(run)
        self._samples = samples  # at once: the server's thread sees the old ones or the new ones

    def collect(self) -> Iterable[Metric]:
        """All families with their samples; called when Prometheus asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        samples = self._samples
        for name, measure in MEASURES.items():
            kind = GaugeMetricFamily if measure.kind == "gauge" else CounterMetricFamily
            labels = ("run", "task", *measure.labels)
            family = kind(name.removesuffix("_total"), measure.meaning, labels=labels)
            for of in samples.values():
                for values, number in of.get(name, {}).items():
                    family.add_metric(values, number)
            yield family

    def _of(self, run: Watched) -> Samples:
        summary = run.summary
        own = (shown(str(run.path)), shown(summary.task))
        samples: Samples = {
            "lockstep_run_info": {
                (*own, summary.state, shown(summary.sha256), shown(summary.config_hash)): 1.0
            },
            "lockstep_run_up": {own: float(summary.state == "running")},
            "lockstep_step": {own: float(summary.step)},
            "lockstep_metric_value": _metrics(summary.metrics, own),
        }
        if summary.total_steps:
            samples["lockstep_steps_planned"] = {own: float(summary.total_steps)}
        if summary.newest:
            samples["lockstep_last_event_timestamp_seconds"] = {own: summary.newest}
        if summary.left_s is not None:
            samples["lockstep_left_seconds"] = {own: summary.left_s}
        if run.path in self._followed:
            self._add_followed(samples, run, own)
        return samples

    def _add_followed(self, samples: Samples, run: Watched, own: tuple[str, str]) -> None:
        history, is_running = run.history, run.summary.state == "running"
        for curve, name in _CURVES.items():
            if curve in history.curves and len(history.curves[curve].values):
                samples[name] = {own: float(history.curves[curve].values[-1])}
        values = {n: c.values[-1] for n, c in history.curves.items() if "/" in n and len(c.values)}
        samples["lockstep_metric_value"] |= _metrics(values, own)
        samples["lockstep_ranks"] = {own: float(len(history.living) if is_running else 0)}
        if history.plan:
            samples["lockstep_ranks_asked"] = {own: float(history.plan.world_size)}
        samples["lockstep_unreadable_rows"] = {own: float(history.num_problems)}
        saved = next(
            (h.event for h in reversed(history.happenings) if isinstance(h.event, Checkpointed)),
            None,
        )
        if saved is not None:
            samples["lockstep_checkpoint_bytes"] = {own: float(saved.num_bytes)}
        _add_ranks(samples, history, own, is_running)
        self._count(run.path, history, own)
        for name, counts in self._counts.items():
            samples[name] = dict(counts.of(own[0]))

    def _count(self, path: Path, history: History, own: tuple[str, str]) -> None:
        """Count in what has come since the last look."""
        first, before = self._counted.get(path, (0, history))
        numbers = self._numbers.setdefault(path, dict.fromkeys(_COUNTED.values(), 0.0))
        # A file that was replaced is another history, which is counted from its beginning.
        for happening in history.happenings[first if before is history else 0 :]:
            name = _COUNTED.get(type(happening.event))
            if name is not None:
                numbers[name] += 1
        self._counted[path] = (len(history.happenings), history)
        for name, number in numbers.items():
            self._counts[name].add(own, (path,), number)
        growing = self._counts["lockstep_rank_seconds_total"]
        for process in history.processes:
            for kind, label in zip(KINDS, _KIND_NAMES, strict=True):
                source = (path, process.joined.slot, process.since, kind)
                labels = (*own, str(process.rank), label)
                growing.add(labels, source, process.seconds[kind])


def _metrics(values: Mapping[str, float], own: tuple[str, str]) -> dict[tuple[str, ...], float]:
    """Metrics by "split/name" with labels of their own."""
    labelled: dict[tuple[str, ...], float] = {}
    for key, value in values.items():
        split, _, name = key.partition("/")
        labels = (*own, shown(split), shown(name))
        labelled[labels] = float(value)
    return labelled


def _add_ranks(samples: Samples, history: History, own: tuple[str, str], is_running: bool) -> None:
    up: dict[tuple[str, ...], float] = {}
    memory: dict[tuple[str, ...], float] = {}
    batches: dict[tuple[str, ...], float] = {}
    # The living last: they may have the number of one that was lost.
    for process in sorted(history.processes, key=lambda p: p.until is None):
        labels = (*own, str(process.rank))
        is_living = is_running and process.until is None
        at_host = (*labels, shown(process.joined.host))
        up[at_host] = float(is_living)
        memory[labels] = float(process.times.peak_bytes)
        batches[labels] = float(process.num_microbatches) if is_living else 0.0
    samples["lockstep_rank_up"] = up
    samples["lockstep_rank_peak_memory_bytes"] = memory
    samples["lockstep_rank_microbatches"] = batches


class Server:
    """An HTTP server for Prometheus, in a thread of its own.

    Attributes:
        port: at which it listens.

    Args:
        exporter: what it tells.
        host: address to listen at.
        port: of it; 0 for any that is free.

    Raises:
        ConfigError: `prometheus_client` is not installed, or nobody can listen there.
    """

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
            from prometheus_client.registry import Collector
        except ImportError:
            raise ConfigError(
                '--prometheus needs prometheus_client: pip install "lockstep-train[monitor]"'
            ) from None

        class Adapter(Collector):
            def collect(self) -> Iterable[Metric]:
                return exporter.collect()

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Adapter())
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--prometheus {port}: cannot listen at {host}: {reason}") from None
        self.port = int(self._server.server_port)
        assert isinstance(self._thread, threading.Thread)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
