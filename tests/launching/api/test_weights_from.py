"""`lockstep train --from RUN`: a new run that starts from another's weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.conftest import result, slow
from tests.distributed.conftest import CONFIG
from tests.launching.api import longer_tasks
from tests.launching.api.longer_tasks import Line, LineConfig
from torch import nn

import lockstep as ls
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.errors import CheckpointError, ConfigError, LockstepError, TaskError

TARGET = f"{longer_tasks.__file__}:Line"


class Encoded(Line):
    """The model of `Line` under another name, and a head."""

    def build_model(self) -> nn.Module:
        encoder = super().build_model()
        return nn.ModuleDict({"0": encoder[0], "head": nn.Linear(8, 1)})

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss((model["head"](model["0"](x)) - y).square().sum(), len(x))


class Centred(Line):
    """Its model holds the mean of its data."""

    data_buffers: ClassVar[Any] = ("me*",)
    mean: ClassVar[tuple[float, ...]] = (1.0, 2.0)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("mean", torch.tensor(self.mean))
        return model


class CentredElsewhere(Centred):
    """With other data."""

    mean = (3.0,)


class Tabled(Line):
    """With a table."""

    lr: ClassVar[float] = 0.1

    def build_model(self) -> nn.Module:
        table = ls.nn.SparseEmbedding(7, 3, ls.optim.RowAdagrad(self.lr), std=1.0)
        return nn.ModuleDict({"table": table, "head": nn.Linear(3, 1)})

    def lookups(self, batch: Any) -> dict[str, Any]:
        return {"table": torch.arange(len(batch[0])) % 7}

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        x, y = batch
        rows = model["table"](torch.arange(len(x)) % 7)
        return ls.Loss((model["head"](rows) - y).square().sum(), len(x))


class Still(Tabled):
    """With a table whose rows do not move."""

    lr: ClassVar[float] = 0.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    """A run of `Line`, which later runs start from."""
    path = tmp_path_factory.mktemp("source") / "Lauf 1"
    ls.train(Line(), LineConfig(steps=5, checkpoint={"every": 2}), run_dir=path, quiet=True)
    return path


def train(run_dir: Path, kind: type[Line] = Line, **options: Any) -> ls.Result:
    config = LineConfig(steps=4, lr=options.pop("lr", 0.03))
    return ls.train(kind(config), config, run_dir=run_dir, quiet=True, **options)


def test_it_starts_from_the_weights_and_nothing_else(tmp_path: Path, source: Path) -> None:
    there = ls.load(source, "latest", task=Line).model.state_dict()
    same = train(tmp_path / "same", lr=0.0, from_run=source / "latest")
    for name, tensor in same.model.state_dict().items():
        assert torch.equal(tensor, there[name])
    assert same.step == 4
    start = same.config.weights_from
    assert Path(start.path) == source.resolve() / "checkpoints" / "step_00000005"
    assert (start.step, len(start.sha256)) == (5, 64)
    assert same.config.hash != LineConfig(steps=4, lr=0.0).hash


def test_which_checkpoint(tmp_path: Path, source: Path) -> None:
    for number, (which, step) in enumerate(
        {"": 5, "best": 5, "2": 2, "checkpoints/step_00000004": 4}.items()
    ):
        done = train(tmp_path / str(number), from_run=source / which if which else source)
        assert done.config.weights_from.step == step


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_bits_on_any_ranks_interrupted_and_without_the_source(
    lockstep: Any, tmp_path: Path, source: Path, num_ranks: int
) -> None:
    alone = train(tmp_path / "alone", from_run=source)
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    options = ("--from", "copy", "--run-dir", "ranks", "-n", str(num_ranks), "-q")
    done = lockstep("train", TARGET, "steps=4", "stop_at_step=2", *options)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(copy)
    assert lockstep("resume", "ranks", "-q").returncode == 0
    assert result(tmp_path / "ranks")["params_sha256"] == alone.params_sha256


@pytest.mark.parametrize(
    ("words", "is_gone"),
    [
        (("weights_from.path=copy",), True),
        slow(("weights_from.path=copy/latest",), False),
        slow(("--from", "copy"), True),
        (("--from", "copy/latest"), False),
    ],
)
def test_what_has_begun_goes_on_whatever_becomes_of_the_source(
    here: Any, tmp_path: Path, source: Path, words: tuple[str, ...], is_gone: bool
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    alone = train(tmp_path / "alone", from_run=copy / "latest")  # the best too
    command = ("train", TARGET, "steps=4", *words, "--run-dir", "run", "--resume", "-q")
    done = here(*command, "stop_at_step=2")
    assert done.returncode == 0, done.stderr
    if is_gone:
        shutil.rmtree(copy)
    else:
        longer = LineConfig(steps=9, checkpoint={"every": 2})
        ls.train(Line(longer), longer, run_dir=copy, quiet=True, resume=True)
    done = here(*command)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["params_sha256"] == alone.params_sha256


def test_only_what_a_run_has_begun_with_is_taken_for_what_is_asked_for(
    tmp_path: Path, source: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    train(tmp_path / "run", from_run=copy)
    shutil.rmtree(copy)
    for path in (copy, copy / "5", copy / "best", copy / "checkpoints" / "step_00000005"):
        assert train(tmp_path / "run", from_run=path, resume=True).step == 4
    for path, only in ((copy / "4", []), (tmp_path / "other", []), (copy, ["*"])):
        with pytest.raises(CheckpointError, match="is no run directory"):
            train(tmp_path / "run", from_run=path, from_only=only, resume=True)
    with pytest.raises(CheckpointError, match="is no run directory"):
        train(tmp_path / "new", from_run=copy, resume=True)


def test_job_scripts_say_which_weights(here: Any, tmp_path: Path, source: Path) -> None:
    found = f'weights_from.path="{source.resolve()}/checkpoints/step_00000005"'
    words = (f"weights_from.path={source}", "--time", "5")
    for target, name in ((TARGET, "Line"), (str(longer_tasks.__file__), "longer_tasks")):
        done = here("slurm", target, *words)
        assert done.returncode == 0, done.stderr
        text = (tmp_path / f"{name}.sbatch").read_text().replace('\\"', '"')
        assert found in text
        assert "weights_from.sha256=" in text
    (tmp_path / "job.yaml").write_text("time: '5'\n")
    options = ("--dir", "s", "--slurm", "job.yaml")
    done = here("sweep", TARGET, "lr=1,2", words[0], *options)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "s" / "sweep.sbatch").read_text()
    assert (text.count(found), text.count("weights_from.sha256=")) == (2, 2)


def test_by_pattern(tmp_path: Path, source: Path) -> None:
    there = ls.load(source, task=Line).model.state_dict()
    done = train(tmp_path / "one", Encoded, lr=0.0, from_run=source, from_only=["0.*"])
    here = done.model.state_dict()
    assert torch.equal(here["0.weight"], there["0.weight"])
    assert not torch.equal(here["head.weight"], there["3.weight"])
    whole = LineConfig(steps=4, lr=0.0, weights_from={"path": str(source)}).hash
    assert done.config.hash != whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"it has no head\.weight, head\.bias; the model has no 3\.bias, 3\.weight"),
        ({"from_only": ["nothing.*"]}, "is the name of nothing in the model; it has 0.weight"),
        ({"from_only": ["0.*", "head.*"]}, r"it has no head\.weight, head\.bias"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, source: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path / "one", Encoded, from_run=source, **options)


def test_buffers_that_are_set_from_the_data_stay(tmp_path: Path) -> None:
    train(tmp_path / "there", Centred)
    there = ls.load(tmp_path / "there", "latest", task=Centred).model.state_dict()
    done = train(
        tmp_path / "here", CentredElsewhere, lr=0.0, from_run=tmp_path / "there" / "latest"
    )
    here = done.model.state_dict()
    assert (there.pop("mean").tolist(), here.pop("mean").tolist()) == ([1.0, 2.0], [3.0])
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("mean", r"must be a tuple of names, is 'mean'; write `data_buffers = \('mean',\)`"),
        (("means",), r"'means' is the name of no buffer of the model; it has mean"),
    ],
)
def test_data_buffers_that_are_none(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, named: Any, message: str
) -> None:
    monkeypatch.setattr(Centred, "data_buffers", named)
    with pytest.raises(TaskError, match=rf"Centred\.data_buffers: {message}"):
        train(tmp_path / "one", Centred, from_run=source)


@pytest.mark.parametrize("which", ["", "best", "7", "x\0y", "checkpoints", "a" * 300])
def test_a_run_that_is_not_there(tmp_path: Path, which: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no run directory|holds no|cannot be read"):
        train(tmp_path / "one", from_run=tmp_path / "nowhere" / which)
    (tmp_path / "nowhere" / "checkpoints").mkdir(parents=True)
    with pytest.raises(LockstepError):
        train(tmp_path / "one", from_run=tmp_path / "nowhere" / which)


def test_damaged_and_exchanged_weights(tmp_path: Path, source: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    folder = copy / "checkpoints" / "step_00000005"
    data = bytearray((folder / checkpoint.MODEL).read_bytes())
    data[-1] ^= 1
    (folder / checkpoint.MODEL).write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA-256 does not match"):
        train(tmp_path / "one", from_run=copy)
    config = LineConfig(steps=4, weights_from={"path": str(folder), "sha256": "0" * 64})
    with pytest.raises(CheckpointError, match="holds other weights now"):
        ls.train(Line(config), config, run_dir=tmp_path / "other", quiet=True)


def test_rows_of_tables_come_with_the_weights(tmp_path: Path) -> None:
    train(tmp_path / "rows", Tabled)
    train(tmp_path / "still", Still, from_run=tmp_path / "rows")
    there: Any = ls.load(tmp_path / "rows", "latest", task=Tabled).model
    here: Any = ls.load(tmp_path / "still", "latest", task=Still).model
    assert torch.equal(there["table"].weight, here["table"].weight)
    assert not torch.equal(there["head"].weight, here["head"].weight)


def test_what_makes_no_sense(tmp_path: Path, source: Path, here: Any) -> None:
    with pytest.raises(ConfigError, match="from_only: names tensors of from_run"):
        train(tmp_path / "one", from_only=["a"])
    with pytest.raises(ConfigError, match=r"must be a list of patterns: \['encoder\.\*'\]"):
        train(tmp_path / "one", from_run=source, from_only="encoder.*")
    config = LineConfig(weights_from={"path": str(source)})
    with pytest.raises(ConfigError, match="names a run too"):
        ls.train(Line(config), config, from_run=source)
    config = LineConfig(weights_from={"only": ["a"]})
    with pytest.raises(ConfigError, match=r"weights that weights_from\.path names"):
        ls.train(Line(config), config)
    with pytest.raises(CheckpointError, match="it has no table table"):
        train(tmp_path / "two", Tabled, from_run=source)
    with pytest.raises(ConfigError, match="has tables"):
        train(tmp_path / "two", Tabled, from_run=source, from_only=["head.*"])
    done = here("train", TARGET, "--from-only", "a")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --from-only a: give the run with --from too\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Language", ["mesh.tp=2"]),
        ("Deep", ["mesh.pp=2"]),
        ("Deep", ["sharding=parameters"]),
        ("Deep", ["sharding=optimizer", "mesh.pp=2"]),
    ],
)
def test_models_in_parts_weights_from_whole_weights(
    lockstep: Any, tmp_path: Path, name: str, keys: list[str]
) -> None:
    task = f"{Path(__file__).parents[2] / 'nn' / 'models.py'}:{name}"
    for arguments in (
        ["one", "seed=1"],
        ["alone", "--from", "one"],
        ["parts", "--from", "one", "-n", "4", "--launcher", "local", *keys],
    ):
        done = lockstep("train", task, *CONFIG, "-q", "--run-dir", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    digests = [result(tmp_path / run)["params_sha256"] for run in ("one", "alone", "parts")]
    assert digests[1] == digests[2] != digests[0]
    if keys[0] != "sharding=parameters":
        options = ("--from", "one", "--from-only", "*", "-n", "4", "--launcher", "local")
        done = lockstep("train", task, *CONFIG, "--run-dir", "part", *options, *keys)
        assert done.returncode == 2
        assert "a model of which each rank has a part" in done.stderr
