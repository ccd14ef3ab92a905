"""Models that are no Pipeline in stages and slices: the bits of one process, through kills."""

from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import CONFIG, check_joiners, same

from lockstep.engine.faults import PlannedFault

NN = Path(__file__).parents[1] / "nn"
TASK = f"{NN / 'models.py'}:Marked"
PARAMETERS = "sharding=parameters"


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys"),
    [
        # Blocks are gathered ahead.
        pytest.param(
            "local", 4, ("mesh.pp=2", PARAMETERS, "exchange=messages"), marks=pytest.mark.slow
        ),
        pytest.param("mpi", 4, ("mesh.pp=2", PARAMETERS), marks=pytest.mark.slow),
        pytest.param("mpi", 4, ("mesh.pp=2", "mesh.tp=2"), marks=pytest.mark.slow),
        pytest.param("mpi", 3, ("mesh.pp=3",), marks=pytest.mark.slow),
        pytest.param("local", 5, ("mesh.pp=2", "mesh.tp=2"), marks=pytest.mark.slow),
        pytest.param("torchrun", 3, (PARAMETERS,), marks=pytest.mark.slow),
        pytest.param("local", 3, ("sharding=gradients",), marks=pytest.mark.slow),
        pytest.param("local", 8, ("mesh.pp=2", "mesh.tp=2", PARAMETERS), marks=pytest.mark.slow),
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, reference, tmp_path, launcher, num_ranks, keys
):
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


MESHES = "1x1x1,2x1x1,1x2x1,1x1x2,2x1x2+parameters,4x1x1+parameters,2x2x1+parameters"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "keys", "meshes"),
    [
        *((task, ("num_shards=4",), MESHES) for task in ("Llama", "GPT2", "Bert", "ViT")),
        ("InUnits", (), "1x1x1,3x1x1+optimizer,2x1x1+gradients,4x1x1+parameters"),
    ],
)
def test_models_of_transformers_have_one_sha_256(lockstep, task, keys, meshes):
    done = lockstep(
        "verify", f"{NN / 'hf_models.py'}:{task}", *CONFIG[1:], *keys, "steps=4", "--launchers",
        "local", "--meshes", meshes, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one SHA-256" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys", "faults"),
    [
        ("local", 3, (PARAMETERS,), [(1, 2, "unshard")]),
        ("mpi", 3, (PARAMETERS,), [(2, 3, "leave"), (0, 5, "optimizer")]),
        ("local", 6, ("mesh.pp=2", PARAMETERS), [(3, 2, "backward"), (1, 4, "committed")]),
        ("mpi", 4, ("mesh.pp=2",), [(1, 2, "send"), (2, 5, "receive")]),
        ("local", 4, ("mesh.pp=2",), [(2, 3, "evaluate"), (0, 6, "forward")]),
    ],
)
def test_the_survivors_of_kills_go_on_to_the_same_bits(
    train_on, reference, tmp_path, launcher, num_ranks, keys, faults
):
    planned = [PlannedFault(*fault) for fault in faults]
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)


@pytest.mark.slow
def test_joiners_get_their_blocks(train_on, lockstep, tmp_path):
    check_joiners(train_on, lockstep, TASK, tmp_path, "local", "mesh.pp=2", PARAMETERS)


@pytest.mark.slow
def test_a_checkpoint_of_any_mesh_loads_on_any_other(train_on, lockstep, reference, tmp_path):
    run_dir = tmp_path / "run"
    assert train_on(run_dir, 3, PARAMETERS, "stop_at_step=3").returncode == 0
    keys = ("sharding=none", "mesh.pp=2", "stop_at_step=6")
    assert lockstep("resume", run_dir, "-n", 2, *keys).returncode == 0
    keys = (PARAMETERS, "mesh.pp=1", "stop_at_step=null")
    assert lockstep("resume", run_dir, "-n", 2, "--launcher", "mpi", *keys).returncode == 0
    same(run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [("mesh.pp=2",), (PARAMETERS,), ("mesh.pp=2", PARAMETERS)])
def test_blocks_whose_activations_are_computed_again(train_on, tmp_path, keys):
    """By the model's own code, around the call of each block, with dropout."""
    target = TASK.replace(":Marked", ":Recomputed")
    for name, num_ranks, more in (("one", 1, ()), ("all", 4, keys)):
        ended = train_on(tmp_path / name, num_ranks, *more, target=target)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "all", result(tmp_path / "one"))
