"""What goes wrong is one clear message, on any number of ranks, and nothing is lost."""

import gzip
import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import TASKS, result, target
from tests.data.idx_files import write_idx
from tests.distributed.tasks import Everything, EverythingConfig

import lockstep as ls
from lockstep.errors import DataError
from lockstep.launching.api import training
from lockstep.systems.digits.task import Digits

SMALL = ("steps=6",)


def refused(done, *parts, code=2):
    """The command said one clear thing and left."""
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr.count("error: ") == 1, done.stderr
    if code == 2:
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["digits", "lrr=1"], ["unknown key 'lrr'", "did you mean lr?"]),
        (["digits", "weight_decay=1"], ["did you mean optimizer.weight_decay?"]),
        (["digit"], ["unknown recipe 'digit'", "did you mean digits?"]),
        (["nothing.py"], ["nothing.py: there is no such file"]),
        (["digits", "lr=fast"], ["lr='fast'", "valid number"]),
        (["digits", "model=rnn"], ["model='rnn'", "'mlp' or 'cnn'"]),
        (["digits", "batch_size=0"], ["batch_size=0", "greater than 0"]),
        (["digits", "batch_size=-8"], ["batch_size=-8"]),
        (["digits", "batch_size=4"], ["num_microbatches=8", "batch_size=4"]),
        (["digits", "steps"], ["'steps' is not of the form key=value"]),
        (["digits", "data_dir=/nowhere"], ["/nowhere"]),
        (["digits", "-n", "0"], ["-n 0"]),
        (["digits", "-n", "2", "--launcher", "python"], ["--launcher python", "one rank"]),
        (["digits", "--launcher", "bus"], ["--launcher bus", "python, local, mpi, torchrun"]),
        (["digits", "device=cuda"], ["device='cuda'", "a build without CUDA"]),
        (["digits", "activation_checkpointing=[nosuch]"], ["nosuch", "no module"]),
        (["digits", "watch=f1", "steps=12"], ["watch='f1'", "accuracy, loss"]),
        (["digits", "--config", "missing.yaml"], ["missing.yaml"]),
        ([str(TASKS), "--config", "some.yaml"], ["--config some.yaml", "brings its own config"]),
    ],
)
def test_bad_arguments(here, arguments, parts):
    refused(here("train", *arguments), *parts)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LOCKSTEP_FAULTS", "garbage"),
        ("LOCKSTEP_FAULTS", '{"log": "", "faults": [{"slot": 0, "step": "x"}]}'),
        ("LOCKSTEP_FAULTS", '{"log": "/", "faults": []}'),
        ("SLURM_STEP_NODELIST", "n" + "[" * 5000),
    ],
)
def test_garbage_in_the_environment(here, monkeypatch, variable, value):
    for name in ("STEP_ID", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2" if variable.startswith("SLURM") else "1")
    monkeypatch.setenv(variable, value)
    refused(here("train", "digits", "steps=1"), variable if variable[0] == "L" else "node list")


@pytest.mark.parametrize(
    "value", ["garbage", "[]", '{"colour": 3}', '{"overrides": [3]}', "[" * 100_000]
)
def test_garbage_from_the_launcher(monkeypatch, capsys, value):
    monkeypatch.setenv("LOCKSTEP_SESSION", value)
    with pytest.raises(SystemExit) as ended:
        ls.main(Everything())
    assert ended.value.code == 2
    assert "error: environment variable LOCKSTEP_SESSION" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metrics", "parts"),
    [
        ("{'accuracy': correct.sum()}", ["metric 'accuracy' must be a pair", "shape ()"]),
        ("{'accuracy': (correct, n)}", ["metric 'accuracy'", "scalars", "shape (8,)"]),
        ("{'accuracy': (1, 2, 3)}", ["metric 'accuracy' must be a pair", "tuple of 3"]),
        ("{'accuracy': ('a', 1)}", ["metric 'accuracy'", "scalars", "a str"]),
        ("[correct]", ["Loss.metrics must be a dict", "list"]),
        ("{}, 3", ["TypeError"]),
    ],
)
def test_metrics_that_are_none(here, tmp_path, metrics, parts):
    (tmp_path / "mine.py").write_text(
        "import lockstep as ls\n"
        "from tests.distributed.tasks import Everything\n"
        "class Mine(Everything):\n"
        "    Config = Everything.Config\n"
        "    def loss(self, model, batch):\n"
        "        loss = super().loss(model, batch)\n"
        "        correct, n = batch[1] == 0, len(batch[1])\n"
        f"        return ls.Loss(loss.sum, n, {metrics})\n"
    )
    code = 1 if parts == ["TypeError"] else 2
    refused(here("train", "mine.py:Mine", *SMALL), *parts, code=code)


def test_a_misspelt_metric_is_found_before_the_first_step(here, tmp_path):
    done = here("train", target(), "watch=acuracy", "--run-dir", "r", "eval_every=6", *SMALL)
    refused(done, "watch='acuracy'", "accuracy, loss")
    done = here("train", target(), "convergence=[{metric: f1}]", "--run-dir", "s", *SMALL)
    refused(done, "convergence.metric='f1'")
    assert not (tmp_path / "r").exists()


def test_a_split_that_is_none(here):
    assert here("train", target(), "--run-dir", "r", *SMALL).returncode == 0
    done = here("eval", "r", "--split", "foo")
    refused(done, "--split foo", "train, val, test")
    refused(here("eval", "r", "--split", "test"), "--split test", "no such dataset")


def test_a_run_from_standard_input(here, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["-"])
    # A worker of pytest-xdist has none.
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    ls.main(Everything(), EverythingConfig(steps=2), run_dir=tmp_path / "r")
    assert json.loads((tmp_path / "r" / "run.json").read_text())["target"] == ""
    for command in ("resume", "eval"):
        refused(here(command, "r"), "in no file", "resume=True")


def images_and_labels(folder, num_images=60, num_labels=60):
    folder.mkdir()
    images = torch.randint(0, 256, (num_images, 28, 28), dtype=torch.uint8)
    write_idx(folder / "t10k-images-idx3-ubyte", images)
    write_idx(folder / "t10k-labels-idx1-ubyte", torch.arange(num_labels).to(torch.uint8) % 10)


@pytest.mark.parametrize("damage", ["missing", "truncated", "magic", "length", "gzip"])
def test_bad_idx_files(here, tmp_path, damage):
    folder = tmp_path / "données"
    images_and_labels(folder, num_labels=59 if damage == "length" else 60)
    images = folder / "t10k-images-idx3-ubyte"
    data = images.read_bytes()
    if damage == "missing":
        images.unlink()
    elif damage == "truncated":
        images.write_bytes(data[:-100])
    elif damage == "magic":
        images.write_bytes(b"\x01" + data[1:])
    elif damage == "gzip":
        images.unlink()
        Path(f"{images}.gz").write_bytes(gzip.compress(data)[:-200])
    done = here("train", "digits", f"data_dir={folder}")
    refused(done, str(folder))
    runs = list(tmp_path.glob("runs/*/checkpoints/*"))
    assert not runs


def test_learns_from_idx_files(here, tmp_path):
    images_and_labels(tmp_path / "mnist")
    done = here("train", "digits", "data_dir=mnist", "steps=3", "--run-dir", "r")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_nan_loss_names_step_microbatch_and_rank(lockstep, tmp_path, num_ranks):
    done = lockstep(
        "train", target(), "evil=nan", "checkpoint.every=1", "-n", num_ranks, "--run-dir", "r",
        "data.shuffle=false",
    )  # fmt: skip
    # Sample 150 is in step 3 (samples 144 to 191), microbatch 0 (144 to 151).
    refused(done, "step 3", "nan in microbatch 0 (rank 0)")
    failed = result(tmp_path / "r")
    assert failed["status"] == "failed"
    steps = sorted(p.name for p in (tmp_path / "r" / "checkpoints").glob("step_*"))
    assert steps[-1] == "step_00000003"


def test_models_that_differ_at_the_start(lockstep):
    done = lockstep("train", target(), "evil=start", "-n", "3", *SMALL)
    refused(done, "build_model: 0.weight on rank 1 differs")


def test_loss_of_wrong_shape(lockstep):
    done = lockstep("train", target(), "evil=shape", "-n", "2", *SMALL)
    refused(done, "Loss.sum must be a scalar tensor", "shape (8,)")


def test_state_that_microbatches_change(lockstep):
    done = lockstep("train", target(), "evil=counter", "-n", "2", *SMALL)
    refused(done, "task.count: is changed by every microbatch", "Task.after_step")


def test_an_exception_on_one_rank_ends_all(lockstep):
    done = lockstep("train", target(), "evil=raise", "-n", "2", *SMALL, timeout=60)
    refused(done, "rank 1 raised", "the dog ate it", "tasks.py", code=1)


def test_silent_corruption_is_caught(lockstep, tmp_path):
    done = lockstep(
        "train", target(), "evil=corrupt", "digest_every=1", "-n", "3", "--run-dir", "r", *SMALL
    )
    refused(done, "step 1", "0.weight on rank 1 differs")


def test_an_empty_dataset(here):
    refused(here("train", target("NoTrainingData"), *SMALL), "dataset('train')", "empty")


def test_a_run_directory_of_another_config(lockstep):
    assert lockstep("train", target(), "--run-dir", "r", *SMALL).returncode == 0
    for extra in ((), ("-n", "2")):
        done = lockstep("train", target(), "--run-dir", "r", "lr=0.5", "steps=6", *extra)
        refused(done, "r: holds a run with another config", "lr is 0.01 there, 0.5 here")


def test_an_unwritable_run_directory(lockstep, tmp_path):
    (tmp_path / "file").write_text("")
    for extra in ((), ("-n", "2")):
        done = lockstep("train", target(), "--run-dir", "file/run", *SMALL, *extra)
        refused(done, "file/run", "not writable")


def test_a_half_set_environment(lockstep):
    refused(lockstep("train", target(), *SMALL, RANK="1"), "WORLD_SIZE")


def test_spares_are_named(lockstep, tmp_path):
    done = lockstep("train", target(), "num_microbatches=1", "-n", "2", "--run-dir", "r", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "spare" in done.stdout
    joined = [json.loads(x) for x in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    rows = [r for r in joined if r["event"] == "Joined"]
    assert [(r["slot"], r["rank"], r["microbatches"]) for r in rows] == [
        (0, 0, [0, 1]),
        (1, 1, [1, 1]),
    ]
    assert all(r["host"] and r["pid"] for r in rows)


def test_an_unknown_master_address(lockstep):
    done = lockstep(
        "train", "digits", RANK="0", WORLD_SIZE="2", MASTER_ADDR="no-such-host.invalid",
        MASTER_PORT="29511",
    )  # fmt: skip
    assert done.returncode == 2
    assert "MASTER_ADDR=no-such-host.invalid" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_no_start_waits_longer_than_it_may(lockstep):
    """Neither the launcher, nor a rank that was started by hand."""
    ended = lockstep("train", "digits", "-n", "2", "--launcher", "local", "start_timeout_s=0.01")
    assert "did not all start within 0.01 s" in ended.stderr
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    alone = lockstep(
        "train", "digits", "start_timeout_s=0.5",
        RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    )  # fmt: skip
    assert f"MASTER_PORT={port}: rank 0 has not come" in alone.stderr
    for done in (ended, alone):
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("before", "now"), [(2, 0), (0, 1)])
def test_who_is_rank_0_now_tells_of_errors(monkeypatch, capsys, before, now):
    """Not who was at first: that one may have died."""

    def fail(*arguments):
        error = DataError("x.csv: is gone")
        error.rank = now
        raise error

    for name, value in {"RANK": before, "WORLD_SIZE": 3, "TORCHELASTIC_RUN_ID": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(training.rank, "run", fail)
    with pytest.raises(SystemExit) as ended:
        training.main(Digits())
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("error: x.csv: is gone\n" if now == 0 else "")
