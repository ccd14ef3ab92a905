"""Gradients and parameters in slices: the bits of one process that has all of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import result, slow
from tests.distributed.conftest import CONFIG, check_joiners, files, same

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

MODELS = Path(__file__).parents[1] / "nn" / "models.py"
TASK = f"{MODELS}:Deep"
PARAMETERS, GRADIENTS = "sharding=parameters", "sharding=gradients"
MESSAGES = "exchange=messages"
"""On one host small blocks go through shared memory, and are not gathered ahead."""


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys"),
    [
        # Two rounds of three, and one of two.
        pytest.param("local", 3, (PARAMETERS,), marks=pytest.mark.slow),
        pytest.param("local", 1, (PARAMETERS,), marks=pytest.mark.slow),
        pytest.param("mpi", 3, (GRADIENTS,), marks=pytest.mark.slow),
        pytest.param("torchrun", 2, (PARAMETERS,), marks=pytest.mark.slow),
        pytest.param("local", 10, (PARAMETERS,), marks=pytest.mark.slow),  # two have no microbatch
        # A spare: it owns a slice, and passes as its stage does.
        pytest.param("local", 7, (PARAMETERS, "mesh.pp=3"), marks=pytest.mark.slow),
        pytest.param("mpi", 5, (GRADIENTS, "mesh.pp=2"), marks=pytest.mark.slow),
        pytest.param("mpi", 8, (PARAMETERS, "mesh.pp=2", "mesh.tp=2"), marks=pytest.mark.slow),
        pytest.param("local", 4, (PARAMETERS, "bucket_bytes=1"), marks=pytest.mark.slow),
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, reference, reference_dir, tmp_path, launcher, num_ranks, keys
):
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    assert files(tmp_path / "run") == files(reference_dir)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PARAMETERS, GRADIENTS])
def test_a_model_that_is_no_pipeline_has_its_gradients_in_slices(
    train_on, lockstep, tmp_path, kind
):
    target = TASK.replace(":Deep", ":Language")
    ended = train_on(tmp_path / "run", 3, kind, target=target)
    if kind == PARAMETERS:
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "clip_norm=1.0 needs a norm that is added up by the same units" in ended.stderr
        return
    alone = lockstep("train", target, *CONFIG, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", result(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys", "faults"),
    [
        pytest.param("local", 3, (PARAMETERS,), [(1, 2, "unshard")], marks=pytest.mark.slow),
        pytest.param(
            "local", 3, (PARAMETERS,), [(0, 3, "leave"), (2, 5, "evaluate")], marks=pytest.mark.slow
        ),
        ("local", 3, (PARAMETERS, MESSAGES), [(1, 2, "ahead")]),
        pytest.param(
            "local", 4, (PARAMETERS, MESSAGES), [(1, 2, "ahead"), (3, 5, "ahead")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mpi", 4, (PARAMETERS, MESSAGES), [(1, 2, "ahead"), (0, 5, "ahead")],
            marks=pytest.mark.slow,
        ),
        pytest.param("mpi", 3, (PARAMETERS,), [(1, 2, "unshard")], marks=pytest.mark.slow),
        pytest.param(
            "mpi", 3, (PARAMETERS,), [(2, 3, "leave"), (0, 5, "optimizer")], marks=pytest.mark.slow
        ),
        pytest.param(
            "mpi", 3, (GRADIENTS,), [(1, 2, "leave"), (0, 5, "gather")], marks=pytest.mark.slow
        ),
        pytest.param(
            "local", 6, (PARAMETERS, "mesh.pp=2"), [(3, 2, "backward"), (1, 4, "committed")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mpi", 4, (PARAMETERS, "mesh.tp=2"), [(1, 3, "optimizer")], marks=pytest.mark.slow
        ),
        pytest.param("local", 4, (PARAMETERS,), [(0, 4, "checkpoint")], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_slice_survives_on_the_next_rank(
    train_on, reference, tmp_path, launcher, num_ranks, keys, faults
):
    planned = [PlannedFault(*fault) for fault in faults]
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, num_ranks, *keys, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)
    rows = read_events(run_dir / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == len(faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "moment", "keys"),
    [
        ("local", "compute", ()),
        ("mpi", "forward", ()),
        ("local", "ahead", (MESSAGES,)),
        ("mpi", "ahead", (MESSAGES,)),
    ],
)
def test_a_step_that_raised_on_one_rank_is_done_again(
    train_on, reference, tmp_path, launcher, moment, keys
):
    planned = [PlannedFault(1, 3, moment, "raise")]
    ended = train_on(tmp_path / "run", 3, PARAMETERS, *keys, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 3 is done again" in ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
def test_joiners_get_slices(train_on, lockstep, tmp_path):
    check_joiners(train_on, lockstep, TASK, tmp_path, "local", PARAMETERS)


@pytest.mark.slow
def test_a_run_goes_on_with_other_things_in_slices(train_on, lockstep, reference, tmp_path):
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, 3, PARAMETERS, "stop_at_step=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for number, stop, keys in ((1, 4, ("sharding=none",)), (4, 6, (GRADIENTS, "mesh.pp=2"))):
        more = ("-n", number, "--launcher", "local", *keys, f"stop_at_step={stop}")
        ended = lockstep("resume", run_dir, *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    last = ("-n", 2, "--launcher", "mpi", PARAMETERS, "mesh.pp=1", "stop_at_step=null")
    ended = lockstep("resume", run_dir, *last)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)


@pytest.mark.slow
def test_a_loss_may_read_parameters_whose_gradients_only_are_in_slices(
    train_on, lockstep, tmp_path
):
    target = TASK.replace(":Deep", ":Penalised")
    alone = lockstep("train", target, *CONFIG, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    ended = train_on(tmp_path / "run", 2, GRADIENTS, target=target)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", result(tmp_path / "alone"))


@pytest.mark.slow
def test_hooks_run_beside_parameters_in_slices(train_on, reference, tmp_path):
    ended = train_on(tmp_path / "run", 1, PARAMETERS, target=TASK.replace(":Deep", ":Hooked"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("task", "key", "words"),
    [
        slow("Twice", PARAMETERS, "Task.loss or Task.evaluate calls the model twice"),
        ("Around", PARAMETERS, "did not call the model it was given, which is in slices"),
        pytest.param(
            "Early",
            GRADIENTS,
            "1.gain: got a gradient after the backward pass of its block",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Penalised",
            PARAMETERS,
            "Task.loss: loss differs when the parameters",
            marks=pytest.mark.slow,
        ),
        ("Measured", PARAMETERS, "Task.loss: norm differs when the parameters"),
        pytest.param(
            "Cached",
            PARAMETERS,
            "model.1.cached: keeps a view of a parameter",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Graded",
            PARAMETERS,
            "differs when the parameters of each block",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Exposed",
            PARAMETERS,
            "was given to numpy, which keeps its memory",
            marks=pytest.mark.slow,
        ),
        ("Ends", PARAMETERS, "after_step would see what one rank holds"),
    ],
)
def test_what_cannot_be_in_slices(train_on, tmp_path, task, key, words):
    keys = (key, "num_shards=1")
    ended = train_on(tmp_path / "run", 1, *keys, target=TASK.replace(":Deep", f":{task}"))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_an_error_in_an_evaluation_ends_all_ranks(train_on, tmp_path, launcher):
    """Of three ranks two have a batch, and the third would wait for their blocks."""
    target = TASK.replace(":Deep", ":Unmeasured")
    ended = train_on(tmp_path / "run", 3, PARAMETERS, target=target, launcher=launcher)
    assert ended.returncode != 0
    assert "Task.evaluate: did not call the model it was given" in ended.stderr


@pytest.mark.slow
def test_all_ranks_go_on_when_the_disk_is_full_in_the_middle_of_a_checkpoint(train_on, tmp_path):
    target = TASK.replace(":Deep", ":Limited")
    ended = train_on(
        tmp_path / "run", 3, PARAMETERS, "checkpoint.file_bytes=1_000_000", target=target
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "the checkpoint of step 4 could not be written" in ended.stdout
    assert "the last checkpoint could not be written" in ended.stderr
    assert "step 8: train" in ended.stdout
    assert not list((tmp_path / "run" / "checkpoints").glob("*step_*"))


BIG = """
import resource, torch, lockstep as ls
from torch import nn
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)
    def forward(self, x):
        return x + self.linear(x).relu()
class Big(ls.Task):
    def build_model(self):
        return ls.nn.Pipeline(*[Block() for _ in range({blocks})])
    def dataset(self, split):
        if split == "train":
            return torch.utils.data.TensorDataset(torch.ones(16, 1024))
    def loss(self, model, batch):
        return ls.Loss((model(batch[0]) - batch[0]).square().sum(), len(batch[0]))
"""


@pytest.mark.slow
def test_a_model_three_times_larger_than_a_rank_can_train(tmp_path):
    """With parameters in slices, under a limit of memory that one rank alone is refused for."""

    def train(blocks, num_ranks, *keys):
        task = tmp_path / "big.py"
        task.write_text(BIG.format(limit=2_000_000 * 1024, blocks=blocks))
        argv = [
            sys.executable, "-m", "lockstep", "train", f"{task}:Big", "-n", str(num_ranks),
            "--launcher", "local", "batch_size=16", "num_microbatches=8", "steps=2",
            "--run-dir", str(tmp_path / f"{blocks}-{num_ranks}"), *keys,
        ]  # fmt: skip
        return subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    small = train(22, 1)
    assert small.returncode == 0, small.stdout + small.stderr
    alone = train(66, 1)
    assert alone.returncode == 2, alone.stdout + alone.stderr
    assert "memory: a rank needs at least" in alone.stderr
    assert "sharding=parameters optimizer.buddy=false needs" in alone.stderr
    together = train(66, 4, PARAMETERS, "optimizer.buddy=false")
    assert together.returncode == 0, together.stdout + together.stderr
