"""On an accelerator the engine ends with the CPU's bits, waits for it once a step, and recovers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.faults import Moment, PlannedFault, to_env
from lockstep.observe import read_events
from tests.accelerator import HERE, surroundings
from tests.conftest import environment, result, run, slow
from tests.distributed.conftest import CONFIG, same

QUIET = ("steps=32", "eval_every=99", "checkpoint.every=99", "log_every=99")
DIGITS = ("train", "digits", "steps=24", "checkpoint.every=8", "eval_every=12", "log_every=8")


@pytest.fixture(scope="module")
def accelerated() -> dict[str, str]:
    """Variables with which torch has the accelerator; warm interpreters have begun without."""
    return surroundings(environment(cold=True))


@pytest.fixture
def command(accelerated: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Runs Python on the accelerator; what it has printed."""

    def call(*argv: object, **variables: str) -> str:
        ended = subprocess.run(
            [sys.executable, *map(str, argv)],
            cwd=tmp_path,
            env=accelerated | variables,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return call


@pytest.fixture
def cases(command: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains cases; see `train_cases`."""

    def call(what: str, *names: str) -> dict[str, Any]:
        printed = command(HERE / "train_cases.py", what, tmp_path, *names)
        found: dict[str, Any] = json.loads(printed.rpartition("RESULT ")[2])
        return found

    return call


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the digits on the CPU."""
    folder = tmp_path_factory.mktemp("reference")
    ended = run([sys.executable, "-m", "lockstep", *DIGITS, "--run-dir", "run"], folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    sha256: str = result(folder / "run")["params_sha256"]
    return sha256


def test_a_run_has_the_bits_of_the_cpu_and_waits_once(
    cases: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    names = ("counted", "user-sharded", "adafactor", "tables", "carry", "batch-loss")
    found = cases("cpu,accelerator,manners", *names, "changing")
    full, fuller = (found.pop(name)[0] for name in list(found) if name.startswith("full"))
    assert re.match(
        r"EnvironError: rank 0 is out of memory: hostgpu out of memory.*; held were: parameters "
        r"0.3 MiB, gradients and their sums [\d.]+ MiB, optimizer state 0.\d MiB, activations and "
        r"the rest [\d.]+ MiB; more microbatches",
        full,
    ), full
    assert re.match(r"ConfigError: memory: a rank needs at least .*free on hostgpu:0", fuller), (
        fuller
    )
    for name, ends in found.items():
        assert ends[0] == ends[1], name
        assert len(ends[0][0]) == 64, (name, ends)
    assert json.loads((tmp_path / "waits-0.json").read_text()) == {"to host": 1.0}


STAGED = ("num_shards=4", "batch_size=12", "num_microbatches=6", "mesh.pp=2")
SLICED = ("num_shards=4", "batch_size=8", "num_microbatches=4")


@pytest.mark.parametrize(
    ("task", "keys", "waits"),
    [
        # The device goes on while the host waits for the event.
        slow("Counted", ("batch_size=16",), {"event": 1, "to host": 1}),
        slow("Counted", ("batch_size=16", "sharding=optimizer"), 4),
        slow("Counted", ("batch_size=16", "compression.name=int8"), 2),
        slow("Counted", ("batch_size=16", "compression.name=lowrank"), 5),
        slow("Counted", ("batch_size=16", "compression.name=topk"), 30),
        # One for each tensor that comes from the other stage: 6 microbatches, and a tied weight.
        slow("CountedStages", STAGED, 9),
        # Four parameters of the model are numbers, at each of which the host looks.
        slow("CountedStages", (*SLICED, "sharding=parameters"), 7),
        slow("CountedStages", (*SLICED, "sharding=gradients"), 4),
        slow("CountedCarry", (), 3),
        slow("CountedOverBatch", (), 4),
        slow("CountedSearch", (), 53),  # in three passes; 57 if these gather outside the stream
        slow("CountedTables", (), 90),
    ],
)
def test_a_step_of_several_ranks_waits_seldom(
    command: Callable[..., str],
    tmp_path: Path,
    task: str,
    keys: tuple[str, ...],
    waits: int | dict[str, int],
) -> None:
    argv = ("-m", "lockstep", "train", f"{HERE / 'train_cases.py'}:{task}", *QUIET, *keys)
    command(*argv, "device=accelerator", "-n", 2, "--launcher", "local")
    found = [json.loads(path.read_text()) for path in tmp_path.glob("waits-*.json")]
    assert len(found) == 2
    if isinstance(waits, dict):
        assert found == [waits, waits]
        # Of its four batches, the last step has had one since before the last wait but one.
        assert [p.read_text()[-9:] for p in tmp_path.glob("order-*")] == ["bbbbwbbbw"] * 2
    assert max(sum(of.values()) for of in found) <= (waits if isinstance(waits, int) else 2), found


@pytest.mark.parametrize(
    ("moment", "keys"),
    [
        ("reduced", ("-n", 3, "sharding=optimizer")),
        slow("compute", ("-n", 2)),
        slow("compute", ("-n", 3, "sharding=gradients")),
        slow("optimizer", ("-n", 4, "sharding=optimizer")),
    ],
)
def test_survivors_go_on_with_what_they_have(
    command: Callable[..., str],
    tmp_path: Path,
    reference: str,
    moment: Moment,
    keys: tuple[object, ...],
) -> None:
    faults = to_env([PlannedFault(1, 5, moment)], tmp_path / "faults")
    argv = ("-m", "lockstep", *DIGITS, "--launcher", "local", "device=accelerator", *keys)
    command(*argv, "--run-dir", "run", **faults)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    lost = [row for row in rows if row["event"] in ("RankLost", "Recovered")]
    assert [row["event"] for row in lost] == ["RankLost", "Recovered"]
    assert lost[1]["seconds"] < 15  # far less than `hang_timeout_s`
    assert result(tmp_path / "run")["params_sha256"] == reference
    devices = {row["device"] for row in rows if row["event"] == "Joined"}
    assert devices == {f"hostgpu:{n}" for n in range(int(str(keys[1])))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "keys", "where"),
    [
        ("BrokenStage", STAGED, "stage"),
        ("BrokenEvaluation", (*STAGED, "eval_every=2"), "stage"),
        ("BrokenRows", ("sharding=gradients", "eval_every=2", "eval_batch_size=8"), "rank"),
    ],
)
def test_a_rank_that_fails_ends_those_that_wait_for_it_with_one_message(
    accelerated: dict[str, str], tmp_path: Path, task: str, keys: tuple[str, ...], where: str
) -> None:
    argv = ("-m", "lockstep", "train", f"{HERE / 'train_cases.py'}:{task}", *QUIET, *keys)
    ended = subprocess.run(
        [sys.executable, *argv, "device=accelerator", "-n", "2", "--launcher", "local"],
        cwd=tmp_path,
        env=accelerated,
        capture_output=True,
        text=True,
        timeout=200,  # far less than `hang_timeout_s`
    )
    assert ended.returncode == 1, ended.stderr
    assert "starting again" not in ended.stderr
    assert ended.stderr.count(f"RuntimeError: the loss of this {where} fails") == 1
    assert re.search(r"^error: rank 1 raised an exception$", ended.stderr, re.M)


@pytest.mark.slow
def test_a_sample_that_fails_fails_in_its_step_though_it_was_fetched_before(
    accelerated: dict[str, str], tmp_path: Path
) -> None:
    task = f"{HERE / 'train_cases.py'}:Damaged"
    keys = ("batch_size=4", "num_microbatches=2", "data.num_workers=1", *QUIET, "-n", "2")
    found = []
    for device in ("cpu", "accelerator"):
        argv = ("-m", "lockstep", "train", task, *keys, f"device={device}", "--run-dir", device)
        ended = subprocess.run(
            [sys.executable, *argv, "--launcher", "local"],
            cwd=tmp_path,
            env=accelerated,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == 1, ended.stderr
        assert ended.stderr.count("ValueError: sample 11 is damaged") == 1
        rows = read_events(tmp_path / device / "events.jsonl")
        warned = [row["message"].splitlines()[0] for row in rows if row["event"] == "Warned"]
        found.append((ended.stderr.splitlines()[-1], warned))
    assert found[0] == found[1]
    assert any("is done again" in message for message in found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_ranks_meet_under_other_launchers_and_go_on_later(
    command: Callable[..., str], tmp_path: Path, reference: str, launcher: str
) -> None:
    keys = ("--launcher", launcher, "device=accelerator", "sharding=optimizer")
    command("-m", "lockstep", *DIGITS, "-n", 2, *keys, "stop_at_step=10", "--run-dir", "run")
    command("-m", "lockstep", "resume", "run", "-n", 3, "--launcher", "local")
    assert result(tmp_path / "run")["params_sha256"] == reference


@pytest.mark.slow
def test_each_case_has_the_bits_of_the_cpu(cases: Callable[..., dict[str, Any]]) -> None:
    ends = cases("cpu,accelerator")
    assert len(ends) > 40
    # They draw on the host and on the device, which on a CPU is one sequence.
    mixed = [ends.pop(name) for name in ("teacher", "teacher-sharded")]
    assert mixed[0] == mixed[1]
    assert {name: end for name, end in ends.items() if end[0] != end[1] or len(end[0]) < 2} == {}


@pytest.mark.slow
def test_many_ranks_need_few_collectives(command: Callable[..., str], tmp_path: Path) -> None:
    printed = command(HERE / "fake_ranks.py", tmp_path, 8, 64, 1024)
    found = json.loads(printed.rpartition("RESULT ")[2])
    assert {step for step, _ in found.values()} == {2}
    assert all(calls <= 110 for _, calls in found.values()), found  # of the whole run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "keys"),
    [
        ("local", ("-n", 2, "mesh.pp=2")),
        ("torchrun", ("-n", 2, "mesh.pp=2", "mesh.interleave=2")),
        ("local", ("-n", 4, "mesh.pp=2", "mesh.tp=2")),
        ("local", ("-n", 3, "sharding=parameters")),
    ],
)
def test_axes_have_the_bits_of_one_device(
    command: Callable[..., str], tmp_path: Path, launcher: str, keys: tuple[object, ...]
) -> None:
    model = f"{HERE.parent / 'nn' / 'models.py'}:Deep"
    argv = ("-m", "lockstep", "train", model, *CONFIG, "device=accelerator", "--run-dir")
    command(*argv, "alone")
    command(*argv, "run", "--launcher", launcher, *keys)
    same(tmp_path / "run", result(tmp_path / "alone"))
    if launcher == "local" and "mesh.pp=2" in keys:
        faults = to_env([PlannedFault(1, 3)], tmp_path / "faults")
        command(*argv, "killed", "--launcher", launcher, "-n", 4, "mesh.pp=2", **faults)
        same(tmp_path / "killed", result(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [("bf16",), ("fp16",), ("fp16", "sharding=optimizer"), ("fp16", "sharding=gradients")]
)
def test_mixed_precision_has_one_loss_scale_and_the_same_bits_on_any_ranks(
    command: Callable[..., str], tmp_path: Path, keys: tuple[str, ...]
) -> None:
    task = f"{HERE.parent / 'distributed' / 'tasks.py'}:Everything"
    argv = ("-m", "lockstep", "train", task, "steps=24", "log_every=1", "device=accelerator")
    scaled = ("precision.loss_scale=16777216", "precision.growth_interval=2")
    ends, scales = [], []
    for num, more in ((1, ()), (3, keys[1:])):
        run_dir, precision = tmp_path / str(num), (f"precision.dtype={keys[0]}", *scaled, *more)
        command(*argv, *precision, "-n", num, "--launcher", "local", "--run-dir", run_dir)
        rows = read_events(run_dir / "events.jsonl")
        ends.append(result(run_dir)["params_sha256"])
        scales.append([row["loss_scale"] for row in rows if row["event"] == "StepDone"])
    assert ends[0] == ends[1]
    assert scales[0] == scales[1]
    changes = {after / before for before, after in zip(scales[0], scales[0][1:], strict=False)}
    assert changes == ({0.5, 1.0, 2.0} if keys[0] == "fp16" else {1.0})


@pytest.mark.slow
def test_a_plan_is_of_the_memory_of_devices(command: Callable[..., str], tmp_path: Path) -> None:
    argv = ("-m", "lockstep", "plan", f"{HERE / 'train_cases.py'}:Counted", "device=accelerator")
    keys = ("batch_size=16", "num_microbatches=2", "steps=50", "--ranks", "1,2", "--seconds", 0.2)
    command(*argv, *keys, "--launcher", "local", "--json", "plan.json", HOSTGPU_BYTES="50000000")
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["facts"]["memory_bytes"] == 50_000_000
    peaks = [row["prediction"]["peak_bytes"] for row in made["rows"]]
    # Four times the parameters and two batches at least; hundreds of MiB of the host do not count.
    assert all(4 * 262_000 < peak < 5_000_000 for peak in peaks), peaks
