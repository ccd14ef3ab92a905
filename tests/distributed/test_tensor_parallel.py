"""A model in shards on several ranks: the bits of one process, through kills, failures, resumes."""

from pathlib import Path

import pytest
from tests.conftest import slow
from tests.distributed.conftest import check_joiners, files, same

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

TASK = f"{Path(__file__).parents[1] / 'nn' / 'models.py'}:Language"


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "tp"),
    [
        pytest.param("mpi", 3, 3, marks=pytest.mark.slow),
        ("local", 3, 2),
        pytest.param("local", 5, 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 4, 2, marks=pytest.mark.slow),
        pytest.param("mpi", 8, 4, marks=pytest.mark.slow),
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, reference, reference_dir, tmp_path, launcher, num_ranks, tp
):
    ended = train_on(tmp_path / "run", num_ranks, f"mesh.tp={tp}", launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    assert files(tmp_path / "run") == files(reference_dir)
    assert ("1 fill none and are spares" in ended.stdout) == (num_ranks % tp == 1)


@pytest.mark.slow
def test_a_checkpoint_of_any_mesh_loads_on_any_other(train_on, lockstep, reference, tmp_path):
    run_dir = tmp_path / "run"
    assert train_on(run_dir, 4, "mesh.tp=2", "stop_at_step=3").returncode == 0
    more = ("resume", run_dir, "--launcher", "local")
    ended = lockstep(*more, "-n", 3, "mesh.tp=3", "stop_at_step=6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert lockstep(*more, "-n", 1, "mesh.tp=1").returncode == 0
    same(run_dir, reference)


@pytest.mark.parametrize(
    ("launcher", "faults", "lost"),
    [
        pytest.param(
            "mpi", [(2, 2, "shards_forward"), (0, 5, "committed")], 2, marks=pytest.mark.slow
        ),
        pytest.param(
            "local", [(1, 3, "shards_backward"), (4, 5, "reduced")], 2, marks=pytest.mark.slow
        ),
        pytest.param("local", [(3, 2, "optimizer"), (1, 2, "catch_up")], 2, marks=pytest.mark.slow),
        pytest.param("mpi", [(1, 4, "checkpoint"), (5, 6, "evaluate")], 1, marks=pytest.mark.slow),
    ],
)
def test_survivors_go_on_where_each_shard_has_a_holder(
    train_on, reference, tmp_path, launcher, faults, lost
):
    planned = [PlannedFault(*fault) for fault in faults]
    ended = train_on(tmp_path / "run", 6, "mesh.tp=2", launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == lost


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_joiners_take_the_places_of_the_dead(train_on, lockstep, tmp_path, launcher):
    check_joiners(train_on, lockstep, TASK, tmp_path, launcher, "mesh.tp=2")


@pytest.mark.slow
def test_without_a_holder_the_ranks_are_started_again(train_on, reference, tmp_path):
    planned = [PlannedFault(1, 6, "compute"), PlannedFault(3, 6, "compute")]
    ended = train_on(tmp_path / "run", 4, "mesh.tp=2", faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all ranks that held shards 2 to 3 of the model have died" in ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_an_exception_on_one_rank_is_one_on_all(train_on, reference, tmp_path, launcher):
    planned = [PlannedFault(1, 3, "shards_forward", "raise")]
    ended = train_on(tmp_path / "run", 4, "mesh.tp=2", launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 3 is done again: rank 1 raised an exception" in ended.stdout
    same(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("mesh.tp=8",), "mesh.tp=8 is more than num_shards=4"),
        (
            ("mesh.tp=3",),
            "needs 3 ranks, and world size is 2; start more ranks, or set mesh.pp x mesh.tp to",
        ),
        (("num_shards=3",), "num_shards=3: blocks.0.attention.q has 16 features"),
    ],
)
def test_impossible_meshes(train_on, tmp_path, overrides, words):
    ended = train_on(tmp_path / "run", 2, *overrides)
    assert ended.returncode == 2
    assert words in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr + ended.stdout


SCRIPT = """import torch, lockstep as ls
from torch import nn


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.down({})


class Wrong(ls.Task):
    def build_model(self):
        return ls.nn.shard(Net(), {{"up": "column", "down": "row"}})

    def dataset(self, split):
        x = torch.linspace(-1, 1, 128).view(32, 4)
        return torch.utils.data.TensorDataset(x) if split == "train" else None

    def loss(self, model, batch):
        return ls.Loss(model(batch[0]).square().sum(), len(batch[0]))
"""


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ("self.up(x).softmax(-1)", "the sum of the loss of the first microbatch is"),
        ("Identity.apply(self.up(x))", "the gradient of up.weight in the first microbatch has"),
    ],
)
def test_a_plan_that_changes_what_the_model_computes(lockstep, tmp_path, hidden, words):
    script = tmp_path / "wrong.py"
    script.write_text(SCRIPT.format(hidden))
    target = f"{script}:Wrong"
    ended = lockstep("train", target, "num_shards=2", "batch_size=8", "steps=2")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "is no function of torch" in ended.stderr
    assert lockstep("train", target, "batch_size=8", "steps=2", "--run-dir", "w").returncode == 0


HOOK = """
    def hooks(self):
        return [Looks()]


class Looks(ls.Hook):
    first_only = {first_only}

    def {moment}:
        print("it is", {expression}, flush=True)
"""
EVALUATED = "after_evaluation(self, run, split, metrics)"
CALLS = "run.model(torch.ones(1, 4)).shape"
READS = "run.model.state_dict()['up.weight'].sum()"


@pytest.mark.parametrize(
    ("first_only", "moment", "expression", "words"),
    [
        (True, EVALUATED, CALLS, "Looks.after_evaluation: calls the model, whose shards are on"),
        slow(
            False, "on_start(self, run)", CALLS, "Looks.on_start: calls the model, whose shards are"
        ),
        (True, EVALUATED, READS, "state_dict: up.weight lies on other ranks"),
        (False, EVALUATED, CALLS, None),
    ],
)
def test_hooks_that_call_or_read_a_model_on_several_ranks(
    lockstep, tmp_path, first_only, moment, expression, words
):
    script = tmp_path / "hooked.py"
    hook = HOOK.format(first_only=first_only, moment=moment, expression=expression)
    script.write_text(SCRIPT.format("self.up(x)").replace('== "train"', '!= "test"') + hook)
    ended = lockstep(
        "train", f"{script}:Wrong", "-n", 2, "--launcher", "local", "num_shards=2", "mesh.tp=2",
        "batch_size=8", "steps=1", timeout=60,
    )  # fmt: skip
    assert ended.returncode == (2 if words else 0), ended.stdout + ended.stderr
    assert (words or "") in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert ended.stdout.count("it is torch.Size([1, 2])") == (0 if words else 2)
