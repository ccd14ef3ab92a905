"""What Lockstep cannot honour of a LightningModule is refused by name; its keys are typed."""

import csv
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("lightning")
import torch
import torchmetrics
from lightning.pytorch import callbacks
from tests.lightning import modules
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler

import lightning as L
import lockstep as ls
from lockstep.errors import ConfigError, LockstepError, TaskError
from lockstep.launching.targets import configured, task_class
from lockstep.lightning.data import order_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

MODULES = modules.__file__
BASE = modules.MLP


def trained(kind, tmp_path, loader=None, **keys):
    """The result of a module's training in this process."""
    keys = {"epochs": 1, "num_microbatches": 2} | keys
    data = {} if loader is None else {"train_dataloaders": loader}
    task = ls.from_lightning(kind(), **data, **keys)
    return ls.train(task, run_dir=tmp_path / "run", quiet=True)


def a(name, base=BASE, **body):
    """A class of modules with other methods."""
    return type(name, (base,), body)


STOP, KEEP = callbacks.EarlyStopping, callbacks.ModelCheckpoint


def with_callbacks(*some):
    return a("A", configure_callbacks=lambda self: [*some])


def logging(call):
    """A class whose training step logs something more."""

    def training_step(self, batch, batch_idx):
        call(self, batch)
        return BASE.training_step(self, batch, batch_idx)

    return a("Logging", training_step=training_step)


def nothing(self, *arguments, **options):
    pass


def two_optimizers(self):
    halves = [*self.parameters()]
    return [torch.optim.SGD(halves[:2], 0.1), torch.optim.SGD(halves[2:], 0.1)]


def keeping(self, batch, batch_idx):
    self.outputs = getattr(self, "outputs", [])
    self.kept.append(batch[0].mean())
    self.log("val_loss", batch[0].mean())


class Keeping(BASE):
    def __init__(self):
        super().__init__()
        self.kept = []

    validation_step = keeping


class KeepingLate(BASE):
    def on_validation_epoch_start(self):
        self.late = []

    def validation_step(self, batch, batch_idx):
        self.late.append(1)


class Unseen(Sampler):
    def __len__(self):
        return 56

    def __iter__(self):
        return iter(range(56))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (modules.GAN, "automatic_optimization: is False: .*return the loss.*Task with phases"),
        (a("A", configure_optimizers=two_optimizers), "several optimizers; .* Task with phases"),
        (a("A", configure_optimizers=lambda self: None), "returned None, which trains nothing"),
        (a("A", configure_optimizers=lambda self: 3), "returned 3; must be a torch optimizer"),
        (a("A", on_before_optimizer_step=nothing), "A.on_before_optimizer_step: is not called"),
        (a("A", optimizer_step=nothing), "A.optimizer_step: is not called .* scheduler"),
        (a("A", configure_gradient_clipping=nothing), "set clip_norm in the config"),
        (with_callbacks(callbacks.Timer()), "Timer would not be called .* on_train_batch_end"),
        (with_callbacks(type("Own", (callbacks.EarlyStopping,), {})("x")), "Own would not be"),
        (with_callbacks(STOP("a"), KEEP(monitor="b")), "watch is 'a' for one callback and 'b' for"),
        (with_callbacks(STOP("a", stopping_threshold=1.0)), "stopping_threshold=1.0"),
        (with_callbacks(KEEP(dirpath="x")), r"dirpath='.*'\): leave it out: checkpoints are below"),
        (with_callbacks(KEEP(monitor="a", save_top_k=3)), "save_top_k=3.: leave it out: the best"),
        (with_callbacks(KEEP(every_n_epochs=2)), "every_n_epochs=2.: leave it out, and set eval_"),
        (a("A", on_save_checkpoint=nothing), "keep it in a buffer"),
        (a("A", training_step=lambda self, batch, batch_idx: None), "cannot be skipped"),
        (a("A", on_train_batch_start=lambda self, *_: -1), "returned -1, which skips an epoch"),
        (a("A", training_step=lambda self, batch, i, odd: None), "takes batch, i, odd; a step"),
        (a("A", on_train_batch_end=lambda self, o, batch, i: batch[0]), "uses its batch"),
        (a("A", validation_step=lambda self, *_: None), "returns no loss, and logs none"),
        (Keeping, "validation_step: keeps something in self.kept"),
        (KeepingLate, "no attribute 'late'. If it is made by on_validation_epoch_start, that is"),
        (logging(lambda self, b: self.log("train_loss", 1.0)), "is called twice in a step"),
        (logging(lambda self, b: self.log("x", b[0])), r"self.log\('x'\): is tensor"),
        (logging(lambda self, b: self.log("x", 1.0, reduce_fx="max")), "reduce_fx='max'"),
        (logging(lambda self, b: self.log("loss", 1.0)), "is not what the step returns"),
        (logging(lambda self, b: self.all_gather(b[0])), "a step sees one microbatch"),
        (logging(lambda self, b: self.print("x")), "first_only"),
        (logging(lambda self, b: self.manual_backward(b[0])), "self.manual_backward: gradients"),
        (logging(lambda self, b: self.trainer.world_size), "must not depend on ranks"),
        (logging(lambda self, b: self.logger.experiment), "self.logger: Lockstep writes curves"),
        (logging(lambda self, b: self.trainer.fit_loop), "self.trainer.fit_loop: is not there"),
        (logging(lambda self, b: self.lr_schedulers()), "Lockstep steps schedulers itself"),
        (
            a("A", train_dataloader=lambda self: [BASE.train_dataloader(self)]),
            "returned a list; must be a torch.utils.data.DataLoader",
        ),
    ],
)
def test_refused_by_name(kind, message, tmp_path):
    with pytest.raises((TaskError, ConfigError), match=message):
        trained(kind, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8, "sampler": Unseen()}, "sampler='Unseen': .* epoch_indices"),
        ({"batch_sampler": type("Own", (BatchSampler,), {})(range(56), 8, False)}, "batch_sampler"),
        ({"batch_size": None}, "batch_size=None: the dataset makes batches itself"),
        ({"batch_size": 8, "worker_init_fn": print}, "worker_init_fn"),
    ],
)
def test_loaders_are_refused_by_name(options, message, tmp_path):
    dataset = BASE.train_dataloader(None).dataset
    with pytest.raises(TaskError, match=message):
        trained(BASE, tmp_path, DataLoader(dataset, **options))


def test_callbacks_are_keys_of_the_config(tmp_path):
    kind = with_callbacks(
        STOP("val_loss", min_delta=10.0, patience=2, mode="max"),
        KEEP(monitor="val_loss", mode="max", every_n_train_steps=3),
        callbacks.LearningRateMonitor(),
    )
    done = trained(kind, tmp_path, epochs=9, early_stopping={"min_delta": 5.0})
    assert (done.config.watch, done.config.watch_mode) == ("val_loss", "max")
    assert done.config.early_stopping == ls.config.EarlyStoppingConfig(patience=2, min_delta=5.0)
    assert done.config.checkpoint.every == 3
    assert done.reason == "early stopping: no better val_loss since step 4"
    kind = a("One", configure_callbacks=lambda self: STOP("val/val_loss", patience=0))
    config = ls.from_lightning(kind(), watch="loss").config
    assert (config.watch, config.early_stopping.patience) == ("loss", 1)


def test_samplers_are_replaced_by_the_orders_that_they_ask_for():
    dataset = BASE.train_dataloader(None).dataset
    assert order_of(DataLoader(dataset), "train").shuffle is False
    assert order_of(DataLoader(dataset, shuffle=True), "train").shuffle is True
    weights = [1.0] * 55 + [0.0]
    weighted = DataLoader(dataset, sampler=WeightedRandomSampler(weights, 56))
    assert order_of(weighted, "train").weights.tolist() == weights
    twice = DataLoader(dataset, sampler=RandomSampler(dataset, replacement=True, num_samples=9))
    with pytest.raises(TaskError, match="sampler='RandomSampler'"):
        order_of(twice, "train")


def test_loaders_and_arguments_are_keys_of_the_config(tmp_path):
    target = f"{MODULES}:Autoencoder"
    kind, config = configured(target, [])
    assert (config.batch_size, config.num_microbatches, config.eval_batch_size) == (16, 8, 16)
    assert config.data.shuffle is False
    _, config = configured(target, ["datamodule.batch_size=4", "module.code=2"])
    assert (config.batch_size, config.num_microbatches, config.module.code) == (4, 4, 2)
    _, config = configured(target, ["batch_size=32", "datamodule.batch_size=4"])
    assert (config.batch_size, config.eval_batch_size) == (32, 4)
    assert kind is task_class(f"{target}+Points")
    for item, message in (
        ("module.cod=2", r"unknown key 'module.cod'; did you mean module.code"),
        ("module.code=x", "module.code='x': .* integer"),
        ("lr=0.1", "lr=0.1: Autoencoder.configure_optimizers makes the optimizer"),
        ("datamodule.batch_size=0", "batch_size"),
    ):
        with pytest.raises((LockstepError, ValueError), match=message):
            configured(target, [item])
    with pytest.raises(ConfigError, match="no LightningDataModule 'Other'; there are: Points"):
        task_class(f"{target}+Other")


def test_a_module_from_a_program_stays_as_it_is(tmp_path):
    module = modules.Autoencoder()
    data = modules.Points(batch_size=8)
    task = ls.from_lightning(module, datamodule=data, epochs=1, num_microbatches=2, clip_norm=1.0)
    result = ls.train(task, run_dir=tmp_path / "run", quiet=True)
    assert result.config.batch_size == 8
    assert result.metrics["test/loss"] > 0
    assert type(module) is modules.Autoencoder
    assert not [*module.parameters()]
    for wrong, message in (
        ({"module": nn.Linear(1, 1)}, "module is a Linear; must be a LightningModule"),
        ({"module": module, "datamodule": module}, "datamodule is a Autoencoder"),
        ({"module": module, "epoch": 3}, "did you mean epochs"),
        ({"module": a("Bare", L.LightningModule, training_step=nothing)()}, "is missing"),
    ):
        with pytest.raises((TaskError, ConfigError), match=message):
            ls.from_lightning(**wrong)


def test_the_command_trains_resumes_and_evaluates_a_module(here, tmp_path):
    file = tmp_path / "lit.py"
    shutil.copy(MODULES, file)
    keys = ("epochs=2", "num_microbatches=4", "stop_at_step=5")
    first = here("train", f"{file}:CNN", *keys, "--run-dir", "half")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "replaced by Lockstep's own order" in first.stdout
    assert here("resume", "half").returncode == 0
    assert here("train", f"{file}:CNN", *keys[:2], "--run-dir", "whole").returncode == 0
    shas = [_sha(tmp_path / name) for name in ("half", "whole")]
    assert shas[0] == shas[1]
    evaluated = here("eval", "whole", "--split", "val")
    assert "best_so_far" in evaluated.stdout, evaluated.stdout + evaluated.stderr
    unknown = here("train", f"{file}:CNM")
    assert unknown.returncode == 2
    assert "no Task class 'CNM'" in unknown.stderr


def _sha(run_dir):
    from tests.conftest import result

    return result(run_dir)["params_sha256"]


def test_hooks_see_where_the_run_is(tmp_path):
    seen = []

    class Watching(BASE):
        scratch = ("task.source",)  # where the test's own list is found

        def _note(name):
            return lambda self, *_: seen.append((name, self.current_epoch, self.global_step))

        for name in (
            "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end",
            "on_train_end",
        ):  # fmt: skip
            locals()[name] = _note(name)

        def training_step(self, batch, batch_idx):
            assert self.trainer.max_epochs == 2
            assert self.trainer.num_training_batches == 4
            assert batch_idx == self.global_step - 4 * self.current_epoch
            assert self.trainer.training
            assert self.hparams.hidden == 16
            assert self.optimizers().param_groups[0]["lr"] == 0.05
            return super().training_step(batch, batch_idx)

    trained(Watching, tmp_path, epochs=2)
    start = [("on_fit_start", 0, 0), ("on_train_start", 0, 0), ("on_train_epoch_start", 0, 0)]
    assert seen == [
        *start,  # for the trials before the first step
        *start,
        ("on_train_epoch_end", 0, 4), ("on_train_epoch_start", 1, 4),
        ("on_train_epoch_end", 1, 8), ("on_train_epoch_start", 2, 8), ("on_train_end", 2, 8),
    ]  # fmt: skip


def test_a_module_without_a_validation_loss_has_none(tmp_path):
    def logs_mean(self, batch, batch_idx):
        self.log("val_mean", batch[0].mean())

    result = trained(a("Measured", validation_step=logs_mean), tmp_path, watch="val_mean")
    assert {name for name in result.metrics if name.startswith("val/")} == {"val/val_mean"}
    assert result.best_checkpoint


def test_a_task_may_be_trained_again_beside_its_first_model(tmp_path):
    def logs_norm(self):
        self.log("norm", sum(float(p.detach().norm()) for p in self.parameters()))

    task = ls.from_lightning(a("Measuring", on_validation_epoch_end=logs_norm)(), epochs=2)
    folders = tmp_path / "first", tmp_path / "second"
    results = [ls.train(task, run_dir=folder, quiet=True) for folder in folders]
    assert results[0].model is not results[1].model
    norms = [_logged(folder, "norm") for folder in folders]
    assert len({*norms[0]}) == 2
    assert norms[0] == norms[1]


def _logged(run_dir, name):
    with (run_dir / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row["split"] == "val"]


class Averaging(BASE):
    def __init__(self):
        super().__init__()
        self.average_of_inputs_1 = torchmetrics.MeanMetric()
        self.average_of_inputs_2 = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        for name in ("average_of_inputs_1", "average_of_inputs_2"):
            getattr(self, name).update(batch[0])
            self.log(name, getattr(self, name))
        return super().training_step(batch, batch_idx)


def test_each_metric_of_a_training_step_has_its_warning(tmp_path):
    task = ls.from_lightning(Averaging(), epochs=1, num_microbatches=2)
    ls.train(task, run_dir=tmp_path / "run", quiet=True)
    said = [text for text in task.data_remarks() if "is the mean of its values" in text]
    assert [re.search(r"'(\w+)'", text)[1] for text in said] == [
        "average_of_inputs_1", "average_of_inputs_2", "train_acc",
    ]  # fmt: skip


def test_lightning_is_imported_by_files_of_users_only():
    source = Path(ls.__file__).parent
    importing = re.compile(r"^\s*(import|from) (pytorch_)?lightning\b", re.MULTILINE)
    assert not [f for f in source.rglob("*.py") if importing.search(f.read_text())]
