"""Runs for Prometheus: the metrics that it scrapes over HTTP, and a Grafana dashboard of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lockstep.config.files import replacing
from lockstep.engine.events import Checkpointed, Evaluated, Event, RankLost, Recovered, Warned
from lockstep.errors import ConfigError, DataError, file_errors, needing
from lockstep.observe.monitor.describe import shown
from lockstep.observe.monitor.watch import Watch, Watched
from lockstep.observe.reading.history import KINDS, History
from lockstep.observe.text import KINDS_OF_WORK

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Measure(NamedTuple):
    """A metric family of Prometheus.

    Attributes:
        kind: `gauge` or `counter`; a counter's name ends in `_total`.
        help: one line.
        labels: names of labels beside `run` and `task`.
    """

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


MEASURES: Mapping[str, Measure] = {
    "lockstep_run_info": Measure(
        "gauge", "1, with what the run is as labels.", ("state", "sha256", "config_hash")
    ),
    "lockstep_run_up": Measure("gauge", "1 if the run goes on, 0 if not."),
    "lockstep_step": Measure("gauge", "Steps that are committed."),
    "lockstep_steps_planned": Measure("gauge", "Steps of the whole run."),
    "lockstep_left_seconds": Measure("gauge", "Time to the last step."),
    "lockstep_ranks": Measure("gauge", "Ranks that take part."),
    "lockstep_ranks_asked": Measure("gauge", "Ranks that the run was started on."),
    "lockstep_metric_value": Measure("gauge", "Newest value.", ("split", "metric")),
    "lockstep_learning_rate": Measure("gauge", "Of the newest step."),
    "lockstep_gradient_norm": Measure("gauge", "Of the newest report, before clipping."),
    "lockstep_samples_per_second": Measure("gauge", "Of all ranks, in the newest report."),
    "lockstep_compute_efficiency_ratio": Measure(
        "gauge", "Part of the ranks' time in which they compute, in the newest report."
    ),
    "lockstep_checkpoint_bytes": Measure("gauge", "Size of the newest checkpoint."),
    "lockstep_last_event_timestamp_seconds": Measure("gauge", "Unix time of the newest event."),
    "lockstep_unreadable_rows": Measure("gauge", "Rows of events that cannot be read."),
    "lockstep_rank_up": Measure(
        "gauge", "1 if the rank takes part, 0 if it is lost or has ended.", ("rank", "host")
    ),
    "lockstep_rank_peak_memory_bytes": Measure(
        "gauge", "The most memory that the rank has had.", ("rank",)
    ),
    "lockstep_rank_device_peak_memory_bytes": Measure(
        "gauge", "The most memory that the rank's tensors have had on its device.", ("rank",)
    ),
    "lockstep_rank_device_busy_ratio": Measure(
        "gauge", "Part of the time in which the rank's device computes, if known.", ("rank",)
    ),
    "lockstep_rank_microbatches": Measure(
        "gauge", "Microbatches that the rank computes in a step.", ("rank",)
    ),
    "lockstep_rank_seconds_total": Measure(
        "counter", "What the rank has spent its time with.", ("rank", "kind")
    ),
    "lockstep_rank_lost_total": Measure("counter", "Ranks that died or were ended."),
    "lockstep_recoveries_total": Measure("counter", "How often the others went on."),
    "lockstep_checkpoints_total": Measure("counter", "Checkpoints written."),
    "lockstep_evaluations_total": Measure("counter", "Evaluations done."),
    "lockstep_warnings_total": Measure("counter", "Warnings."),
}
"""By name, each with the labels `run` and `task` before its own."""

_COUNTED: Mapping[type[Event], str] = {
    RankLost: "lockstep_rank_lost_total",
    Recovered: "lockstep_recoveries_total",
    Checkpointed: "lockstep_checkpoints_total",
    Evaluated: "lockstep_evaluations_total",
    Warned: "lockstep_warnings_total",
}
_CURVES: Mapping[str, str] = {
    "lr": "lockstep_learning_rate",
    "grad_norm": "lockstep_gradient_norm",
    "samples_per_s": "lockstep_samples_per_second",
    "compute_efficiency": "lockstep_compute_efficiency_ratio",
}

Labels = tuple[str, ...]
Samples = dict[str, dict[Labels, float]]
"""Values by labels, by name of the measure."""


class Exporter:
    """The samples for Prometheus: updated at each look, and read by a server's thread.

    Events are read only of runs that have been running since the exporter was started; of others
    there is what a list of runs shows. Counters of a run go on growing when it is resumed.
    """

    def __init__(self) -> None:
        self._samples: Mapping[Path, Samples] = {}
        self._counts = {name: _Counter() for name, m in MEASURES.items() if m.kind == "counter"}
        self._followed: set[Path] = set()
        self._counted: dict[Path, tuple[int, History]] = {}
        self._numbers: dict[Path, dict[str, float]] = {}

    def __call__(self, watch: Watch, changed: Sequence[Watched]) -> None:
        """Take the state of the runs."""
        samples = {path: of for path, of in self._samples.items() if path in watch.runs}
        for run in changed:
            if run.summary.state == "running":
                self._followed.add(run.path)
            samples[run.path] = self._of(run)
        self._samples = samples  # at once: the server's thread sees the old ones or the new ones

    def collect(self) -> Iterable[Metric]:
        """All families with their samples; called when Prometheus scrapes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        samples = self._samples
        for name, measure in MEASURES.items():
            kind = GaugeMetricFamily if measure.kind == "gauge" else CounterMetricFamily
            labels = ("run", "task", *measure.labels)
            family = kind(name.removesuffix("_total"), measure.help, labels=labels)
            for of in samples.values():
                for values, number in of.get(name, {}).items():
                    family.add_metric(values, number)
            yield family

    def _of(self, run: Watched) -> Samples:
        summary = run.summary
        run_labels = (shown(str(run.path)), shown(summary.task))
        info = (*run_labels, summary.state, shown(summary.sha256), shown(summary.config_hash))
        samples: Samples = {
            "lockstep_run_info": {info: 1.0},
            "lockstep_run_up": {run_labels: float(summary.state == "running")},
            "lockstep_step": {run_labels: float(summary.step)},
            "lockstep_metric_value": _metrics(summary.metrics, run_labels),
        }
        if summary.total_steps:
            samples["lockstep_steps_planned"] = {run_labels: float(summary.total_steps)}
        if summary.newest:
            samples["lockstep_last_event_timestamp_seconds"] = {run_labels: summary.newest}
        if summary.left_s is not None:
            samples["lockstep_left_seconds"] = {run_labels: summary.left_s}
        if run.path in self._followed:
            self._add_followed(samples, run, run_labels)
        return samples

    def _add_followed(self, samples: Samples, run: Watched, own: Labels) -> None:
        history, is_running = run.history, run.summary.state == "running"
        newest = {name: c.values[-1] for name, c in history.curves.items() if len(c.values)}
        for curve, name in _CURVES.items():
            if curve in newest:
                samples[name] = {own: newest[curve]}
        metrics = {name: value for name, value in newest.items() if "/" in name}
        samples["lockstep_metric_value"] |= _metrics(metrics, own)
        samples["lockstep_ranks"] = {own: float(len(history.living) if is_running else 0)}
        if history.plan:
            samples["lockstep_ranks_asked"] = {own: float(history.plan.world_size)}
        samples["lockstep_unreadable_rows"] = {own: float(history.num_problems)}
        events = (happening.event for happening in reversed(history.happenings))
        saved = next((event for event in events if isinstance(event, Checkpointed)), None)
        if saved is not None:
            samples["lockstep_checkpoint_bytes"] = {own: float(saved.num_bytes)}
        _add_ranks(samples, history, own, is_running)
        self._count(run.path, history, own)
        for name, counts in self._counts.items():
            samples[name] = dict(counts.of(own[0]))

    def _count(self, path: Path, history: History, own: Labels) -> None:
        """Add what is new since the last look to the counters."""
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
        seconds = self._counts["lockstep_rank_seconds_total"]
        for process in history.processes:
            for kind, label in zip(KINDS, KINDS_OF_WORK, strict=True):
                source = (path, process.joined.slot, process.since, kind)
                seconds.add((*own, str(process.rank), label), source, process.seconds[kind])


class _Counter:
    """Totals that never decrease, even where the value that they are made of does."""

    def __init__(self) -> None:
        self._totals: dict[Labels, float] = {}
        self._seen: dict[tuple[object, ...], float] = {}

    def add(self, labels: Labels, source: tuple[object, ...], value: float) -> None:
        """Add the growth of a source's value; one that has decreased has started from 0 again.

        Args:
            labels: labels of the counter.
            source: the source; several may feed one counter.
            value: its present value.
        """
        before = self._seen.get(source, 0.0)
        growth = value - before if value >= before else value
        self._seen[source] = value
        self._totals[labels] = self._totals.get(labels, 0.0) + growth

    def of(self, run: str) -> Iterator[tuple[Labels, float]]:
        """Labels and totals of a run."""
        return ((k, value) for k, value in self._totals.items() if k[0] == run)


def _metrics(values: Mapping[str, float], own: Labels) -> dict[Labels, float]:
    """Metrics by "split/name" with labels of their own."""
    parts = ((key.partition("/"), value) for key, value in values.items())
    return {(*own, shown(split), shown(name)): float(v) for (split, _, name), v in parts}


def _add_ranks(samples: Samples, history: History, own: Labels, is_running: bool) -> None:
    up: dict[Labels, float] = {}
    memory: dict[Labels, float] = {}
    of_device: dict[Labels, float] = {}
    busy: dict[Labels, float] = {}
    microbatches: dict[Labels, float] = {}
    # The living last: they may have the number of one that was lost.
    for process in sorted(history.processes, key=lambda p: p.until is None):
        labels = (*own, str(process.rank))
        is_living = is_running and process.until is None
        at_host = (*labels, shown(process.joined.host))
        up[at_host] = float(is_living)
        memory[labels] = float(process.times.peak_bytes)
        if process.times.device_bytes:
            of_device[labels] = float(process.times.device_bytes)
            busy[labels] = process.times.device_busy
        microbatches[labels] = float(process.num_microbatches) if is_living else 0.0
    samples["lockstep_rank_up"] = up
    samples["lockstep_rank_peak_memory_bytes"] = memory
    samples["lockstep_rank_device_peak_memory_bytes"] = of_device
    samples["lockstep_rank_device_busy_ratio"] = busy
    samples["lockstep_rank_microbatches"] = microbatches


class Server:
    """An HTTP server for Prometheus, in a thread of its own.

    Attributes:
        port: port that it listens on.

    Args:
        exporter: the samples.
        host: address to listen on.
        port: port to listen on; 0 for any free one.

    Raises:
        ConfigError: `prometheus_client` is not installed, or the address cannot be listened on.
    """

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        with needing("monitor", "--prometheus needs prometheus_client"):
            from prometheus_client import CollectorRegistry, start_http_server
            from prometheus_client.registry import Collector

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

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def write_dashboard(path: Path) -> None:
    """Write a dashboard for Grafana of the samples, as JSON.

    Raises:
        DataError: the file cannot be written.
    """
    dashboard = Path(__file__).with_name("grafana.json").read_text(encoding="utf-8")
    with file_errors(DataError, path), replacing(path) as file:
        file.write(dashboard)
