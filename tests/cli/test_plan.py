"""`lockstep plan`: what it refuses, which trainings it does, and what it says of a real task."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.planning.test_plans import anatomy, facts, network

from lockstep.cli.clusters.plan import Options, lines, plan, table
from lockstep.cli.clusters.plan_measuring import Measuring, groups, message_sizes, shapes
from lockstep.cli.clusters.plan_probes import Probe, Prober, Shape, probe_of
from lockstep.config import TrainConfig, override
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.launching.targets import configured
from lockstep.planning.plan import make_plan, read_plan
from lockstep.planning.prediction import Layout

OPTIONS = Options("1,2", None, (), None, 1000.0, None, 1.0, 1, None, quiet=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": ""}, "--ranks"), ({"ranks": "0"}, "--ranks 0"), ({"ranks": "1,x"}, "--ranks"),
        ({"ranks": "10000000"}, "--ranks"), ({"ranks_per_host": 0}, "--ranks-per-host 0"),
        ({"network": "fast"}, "--network fast"), ({"hours_between": 0.0}, "--mtbf 0"),
        ({"hours_between": float("nan")}, "--mtbf nan"), ({"seconds": 0.0}, "--seconds 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"launcher": "ssh"}, "--launcher ssh"), ({"json": Path("/none/plan.json")}, "/none/"),
        ({"profiles": (Path("none.json"),)}, "none.json"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LockstepError) as caught:
        plan("digits", (), replace(OPTIONS, **changes), Console(quiet=True))
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_script_must_name_its_task(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("")
    with pytest.raises(ConfigError, match=r"mine\.py:MyTask"):
        plan(str(script), (), OPTIONS, Console(quiet=True))


def measuring(numbers: tuple[int, ...], per_host: int = 2, cores: int = 2) -> Measuring:
    kind, config = configured("digits", ())
    config = override(config, ["num_microbatches=8"])
    return Measuring("digits", kind, config, (), numbers, per_host, cores, "mpi", 1.0)


def test_each_number_of_this_host_is_measured_as_it_will_be() -> None:
    assert shapes(measuring((1,)), anatomy()) == [Shape(8)]
    assert shapes(measuring((1, 2)), anatomy()) == [Shape(8), Shape(4, 2)]
    more = shapes(measuring((4, 16)), anatomy())
    # Two on each host: a line through two numbers of microbatches gives all others.
    assert more == [Shape(8), Shape(2, 2), Shape(1, 2)]


def test_groups_are_as_large_as_this_host_may_have() -> None:
    assert groups(measuring((1,))) == []
    assert groups(measuring((1, 2, 3))) == [Shape(8, num_replicas=2)]
    assert groups(measuring((2, 3, 99), per_host=4)) == [
        Shape(8, num_replicas=n) for n in (2, 3, 4)
    ]


def test_replicas_are_measured_where_there_are_cores_for_them() -> None:
    parts = anatomy(num_blocks=4, num_shards=2)
    found = shapes(measuring((1, 2)), parts)
    assert Shape(8, pp=2) in found
    assert Shape(8, tp=2) in found
    assert not any(s.pp > 1 or s.tp > 1 for s in shapes(measuring((2,), cores=1), parts))
    odd = replace(parts, is_elementwise=False)
    assert not any(s.pp > 1 or s.tp > 1 for s in shapes(measuring((1, 2)), odd))


def test_messages_are_measured_at_the_sizes_of_the_model() -> None:
    assert 4 << 20 in message_sizes(anatomy())
    assert message_sizes(anatomy(gradient_bytes=4)) == (1024,)


def row(time: float, seconds: float, ranks: int = 1, **more: Any) -> dict[str, Any]:
    each = {"peak_bytes": 5, "sent_bytes": 30} | more
    return {
        "event": "StepDone", "time": time, "seconds": seconds, "num_steps": 10,
        "ranks": [{"rank": rank} | each for rank in range(ranks)],
    }  # fmt: skip


def folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.mkdir()
    started = {"event": "RunStarted", "time": 0.0, "steps_per_epoch": 3}
    text = "".join(f"{json.dumps({'step': 0} | each)}\n" for each in (started, *rows))
    (path / "events.jsonl").write_text(text)
    return path


def test_copies_count_only_while_all_of_them_train(tmp_path: Path) -> None:
    late = [row(11 + n, 1.0) for n in range(4)]
    early = [row(10 + n, 0.5 if n < 2 else 1.2) for n in range(5)]
    made = probe_of([folder(tmp_path / "a", late), folder(tmp_path / "b", early)], since=4.0)
    # From 11.0, where the second report of the late one begins, to 14.0, where both are there.
    assert [[r["time"] for r in rows] for rows in made.reports] == [[12, 13, 14], [13, 14]]
    assert made.step_s == pytest.approx(0.12)
    assert made.started_s == 7.0
    assert (made.peak_bytes, made.sent_bytes) == (5, 3.0)


def test_a_training_that_a_slow_start_made_short_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of a process took 0.5 s for a microbatch, later ones 10 ms for all eight."""
    asked: list[int] = []

    def trained(_: Prober, shape: Shape, num_steps: int, *__: Any, **___: Any) -> Probe:
        asked.append(num_steps)
        ranks = [{"peak_bytes": 1, "sent_bytes": 0}]
        row = {"seconds": 0.01 if asked[1:] else 0.5, "num_steps": 1, "ranks": ranks}
        return Probe(((row,),), 0.0, (), {})

    monkeypatch.setattr(Prober, "_train", trained)
    prober = Prober("digits", TrainConfig(), (), tmp_path, "mpi", seconds=2.0)
    prober.first(1)
    assert prober.timed(Shape(8))[1].step_s == 0.01
    assert asked == [5, 7, 200]
    prober.timed(Shape(8))
    assert asked == [5, 7, 200, 200]


def test_a_plan_counts_the_samples_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch larger than the data set is all of it, and a microbatch its part of that."""
    given: list[list[str]] = []

    def started(self: Prober, shape: Shape, path: Path, overrides: list[str], server: str) -> None:
        given.append(list(overrides))
        size = next(int(o.removeprefix("batch_size=")) for o in overrides if "batch_size" in o)
        plan = {"event": "RunStarted", "time": 0.5, "num_samples": 20, "batch_size": min(size, 20)}
        rows = [plan, row(1.0, 0.5), row(2.0, 0.5), row(3.0, 0.5)]
        path.mkdir(parents=True)
        text = "".join(f"{json.dumps({'step': 0} | each)}\n" for each in rows)
        (path / "events.jsonl").write_text(text)

    monkeypatch.setattr(Prober, "_start", started)
    config = override(configured("digits", ())[1], ["batch_size=1000000", "num_microbatches=8"])
    prober = Prober("digits", config, (), tmp_path, "local", 1.0)
    prober.first(2)
    assert "batch_size=6" in given[-1]  # two microbatches of 20 / 8
    assert prober._train(Shape(8), 5, 1, "").plan["batch_size"] == 20


def test_an_interval_longer_than_the_run_is_a_checkpoint_at_its_end() -> None:
    long = make_plan(facts(total_steps=10**9), network(), (1,), 2, 1000.0)
    assert any("; best every " in line for line in lines(long))
    short = make_plan(facts(total_steps=2), network(), (1,), 2, 1000.0)
    (said,) = (line for line in lines(short) if line.startswith("checkpoints: "))
    assert "; best at the end only: the best interval, " in said
    assert said.endswith("is not shorter than the run (2 steps)")


def test_jitter_is_free_of_accidents() -> None:
    usual = [row(n, 1.0 if n % 2 else 3.0) for n in range(98)]
    made = Probe(((*usual, row(98, 50.0), row(99, 80.0)),), 0.0, (), {})
    assert len(made.jitter) == 98
    assert (made.jitter[0], made.jitter[-1]) == pytest.approx((0.5, 1.5))


@pytest.mark.slow
def test_a_plan_can_be_read_on_a_narrow_terminal() -> None:
    made = make_plan(facts(), network(), (1, 2, 64, 10_000), 2, 1000.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(made))
    shown = console.export_text()
    assert "64x1x1" in shown
    assert "…" not in shown
    text = "\n".join(lines(made))
    for part in ("recommended: ", "checkpoints: 1.0 MiB", "lost ranks: one in", "assumed:"):
        assert part in text


@pytest.mark.slow
def test_a_plan_of_a_real_task(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    argv = [
        sys.executable, "-m", "lockstep", "plan", "digits", "batch_size=64", "--ranks", "1,2,100",
        "--seconds", "0.5", "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "recommended: " in done.stdout
    made = read_plan(path)
    run = tmp_path / "run"
    train = [sys.executable, "-m", "lockstep", "train", "digits", "-n", "2", "batch_size=64",
             "steps=40", "--run-dir", str(run)]  # fmt: skip
    subprocess.run(train, capture_output=True, timeout=300, check=True)
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    reports = [r for r in rows if r["event"] == "StepDone"]
    found = made.find(Layout(2))
    assert found is not None
    # Bytes follow from the layout: what is not a gradient are sums and headers.
    sent = sum(r["ranks"][0]["sent_bytes"] for r in reports) / sum(r["num_steps"] for r in reports)
    assert sent == pytest.approx(found.prediction.sent_bytes, rel=0.03)
    peak = max(rank["peak_bytes"] for rank in reports[-1]["ranks"])
    assert found.prediction.peak_bytes == pytest.approx(peak, rel=0.1)
    assert len(made.rows) >= 3


@pytest.mark.slow
def test_a_task_that_cannot_be_trained_says_why(tmp_path: Path) -> None:
    task = tmp_path / "bad.py"
    task.write_text(
        "import lockstep as ls\n"
        "from torch import nn\n"
        "class Bad(ls.Task):\n"
        "    def build_model(self): return nn.Linear(1, 1)\n"
        "    def dataset(self, split): return None\n"
        "    def loss(self, model, batch): return ls.Loss(model(batch).sum(), 1)\n"
    )
    with pytest.raises((LockstepError, DataError), match="dataset"):
        plan(f"{task}:Bad", (), OPTIONS, Console(quiet=True))
