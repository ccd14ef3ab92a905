"""The recipe `sketched`: its networks, the same bits on any number of ranks, and conversion."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import result, run
from torch import nn

import lockstep as ls
from lockstep import config as config_module
from lockstep.errors import ConfigError
from lockstep.sketch import RandomFeatureAttention, SKLinear, replace_layers
from lockstep.systems.sketched.networks import ExactAttention
from lockstep.systems.sketched.task import Sketched, SketchedConfig

SMALL = ("hidden=[24,16]", "image_size=8", "num_microbatches=6", "batch_size=24", "epochs=1")
CASES = {
    "mlp": (*SMALL, "sketch_ratios=[0.3,0.5,0.5]", "dropout=0.2", "clip_norm=1.0"),
    "transformer": (
        *SMALL, "model=transformer", "layers=mixed", "width=16", "depth=1", "attention=random",
        "num_features=8", "tokens=patches", "patch_size=4", "sketch=fold", "num_terms=2",
    ),
}  # fmt: skip


def made(**keys):
    task = Sketched(config_module.build(SketchedConfig, keys, "test"))
    torch.manual_seed(0)
    return task, task.build_model()


def test_the_defaults_are_the_guides():
    task, model = made()
    layers = [m for m in model.modules() if isinstance(m, SKLinear)]
    sizes = [(m.in_features, m.out_features, m.rank) for m in layers]
    assert sizes == [(1024, 512, 512), (512, 256, 307), (256, 128, 179), (128, 10, 102)]
    assert [tuple(m.sketch_key.tolist()) for m in layers] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    config = task.config
    assert (config.batch_size, config.epochs, config.lr) == (32, 5, 1e-3)
    assert config.optimizer.name == "adam"


def test_layers_are_dense_sketched_or_mixed():
    kinds = {}
    for layers in ("dense", "sketched", "mixed"):
        _, model = made(layers=layers)
        kinds[layers] = [type(m) for m in model if hasattr(m, "in_features")]
    assert kinds["dense"] == [nn.Linear] * 4
    assert kinds["sketched"] == [SKLinear] * 4
    assert kinds["mixed"] == [*[SKLinear] * 3, nn.Linear]
    _, model = made(model="transformer", layers="mixed")
    assert {n for n, m in model.named_modules() if isinstance(m, SKLinear)} == {
        f"{block}.feed_forward.{place}" for block in (1, 2) for place in (0, 3)
    }


@pytest.mark.parametrize("tokens", ["rows", "patches"])
@pytest.mark.parametrize("attention", ["exact", "random"])
@pytest.mark.parametrize("layers", ["dense", "sketched"])
def test_the_transformer_learns_from_any_tokens(tokens, attention, layers):
    task, model = made(
        model="transformer", tokens=tokens, attention=attention, layers=layers, image_size=16
    )
    dataset = task.dataset("val")
    loss = task.loss(model, dataset[:])
    assert len(dataset) == loss.weight == 180
    loss.sum.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    kind = RandomFeatureAttention if attention == "random" else ExactAttention
    assert sum(isinstance(m, kind) for m in model.modules()) == 2


def test_rows_and_patches_are_parts_of_the_image():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    for tokens, first, second in (
        ("rows", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("patches", [0, 1, 4, 5], [2, 3, 6, 7]),
    ):
        _, model = made(model="transformer", tokens=tokens, patch_size=2, image_size=4)
        assert model[0].tokens(image)[0, :2].tolist() == [first, second]


UNUSABLE = [
    ({"sketch_ratios": (0.5, 0.5)}, r"sketch_ratios=.*hidden=.* makes 4 linear layers"),
    ({"sketch_ratios": (0.5, 0.6, 0.7, 1.2)}, "sketch_ratios"),
    ({"hidden": ()}, "hidden"),
    ({"low_rank": 0}, "low_rank"),
    ({"num_terms": -1}, "num_terms"),
    ({"model": "transformer", "tokens": "patches", "patch_size": 5}, "patch_size=5: must divide"),
    ({"model": "transformer", "width": 30}, "width=30: must be a multiple of 4 heads"),
    ({"mesh": {"pp": 2}, "num_shards": 2}, "mesh.pp=2: model=mlp keeps its features in shards"),
]


@pytest.mark.parametrize(("keys", "message"), UNUSABLE)
def test_unusable_keys_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        made(**keys)


def test_a_sketch_larger_than_its_layer_is_one_message(here):
    done = here("train", "sketched", "low_rank=200", "--run-dir", "r")
    assert done.returncode == 2
    assert "low_rank=200: larger than the layer (in_features=128, out_features=10)" in done.stderr
    assert "Traceback" not in done.stderr


IN_SHARDS = {
    "mlp": {"SKLinear": [], "SketchedColumn": ["1", "4", "7"], "SketchedRow": ["10"]},
    "transformer": {
        "SKLinear": ["0.embed", "3.classify"],
        "SketchedColumn": [
            "1.attention.qkv", "1.feed_forward.0", "2.attention.qkv", "2.feed_forward.0",
        ],
        "SketchedRow": [
            "1.attention.out", "1.feed_forward.3", "2.attention.out", "2.feed_forward.3",
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("model", IN_SHARDS)
def test_layers_are_cut_where_their_features_stay_cut(model):
    _, network = made(model=model, num_shards=2)
    for kind, names in IN_SHARDS[model].items():
        found = [n for n, m in network.named_modules() if type(m).__name__ == kind]
        assert sorted(found) == sorted(names)


def test_dense_attention_is_cut_by_whole_heads_or_left_whole():
    for num_shards, kinds in ((2, ["ColumnLinear", "RowLinear"]), (3, ["Linear", "Linear"])):
        _, model = made(model="transformer", layers="mixed", num_shards=num_shards)
        attention = model[1].attention
        assert [type(m).__name__ for m in (attention.qkv, attention.out)] == kinds


ON_MESHES = {
    "transformer": ("2x2x1,1x3x2", (
        *SMALL, "model=transformer", "layers=mixed", "width=16", "tokens=patches", "patch_size=4",
        "dropout=0.1", "clip_norm=1.0", "num_shards=2", "steps=6",
    )),
    "mlp": ("1x2x1", (*CASES["mlp"], "steps=6")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ON_MESHES)
def test_bits_do_not_depend_on_the_mesh(lockstep, model):
    meshes, keys = ON_MESHES[model]
    done = lockstep(
        "verify", "sketched", *keys, "--launchers", "local", "--meshes", f"1x1x1,{meshes}",
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one SHA-256" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "transformer"])
def test_bits_do_not_depend_on_ranks_nor_on_a_resume(lockstep, tmp_path, case):
    keys = (*CASES[case], "log_every=10")
    hashes = {}
    for ranks in ("1", "3"):
        done = lockstep("train", "sketched", *keys, "-n", ranks, "--run-dir", f"on{ranks}")
        assert done.returncode == 0, done.stderr
        hashes[ranks] = result(tmp_path / f"on{ranks}")["params_sha256"]
    stop = ("stop_at_step=20", "checkpoint.every=10")
    done = lockstep("train", "sketched", *keys, *stop, "-n", "2", "--run-dir", "stopped")
    assert done.returncode == 0, done.stderr
    done = lockstep("resume", "stopped", "-n", "3", "stop_at_step=null")
    assert done.returncode == 0, done.stderr
    hashes["resumed"] = result(tmp_path / "stopped")["params_sha256"]
    assert len(set(hashes.values())) == 1, hashes


def test_checkpoints_hold_no_random_signs(here, tmp_path):
    done = here("train", "sketched", *CASES["mlp"], "steps=3", "--run-dir", "r")
    assert done.returncode == 0, done.stderr
    model = ls.load(tmp_path / "r", "latest").model
    assert not [name for name in model.state_dict() if name.endswith(("U1", "U2"))]
    (file,) = (tmp_path / "r").glob("checkpoints/*/*model*.safetensors")
    assert not [name for name in load_file(file) if name.endswith(("U1", "U2"))]
    assert load_file(file)["1.sketch_key"].tolist() == [0, 0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a dense perceptron's run."""
    folder = tmp_path_factory.mktemp("dense")
    keys = ("layers=dense", "hidden=[48,32]", "image_size=8", "epochs=3", "lr=3e-3")
    command = (sys.executable, "-m", "lockstep", "train", "sketched", *keys, "--run-dir", "run")
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def dense_run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def report_of(run_dir):
    return json.loads((run_dir / "sketch" / "sketch.json").read_text())


def test_a_run_is_converted_with_a_report_a_picture_and_the_model(here, dense_run):
    before = {p: p.read_bytes() for p in dense_run.rglob("*") if p.is_file()}
    done = here("sketch", "run", "--low-rank", "12", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert all(path.read_bytes() == content for path, content in before.items())
    report = report_of(dense_run)
    assert [layer["name"] for layer in report["layers"]] == ["1", "4", "7"]
    assert [layer["low_rank"] for layer in report["layers"]] == [12, 12, 12]
    first = report["layers"][0]
    assert first["dense_parameters"] == 64 * 48 + 48
    assert first["parameters"] == 12 * (64 + 48) + 48
    assert 0.01 < first["error"] < 0.6
    assert report["layers"][2]["error"] < 1e-5  # ten classes: the whole rank
    assert "3,120 → 1,392" in done.stdout
    assert f"test/accuracy: {report['before']['accuracy']:.6g} → " in done.stdout
    assert (dense_run / "sketch" / "sketch.png").read_bytes()[:4] == b"\x89PNG"

    loaded = ls.load(dense_run)
    replace_layers(loaded.model, low_rank=12, seed=3)
    state = load_file(dense_run / "sketch" / "model.safetensors")
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(tensor, state[name])
    images, labels = loaded.task.dataset("test")[:]
    accuracy = (loaded.model.eval()(images).argmax(1) == labels).float().mean()
    assert report["after"]["accuracy"] == pytest.approx(float(accuracy))
    assert report["before"]["accuracy"] > 0.8


def test_the_tuner_keeps_its_limits(here, dense_run, tmp_path):
    done = here("sketch", "run", "--max-parameters", "2500", "--output", "elsewhere")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "elsewhere" / "sketch.json").read_text())
    assert sum(layer["parameters"] for layer in report["layers"]) <= 2500
    done = here("sketch", "run", "--max-error", "0.25", "--layers", "[14]", "--num-terms", "2")
    assert done.returncode == 0, done.stderr
    layers = report_of(dense_run)["layers"]
    assert [layer["name"] for layer in layers] == ["1", "4"]
    assert all(layer["error"] <= 0.25 for layer in layers)
    assert all(layer["seconds"] <= layer["dense_seconds"] for layer in layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["run", "--low-rank", "65"], "layer 1: --low-rank 65: larger than the layer; at most 64"),
        (["run", "--low-rank", "0"], "--low-rank 0: must be at least 1"),
        (["run", "--num-terms", "-2"], "--num-terms -2: must be at least 1"),
        (["run", "--max-error", "nan"], "--max-error nan: must not be negative"),
        (["run", "--max-error", "1", "--low-rank", "2"], "--low-rank and --max-error: give one"),
        (["run", "--max-parameters", "5"], "max_parameters=5: the smallest layers that were"),
        (["run", "--method", "svd"], "--method svd: must be one of range-finder, least-squares"),
        (["run", "--layers", "8"], "layers='8': matches no layer that can be sketched (there"),
        (["run", "--split", "dev"], "--split dev: must be one of train, val, test"),
        (["run", "--checkpoint", "999"], "999"),
        (["run", "--low-rank", "2", "--output", "run/run.json"], "--output run/run.json: cannot"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(here, dense_run, arguments, message):
    done = here("sketch", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_runs_of_scripts_are_referred_to_python(here, dense_run):
    identity = json.loads((dense_run / "run.json").read_text()) | {"target": "/x/file.py:Task"}
    (dense_run / "run.json").write_text(json.dumps(identity))
    done = here("sketch", "run")
    assert done.returncode == 2
    assert "is a run of /x/file.py:Task" in done.stderr
    assert "lockstep.sketch.replace_layers" in done.stderr
