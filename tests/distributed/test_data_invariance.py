"""Whatever the data are, the result depends on neither ranks nor interruptions."""

import csv
import itertools
import json
import sys
from pathlib import Path

import pytest
from tests.conftest import result, run

from lockstep.engine.faults import PlannedFault, to_env

sys.path.insert(0, str(Path(__file__).parent))
from data_tasks import CASES, STOP

KEYS = ("batch_size=16", "num_microbatches=4", "steps=11", "lr=0.05", "eval_batch_size=8")
SCRIPT = Path(__file__).parent / "data_tasks.py"
EQUAL = {
    frozenset({"plain", "hf"}),
    frozenset({"epochs", "epochs-workers"}),
    frozenset({"late-draws", "late-draws-workers"}),
    frozenset({"stream-seeking", "stream-not-seeking"}),
    frozenset({"stream-seeking-shuffled", "stream-not-seeking-shuffled"}),
    frozenset({"parts", "parts-state"}),
}


def printed(done):
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


FEW = (
    "plain", "hf", "epochs", "late-draws", "late-draws-workers", "stream-seeking",
    "stream-not-seeking", "parts-state", "splits",
)  # fmt: skip
"""Those of the quick tests."""


@pytest.fixture(scope="module")
def alone(folder):
    """What one process gets of all."""
    (folder / "all").mkdir()
    return printed(run([sys.executable, SCRIPT, "whole", folder / "all"], folder))


@pytest.fixture(scope="module")
def few(folder):
    return printed(run([sys.executable, SCRIPT, "whole", folder, *FEW], folder))


@pytest.mark.slow
def test_two_ranks_get_what_one_gets(ranks, folder, alone):
    names = (
        "weights", "epochs-workers", "splits", "stream-drifting", "stream-seeking-shuffled",
        "stream-endless", "hf-stream", "parts-hf", "parts-length",
    )  # fmt: skip
    found = printed(ranks("mpi", 2, SCRIPT, "whole", folder, *names))
    assert found == {name: alone[name] for name in names}


@pytest.mark.slow
def test_what_is_drawn_late_and_by_some_ranks_only_is_the_same(ranks, folder, few):
    names = ("late-draws", "late-draws-workers")
    found = printed(ranks("mpi", 2, SCRIPT, "whole", folder, *names))
    assert found == {name: few[name] for name in names}


@pytest.mark.slow
def test_three_ranks_go_on_in_the_middle_of_an_epoch_with_what_one_has_begun(ranks, folder, alone):
    stopped = printed(run([sys.executable, SCRIPT, "stop", folder], folder))
    assert {step for _, step, _ in stopped.values()} == {STOP}
    resumed = printed(ranks("mpi", 3, SCRIPT, "resume", folder))
    # Training metrics are those of the newest report, which a stop ends early.
    for name, (sha, step, metrics) in alone.items():
        assert resumed[name][:2] == [sha, step], name
        assert {k: v for k, v in resumed[name][2].items() if k.startswith("val")} == {
            k: v for k, v in metrics.items() if k.startswith("val")
        }, name


@pytest.mark.slow
def test_all_validation_splits_are_evaluated_together(folder, few):
    names = {"val/loss", "val_shifted/loss", "test_shifted/loss"}
    assert names <= few["splits"][2].keys()
    with (folder / "1-splits" / "metrics.csv").open() as file:
        rows = [(r["step"], r["split"], r["accuracy"]) for r in csv.DictReader(file)]
    shifted = {int(step): float(value) for step, split, value in rows if split == "val_shifted"}
    assert sorted(shifted) == [2, 4, 6, 8, 10, 11]
    assert [int(s) for s, split, _ in rows if split == "val"] == sorted(shifted)
    assert [s for s, split, _ in rows if split == "test_shifted"] == ["11"]
    best = max(shifted, key=lambda step: (shifted[step], -step))
    hint = (folder / "1-splits" / "checkpoints" / "best").read_text().strip()
    assert hint == f"step_{best:08}"


def test_a_checkpoint_is_evaluated_on_any_split_of_the_task(here, folder, few):
    run_dir = str(folder / "1-splits")
    done = here("eval", run_dir, "--split", "val_shifted")
    assert done.returncode == 0, done.stderr
    accuracy = few["splits"][2]["val_shifted/accuracy"]
    assert f"accuracy         {accuracy:.6g}" in done.stdout
    done = here("eval", run_dir, "--split", "ood")
    assert done.returncode == 2
    assert "--split ood: must be one of train, val, val_shifted, test_shifted" in done.stderr


def test_a_stream_that_parts_from_the_others_is_found_at_a_checkpoint(lockstep):
    done = lockstep("train", f"{SCRIPT}:Late", "-n", "3", *KEYS, "checkpoint.every=3")
    assert done.returncode == 2
    assert "step 3: dataset('train'): sample 40 of epoch 0 is another one on rank" in done.stderr


def test_ranks_that_survive_a_loss_go_on_in_the_middle_of_a_batch(lockstep, tmp_path, few):
    faults = [PlannedFault(0, 3, "compute"), PlannedFault(2, 7, "reduced")]
    done = lockstep(
        "train", f"{SCRIPT}:Slow", "-n", "4", "--run-dir", "lossy", *KEYS,
        **to_env(faults, tmp_path / "faults"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = result(tmp_path / "lossy")
    assert ended["world_size"] == 2
    assert ended["params_sha256"] == few["stream-not-seeking"][0]


def test_parts_of_a_stream_are_read_by_the_ranks_of_their_microbatches(lockstep, tmp_path, few):
    """A rank reads as much as it computes, a few steps twice, beside what is tried at the start."""
    (tmp_path / "reads").mkdir()
    keys = (*KEYS, "data.stream_shards=8", "steps=121", "stop_at_step=120", "balance_every=0")
    keys += "eval_every=120", "checkpoint.every=120"
    read = {"READS": tmp_path / "reads"}
    done = lockstep("train", f"{SCRIPT}:InParts", "-n", "3", "--run-dir", "run", *keys, **read)
    assert done.returncode == 0, done.stderr
    counts = [len((tmp_path / "reads" / str(r)).read_text().splitlines()) for r in range(3)]
    for count, num_microbatches in zip(counts, (2, 1, 1), strict=True):
        # Fewer than a quarter of the steps are repeated. Reading for all would be 1,440 more.
        assert 0 <= count - 120 * 4 * num_microbatches < 130 + 30 * 4 * num_microbatches, counts
    # Resumed on one rank, in the tenth pass and later, nothing is read again.
    [path] = (tmp_path / "run/checkpoints").glob("step_*120/manifest.json")
    places = json.loads(path.read_text())["sampler"]["places"]
    assert [place["start"] + place["position"] for place in places] == [480] * 4
    (tmp_path / "reads" / "0").unlink()
    done = lockstep("resume", "run", "-n", "1", "stop_at_step=121", **read)
    assert done.returncode == 0, done.stderr
    # Its only step is the last one, which is repeated.
    assert len((tmp_path / "reads" / "0").read_text().splitlines()) - 2 * 16 < 160


@pytest.mark.slow
def test_parts_of_a_stream_move_with_their_microbatches(lockstep, tmp_path, few):
    faults = [PlannedFault(0, 3, "compute"), PlannedFault(2, 7, "places")]
    done = lockstep(
        "train", f"{SCRIPT}:InParts", "-n", "4", "--run-dir", "lossy", *KEYS,
        "data.stream_shards=8", "data.num_workers=1", "checkpoint.every=4",
        **to_env(faults, tmp_path / "faults"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = result(tmp_path / "lossy")
    assert ended["world_size"] == 2
    assert ended["params_sha256"] == few["parts-state"][0]


@pytest.mark.slow
def test_faults_of_all_kinds_while_parts_are_read_change_no_bit(lockstep):
    keys = (*KEYS, "steps=80", "data.stream_shards=8", "balance_every=4", "checkpoint.every=20")
    for faults, more in ((20, ()), (10, ("data.num_workers=1", "data.shuffle_buffer=6"))):
        done = lockstep(
            "chaos",
            f"{SCRIPT}:InParts",
            "-n",
            "3",
            "--faults",
            faults,
            "--seed",
            "1",
            *keys,
            *more,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def check_all_differ(found):
    for one, other in itertools.combinations(found, 2):
        is_equal = found[one][0] == found[other][0]
        assert is_equal == (frozenset({one, other}) in EQUAL), (one, other)


@pytest.mark.slow
def test_other_data_give_other_parameters(alone):
    assert [*alone] == [*CASES]
    check_all_differ(alone)


def test_a_few_other_data_give_other_parameters(few):
    check_all_differ(few)
