"""A model in stages on several ranks: the bits of one process, through kills, failures, resumes."""

from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import CONFIG, check_joiners, same

from lockstep.engine.faults import PlannedFault

TASK = f"{Path(__file__).parents[1] / 'nn' / 'models.py'}:Deep"


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "pp", "tp", "interleave"),
    [
        pytest.param("mpi", 3, 3, 1, 1, marks=pytest.mark.slow),
        pytest.param("local", 5, 2, 2, 1, marks=pytest.mark.slow),  # and a spare
        pytest.param("mpi", 2, 2, 1, 3, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, 2, 1, 1, marks=pytest.mark.slow),
        pytest.param("local", 7, 7, 1, 1, marks=pytest.mark.slow),  # the last trains no parameter
        pytest.param("mpi", 8, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param("mpi", 6, 3, 2, 1, marks=pytest.mark.slow),
        pytest.param("local", 5, 2, 2, 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 4, 2, 1, 2, marks=pytest.mark.slow),
        pytest.param("local", 3, 3, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, reference, tmp_path, launcher, num_ranks, pp, tp, interleave
):
    keys = (f"mesh.pp={pp}", f"mesh.tp={tp}", f"mesh.interleave={interleave}")
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [("mesh.pp=2", "mesh.interleave=4"), ("mesh.pp=4",)])
def test_stages_share_a_weight_and_a_loss_changes_its_batch(train_on, tmp_path, keys):
    target = TASK.replace(":Deep", ":Moving")
    keys = ("num_shards=1", "num_microbatches=7", *keys)
    for name, num_ranks, more in (("one", 1, keys[:2]), ("all", 4, keys)):
        ended = train_on(tmp_path / name, num_ranks, *more, target=target)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "all", result(tmp_path / "one"))


@pytest.mark.slow
def test_a_checkpoint_of_any_mesh_loads_on_any_other(train_on, lockstep, reference, tmp_path):
    run_dir = tmp_path / "run"
    assert train_on(run_dir, 4, "mesh.pp=4", "stop_at_step=3").returncode == 0
    keys = ("mesh.pp=1", "mesh.tp=2", "stop_at_step=6")
    assert lockstep("resume", run_dir, "-n", 2, *keys).returncode == 0
    keys = ("mesh.pp=2", "mesh.tp=1", "stop_at_step=null")
    assert lockstep("resume", run_dir, "-n", 2, "--launcher", "mpi", *keys).returncode == 0
    same(run_dir, reference)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks_than_a_replica_had(train_on, lockstep, reference, tmp_path):
    run_dir, keys = tmp_path / "run", ("mesh.pp=2", "mesh.tp=2")
    assert train_on(run_dir, 4, *keys, "stop_at_step=3").returncode == 0
    refused = lockstep("resume", run_dir, "-n", 3)
    assert refused.returncode == 2
    assert "a replica needs 4 ranks, and world size is 3" in refused.stderr
    ended = lockstep("resume", run_dir, "-n", 3, "stop_at_step=6", "mesh.shrink=replan")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 were started: computed with mesh.pp=1, mesh.tp=2" in ended.stdout
    # The mesh that was asked for comes back with its ranks.
    again = lockstep("resume", run_dir, "-n", 4, "--launcher", "mpi", "stop_at_step=null")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "were started" not in again.stdout
    same(run_dir, reference)


@pytest.mark.slow
def test_fewer_ranks_than_a_replica_needs_from_the_start(train_on, reference, tmp_path):
    keys = ("mesh.pp=3", "mesh.tp=2", "mesh.shrink=replan")
    ended = train_on(tmp_path / "run", 2, *keys)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 were started: computed with mesh.pp=1, mesh.tp=2" in ended.stdout
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_a_joiner_knows_a_mesh_that_has_shrunk(train_on, reference, tmp_path, launcher):
    """Five ranks are 2 x 2 and a spare, which takes the place of the dead one."""
    keys = ("mesh.pp=3", "mesh.tp=2", "mesh.shrink=replan", "--replace", 1)
    planned = [PlannedFault(0, 2)]
    ended = train_on(tmp_path / "run", 5, *keys, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_verify_with_all_that_makes_bits_differ(lockstep, launcher):
    """Sketched layers, dropout, a tied embedding, bf16, AdamW, clipping; meshes with 3 of each."""
    keys = ("precision.dtype=bf16", "optimizer.weight_decay=0.1", "steps=4")
    meshes = "1x1x1,3x1x1,1x3x1,1x1x3,2x2x2,1x2x3,1x3x2,3x1x2+optimizer"
    done = lockstep(
        "verify", TASK.replace(":Deep", ":Sketched"), *CONFIG, *keys, "--launchers", launcher,
        "--meshes", meshes, "--resumes", 3, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 11 runs, one SHA-256" in done.stdout


@pytest.mark.parametrize(
    ("launcher", "faults"),
    [
        ("mpi", [(1, 2, "send")]),
        pytest.param("mpi", [(1, 2, "send"), (2, 5, "committed")], marks=pytest.mark.slow),
        pytest.param("local", [(2, 3, "receive")], marks=pytest.mark.slow),
        pytest.param("local", [(1, 1, "evaluate"), (2, 6, "reduced")], marks=pytest.mark.slow),
        pytest.param("mpi", [(3, 3, "checkpoint"), (0, 5, "backward")], marks=pytest.mark.slow),
    ],
)
def test_survivors_go_on_where_each_block_has_a_holder(
    train_on, reference, tmp_path, launcher, faults
):
    planned = [PlannedFault(*fault) for fault in faults]
    ended = train_on(tmp_path / "run", 4, "mesh.pp=2", launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_joiners_take_the_places_of_the_dead(train_on, lockstep, tmp_path, launcher):
    check_joiners(train_on, lockstep, TASK, tmp_path, launcher, "mesh.pp=2")


@pytest.mark.slow
def test_without_a_holder_the_ranks_are_started_again(train_on, reference, tmp_path):
    planned = [PlannedFault(1, 6), PlannedFault(3, 6)]
    ended = train_on(tmp_path / "run", 4, "mesh.pp=2", faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all ranks that held blocks" in ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_an_exception_in_one_stage_is_one_on_all(train_on, reference, tmp_path, launcher):
    planned = [PlannedFault(1, 3, "send", "raise")]
    ended = train_on(tmp_path / "run", 3, "mesh.pp=3", launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 3 is done again: rank 1 raised an exception" in ended.stdout
    same(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("task", "keys", "words"),
    [
        (
            "Few",
            ("mesh.pp=2", "num_shards=1"),
            "the Pipeline can be cut into 1; set mesh.pp",
        ),
        pytest.param(
            "Deep",
            ("mesh.pp=3",),
            "mesh.pp=3: a replica needs 3 ranks, and world size is 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Language",
            ("mesh.pp=2",),
            "mesh.pp=2: the model is a Transformer, which is one block",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Deep",
            ("mesh.pp=2", "mesh.interleave=4"),
            "set mesh.pp x mesh.interleave to at most 7",
            marks=pytest.mark.slow,
        ),
        (
            "Deep",
            ("mesh.pp=2", "mesh.interleave=2", "sharding=gradients"),
            "mesh.interleave=2: sharding=gradients sums gradients after each microbatch",
        ),
        pytest.param(
            "Twice",
            ("mesh.pp=2",),
            "Task.loss or Task.evaluate calls the model twice",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Cached",
            ("mesh.pp=2",),
            "model.1.cached: keeps a view of a parameter",
            marks=pytest.mark.slow,
        ),
        pytest.param("Around", ("mesh.pp=2",), "did not call the model", marks=pytest.mark.slow),
        ("Shared", ("num_shards=1",), "0 and 2.0 are one module in two blocks"),
        pytest.param(
            "Ends",
            ("mesh.pp=2",),
            "after_step would see what one rank holds",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_put_in_stages(train_on, tmp_path, task, keys, words):
    target = TASK.replace(":Deep", f":{task}")
    ended = train_on(tmp_path / "run", 2, *keys, target=target)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


HOOKED = """import torch, lockstep as ls
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))


class Hooked(ls.Task):
    def build_model(self):
        return ls.nn.shard(ls.nn.Pipeline(Block(), Block()), {"*.up": "column", "*.down": "row"})

    def dataset(self, split):
        x = torch.linspace(-1, 1, 128).view(32, 4)
        return torch.utils.data.TensorDataset(x) if split != "test" else None

    def loss(self, model, batch):
        return ls.Loss(model(batch[0]).square().sum(), len(batch[0]))

    def hooks(self):
        return [Looks()]


class Looks(ls.Hook):
    first_only = True

    def after_evaluation(self, run, split, metrics):
        print("it is", run.model[0](torch.ones(1, 4)).shape, flush=True)
        {reads}
"""


@pytest.mark.slow
def test_a_hook_may_call_a_block_whose_shards_are_all_here(train_on, tmp_path):
    script = tmp_path / "hooked.py"
    script.write_text(HOOKED.replace("{reads}", 'run.model.state_dict()["0.up.weight"].sum()'))
    keys = ("mesh.pp=2", "num_shards=2", "steps=1")
    ended = train_on(tmp_path / "run", 2, *keys, target=f"{script}:Hooked")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "it is torch.Size([1, 4])" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_shards", "reads"),
    [
        (2, 'run.model.state_dict()["1.up.weight"].sum()'),
        (1, 'run.model.state_dict()["1.up.weight"].sum()'),
        (1, 'run.model[1].state_dict()["down.bias"].sum()'),
    ],
)
def test_a_hook_does_not_get_the_parameters_of_another_stage(train_on, tmp_path, num_shards, reads):
    script = tmp_path / "hooked.py"
    script.write_text(HOOKED.replace("{reads}", reads))
    keys = ("mesh.pp=2", f"num_shards={num_shards}", "steps=1")
    ended = train_on(tmp_path / "run", 2, *keys, target=f"{script}:Hooked")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert " lies on other ranks, or some of its shards or slices do" in ended.stderr
