"""What Prometheus gets over HTTP, read by its own parser."""

import itertools
import json
import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.observe.monitor.watched_runs import HOSTILE, LOST, RECOVERED, START, ended, more, running
from tests.observe.reading.test_histories import PLAN, done, joined
from tests.observe.reading.test_runs import run_in

from lockstep.errors import ConfigError, DataError
from lockstep.observe.monitor.exporter import MEASURES, Exporter, Server, write_dashboard
from lockstep.observe.monitor.watch import Monitor, Watch
from lockstep.observe.reading.follow import EVENTS

SAVED = {
    "event": "Checkpointed", "step": 2, "path": "p", "num_bytes": 4096, "stall_s": 0.1,
    "write_s": 0.2,
}  # fmt: skip
EVALUATED = {
    "event": "Evaluated",
    "step": 2,
    "split": "val",
    "metrics": {"loss": 1.5},
    "seconds": 1,
}


class Scraped:
    """An exporter that is asked over HTTP."""

    def __init__(self, folder):
        exporter = Exporter()
        self.monitor = Monitor(Watch([folder]), [exporter])
        self.server = Server(exporter, "127.0.0.1", 0)

    def __call__(self):
        self.monitor.look()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        self.types = {family.name: family.type for family in families}
        return [sample for family in families for sample in family.samples]


@pytest.fixture
def scraped():
    opened = []

    def scrape(folder):
        opened.append(Scraped(folder))
        return opened[-1]

    yield scrape
    for one in opened:
        one.server.close()


def value(samples, name, **labels):
    found = [
        sample.value for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]  # fmt: skip
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_a_run_that_goes_on_is_told_with_all_that_is_known_of_it(tmp_path, scraped):
    first = done(1, 3.0, accuracy=0.5)
    first["ranks"][2]["peak_bytes"] = 1 << 20
    folder = running(tmp_path / "run", *START, first, done(2, 2.0), SAVED, EVALUATED)
    scrape = scraped(tmp_path)
    samples = scrape()
    assert value(samples, "lockstep_step", run=str(folder), task="t") == 2
    assert value(samples, "lockstep_steps_planned") == 9
    assert value(samples, "lockstep_run_up") == 1
    assert value(samples, "lockstep_run_info", state="running", config_hash="c") == 1
    assert value(samples, "lockstep_metric_value", split="train", metric="loss") == 2.0
    assert value(samples, "lockstep_metric_value", split="val", metric="loss") == 1.5
    assert value(samples, "lockstep_samples_per_second") == 20.0
    assert value(samples, "lockstep_compute_efficiency_ratio") == pytest.approx(6 / 7.5)
    assert value(samples, "lockstep_learning_rate") == 0.1
    assert value(samples, "lockstep_gradient_norm") == 1.0
    assert value(samples, "lockstep_ranks") == value(samples, "lockstep_ranks_asked") == 3
    assert [value(samples, "lockstep_rank_up", rank=str(r), host="h") for r in range(3)] == [1] * 3
    assert value(samples, "lockstep_rank_seconds_total", rank="1", kind="compute") == 4.0
    assert value(samples, "lockstep_rank_seconds_total", rank="1", kind="exchange") == 1.0
    assert value(samples, "lockstep_rank_peak_memory_bytes", rank="2") == 1 << 20
    assert value(samples, "lockstep_rank_microbatches", rank="0") == 2
    assert value(samples, "lockstep_checkpoint_bytes") == 4096
    assert value(samples, "lockstep_checkpoints_total") == 1
    assert value(samples, "lockstep_evaluations_total") == 1
    assert value(samples, "lockstep_rank_lost_total") == 0
    assert value(samples, "lockstep_last_event_timestamp_seconds") == 107.0
    for name, measure in MEASURES.items():
        assert scrape.types[name.removesuffix("_total")] == measure.kind


def test_names_follow_the_conventions_of_prometheus():
    for name, measure in MEASURES.items():
        assert re.fullmatch(r"lockstep_[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (measure.kind == "counter")
        assert not re.search(r"_(ms|mb|kb|percent|s)(_|$)", name)


def test_a_lost_rank_is_counted_and_is_down(tmp_path, scraped):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    scrape = scraped(tmp_path)
    scrape()
    more(folder, LOST, RECOVERED, done(3, 2.0, 2))
    samples = scrape()
    assert value(samples, "lockstep_rank_lost_total") == 1
    assert value(samples, "lockstep_recoveries_total") == 1
    assert value(samples, "lockstep_ranks") == 2
    assert value(samples, "lockstep_ranks_asked") == 3


def test_counters_never_go_back_when_a_run_is_resumed_or_its_file_replaced(tmp_path, scraped):
    folder = running(tmp_path / "run", *START, done(1, 3.0), SAVED, LOST, RECOVERED)
    scrape = scraped(tmp_path)

    def counters():
        return {
            (s.name, *sorted(s.labels.items())): s.value
            for s in scrape() if s.name.endswith("_total")
        }  # fmt: skip

    seen = [counters()]
    more(folder, done(2, 2.0, 2), first=60)
    seen.append(counters())
    again = [joined(rank, step=1) for rank in range(3)]
    more(folder, *again, {**PLAN, "step": 1}, done(2, 2.0), SAVED, first=70)
    seen.append(counters())
    (folder / EVENTS).unlink()
    more(folder, *START, done(1, 5.0), first=90)
    seen.append(counters())
    ended(folder)
    seen.append(counters())
    for before, after in itertools.pairwise(seen):
        assert before.keys() <= after.keys()
        assert all(after[key] >= before[key] for key in before)
    total = {key[0]: number for key, number in seen[2].items() if "rank_seconds" not in key[0]}
    assert total["lockstep_checkpoints_total"] == 2
    rank = [n for key, n in seen[2].items() if ("rank", "0") in key and ("kind", "compute") in key]
    assert rank == [3.0], "one second in each of three reports"


def test_runs_that_had_ended_are_told_without_reading_their_events(tmp_path, scraped):
    run_in(tmp_path / "old", *START, done(9, 2.0), metrics={"val/loss": 0.25})
    scrape = scraped(tmp_path)
    samples = scrape()
    assert value(samples, "lockstep_run_info", state="completed", sha256="ab") == 1
    assert value(samples, "lockstep_metric_value", split="val", metric="loss") == 0.25
    assert not any(sample.name == "lockstep_rank_up" for sample in samples)
    assert not any(run.is_open for run in scrape.monitor.watch.runs.values())


def test_hostile_names_and_values_can_be_read_back(tmp_path, scraped):
    plan = PLAN | {"task": HOSTILE}
    loss = {**done(1, 1.0, **{HOSTILE: 1.0}), "loss": "NaN", "grad_norm": "Infinity"}
    folder = running(tmp_path / HOSTILE, *START[:-1], plan, loss)
    (folder / "run.json").write_text(json.dumps({"task": HOSTILE, "config_hash": "c"}))
    samples = scraped(tmp_path)()
    loss = value(samples, "lockstep_metric_value", split="train", metric="loss")
    assert loss != loss
    assert value(samples, "lockstep_gradient_norm") == float("inf")
    assert all(text.isprintable() for sample in samples for text in sample.labels.values())


def dashboard(folder):
    write_dashboard(folder / "board.json")
    return json.loads((folder / "board.json").read_text())


def test_every_name_and_label_of_the_dashboard_is_in_a_scrape(tmp_path, scraped):
    running(tmp_path / "run", *START, done(1, 3.0), done(2, 2.0), done(3, 2.0), SAVED)
    samples = scraped(tmp_path)()
    known = {sample.name: sample.labels.keys() for sample in samples}
    board = dashboard(tmp_path)
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"lockstep_\w+", query)}
    assert len(used) > 10
    assert used <= known.keys()
    for panel in board["panels"]:
        (target,) = panel["targets"]
        name = re.search(r"lockstep_\w+", target["expr"])[0]
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"__name__"}
        assert labels <= known[name] | {"run"}, panel


def test_panels_fill_the_grid_without_overlapping(tmp_path):
    cells = set()
    for panel in dashboard(tmp_path)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y) for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }  # fmt: skip
        assert not own & cells
        cells |= own
    with pytest.raises(DataError, match="cannot be written"):
        write_dashboard(tmp_path / "missing" / "board.json")


def test_a_port_that_is_taken_is_one_message(tmp_path, scraped):
    taken = scraped(tmp_path)
    with pytest.raises(ConfigError, match=rf"--prometheus {taken.server.port}: cannot listen"):
        Server(Exporter(), "127.0.0.1", taken.server.port)
    with pytest.raises(ConfigError, match=r"cannot listen at no\.such\.host\.invalid"):
        Server(Exporter(), "no.such.host.invalid", 0)
