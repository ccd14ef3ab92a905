"""First values by name: the bits of one process on any mesh, and nowhere the whole model."""

import json
import sys
from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import CONFIG as USUAL
from tests.distributed.conftest import check_joiners, same

import lockstep as ls
from lockstep.engine.digests import model_digest
from lockstep.engine.faults import PlannedFault

NN = Path(__file__).parents[1] / "nn"
TASK = f"{NN / 'models.py'}:Deep"
BY_NAME = "init=by_name"
CONFIG = ("num_shards=1", *USUAL[1:], BY_NAME)
PARAMETERS = "sharding=parameters"


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys"),
    [
        pytest.param("local", 4, ("mesh.pp=2", PARAMETERS), marks=pytest.mark.slow),
        ("local", 2, ("mesh.pp=2",)),
        pytest.param("local", 3, ("mesh.pp=3", "sharding=optimizer"), marks=pytest.mark.slow),
        pytest.param("local", 2, ("mesh.pp=2", "mesh.interleave=3"), marks=pytest.mark.slow),
        pytest.param("mpi", 2, (PARAMETERS,), marks=pytest.mark.slow),
        pytest.param("torchrun", 4, (PARAMETERS,), marks=pytest.mark.slow),
        pytest.param("local", 3, ("sharding=gradients",), marks=pytest.mark.slow),
    ],
)
def test_any_mesh_gives_the_bits_of_one_process(
    train_on, reference, tmp_path, launcher, num_ranks, keys
):
    ended = train_on(tmp_path / "run", num_ranks, *keys, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", reference)
    loaded = ls.load(tmp_path / "run", "latest")
    assert model_digest(loaded.model) == reference["params_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys", "faults"),
    [
        ("local", 3, (PARAMETERS,), [(1, 2, "unshard")]),
        ("mpi", 4, ("mesh.pp=2",), [(1, 2, "send"), (2, 5, "receive")]),
        ("local", 6, ("mesh.pp=2", PARAMETERS), [(3, 2, "backward"), (1, 4, "committed")]),
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
@pytest.mark.parametrize("keys", [(PARAMETERS,), ("mesh.pp=2", PARAMETERS), ("mesh.pp=2",)])
def test_joiners_get_their_blocks(train_on, lockstep, tmp_path, keys):
    both = (BY_NAME, "num_shards=1", "steps=140")
    check_joiners(train_on, lockstep, TASK, tmp_path, "local", *keys, both=both)


@pytest.mark.slow
def test_runs_go_on_from_their_checkpoints_and_others_from_their_weights(
    train_on, lockstep, reference, tmp_path
):
    folder = tmp_path / "run"
    ended = train_on(folder, 2, PARAMETERS, "stop_at_step=4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    resumed = lockstep("resume", folder, "-n", 3, "--launcher", "local", "mesh.pp=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    same(folder, reference)
    digests = set()
    for name, ranks, keys in (("one", 1, ()), ("two", 2, (PARAMETERS,))):
        other = lockstep(
            "train", TASK, "-n", ranks, "--launcher", "local", "--from", folder, "--run-dir",
            tmp_path / name, *CONFIG, "steps=2", *keys, timeout=150,
        )  # fmt: skip
        assert other.returncode == 0, other.stdout + other.stderr
        digests.add(result(tmp_path / name)["params_sha256"])
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["InTurn", "Recomputed", "Sketched"])
def test_phases_and_layers_that_are_computed_again(lockstep, task):
    done = lockstep(
        "verify", f"{NN / 'models.py'}:{task}", *CONFIG, "steps=4", "--launchers", "local",
        "--meshes", "1x1x1,1x2x1,3x1x1+parameters", timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


MESHES = "1x1x1,1x2x1,2x1x1+parameters,4x1x1+parameters,2x2x1+parameters"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "keys", "meshes"),
    [
        *((task, (), MESHES) for task in ("Llama", "GPT2", "Bert", "ViT")),
        ("ViT", ("num_shards=4",), "1x1x1,1x1x2,1x2x2,2x1x2+parameters"),
        ("InUnits", (), "1x1x1,3x1x1+optimizer,2x1x1+gradients,4x1x1+parameters"),
    ],
)
def test_models_of_transformers_have_one_sha_256(lockstep, task, keys, meshes):
    done = lockstep(
        "verify", f"{NN / 'hf_models.py'}:{task}", *CONFIG, *keys, "steps=4", "--launchers",
        "local", "--meshes", meshes, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one SHA-256" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.parametrize("keys", [(PARAMETERS,), ("mesh.pp=4", "num_microbatches=4")])
def test_a_start_takes_no_more_than_what_a_rank_keeps(lockstep, tmp_path, keys):
    """Of 100.7 million parameters, 4 ranks keep a quarter each, with gradients and Adam's state."""
    task = f"{Path(__file__).parent / 'large_model.py'}:Large"
    done = lockstep(
        "train", task, "-n", 4, "--launcher", "local", "--run-dir", tmp_path / "run", BY_NAME,
        "batch_size=4", "num_microbatches=2", "steps=1", "optimizer.name=adam",
        "optimizer.buddy=false", *keys, timeout=500, PEAKS=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [json.loads(path.read_text()) for path in tmp_path.glob("start.*.json")]
    assert len(starts) == 4
    whole = starts[0]["whole"]
    assert whole > 4 * 100_000_000
    print(f"peak of a start / what a rank keeps: {max(s['peak'] for s in starts) / whole:.2f}")
    for start in starts:
        # Of a quarter of all parameters: these, their gradient, and two states of Adam.
        assert start["peak"] <= 1.3 * (1 + 1 + 2) * whole / 4, start
        assert start["built"] < 0.1 * whole, start


def test_values_that_only_some_ranks_have_are_not_read_by_build_optimizer(here, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(NN)!r})\n"
        "from models import Deep\n"
        "class Mine(Deep):\n"
        "    def build_optimizer(self, model):\n"
        "        large = [p for p in model.parameters() if p.detach().abs().mean() > 0.25]\n"
        "        return torch.optim.SGD(large or model.parameters(), lr=0.1)\n"
    )
    done = here("train", "mine.py:Mine", *CONFIG, PARAMETERS)
    assert done.returncode == 2
    assert "build_optimizer: reads " in done.stderr
    assert "choose by names and shapes, or set init=in_order" in done.stderr
