"""A task whose model is a LightningModule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.data.passes import stream_length
from lockstep.data.random import Stream, kept_generators, random_key, seed_all
from lockstep.engine.hook import Hook
from lockstep.engine.log import Logbook
from lockstep.engine.optimizer.schedulers import Scheduler
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError
from lockstep.lightning.data import (
    STEPS,
    Batch,
    Loaders,
    Source,
    Split,
    loaders_of,
    moved,
    order_of,
    overrides,
    prepare,
    sizes,
)
from lockstep.lightning.hooks import (
    Configured,
    LightningHooks,
    ModelChangingHooks,
    configured,
    detached,
)
from lockstep.lightning.logs import (
    Holder,
    Journal,
    ModuleMetrics,
    is_start,
    load_state,
    metrics_in,
    state_of,
)
from lockstep.lightning.module import (
    adapt,
    check_datamodule,
    check_module,
    keeping_nothing,
    step_arguments,
)

_ENDS = ("on_validation_epoch_end", "on_validation_end", "on_test_epoch_end", "on_test_end")


class LightningTask(Task):
    """A LightningModule and its loaders as a task.

    Attributes:
        source: where module and data come from.
        clock: the hooks of the module, and how far the run is.
        remarks: warnings about what Lockstep does otherwise than Lightning, by what they are about.
        names: names of the numbers that each stage logs.
        of_epoch: names of training that are averaged over an epoch too.
        logged: metrics of torchmetrics that each split logs: paths by name.
        pending: what the hooks of an evaluation have changed in the module, by split.
    """

    source: ClassVar[Source]
    scratch: ClassVar[tuple[str, ...]] = (
        "task.remarks", "task.names", "task.of_epoch", "task.logged", "task.pending",
    )  # fmt: skip

    def __init__(self, config: TrainConfig | None = None) -> None:
        super().__init__(config)
        kind = self.source.kind
        changes = ("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")
        is_changing = any(overrides(kind, name) for name in changes)
        self.clock = ModelChangingHooks() if is_changing else LightningHooks()
        self.remarks: dict[str, str] = {}
        self.names: dict[str, list[str]] = {}
        self.of_epoch: list[str] = []
        self.logged: dict[str, dict[str, str]] = {}
        self.pending: dict[str, Any] = {}
        # Weak, so that what an audit reaches from the task is the task's.
        self._module: Any = lambda: None
        self._optimizer: Any = lambda: None
        self._configured: tuple[Configured, Callable[[], None]] | None = None
        self._loaders: Loaders | None = None
        self._datamodule: Any = None

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return self.source.kind.__name__.lower()

    @property
    def splits(self) -> tuple[str, ...]:  # type: ignore[override]
        """One for each loader."""
        return tuple(self.loaders.evaluated)

    @property
    def module(self) -> Any:
        """The model of the run."""
        module = self._module()
        assert module is not None, "the engine builds the model first"
        return module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The module's optimizer, once it has been made."""
        found: torch.optim.Optimizer | None = self._optimizer()
        return found

    @property
    def loaders(self) -> Loaders:
        """The loaders, which are made when they are first needed."""
        if self._loaders is None:
            module = self._module()
            if module is None:  # asked for before the engine has built the model
                with kept_generators():
                    module = self._made()
            owners = (self._datamodule, module)
            self._loaders = loaders_of(module, owners, self.source.loaders, self.config.seed)
        return self._loaders

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch.

        Raises:
            TaskError: it is a stream without a length.
        """
        dataset = self.loaders.train.dataset
        if not hasattr(dataset, "__getitem__"):
            count = stream_length(dataset, "train")
        else:
            count = len(Split(self.loaders.train, "train", 0, 1))
        if count is None:
            raise TaskError(
                "self.trainer: asked for the steps of an epoch, and train_dataloader has a stream "
                "without __len__; set steps in the config, or write __len__"
            )
        full, rest = divmod(count, self.config.batch_size)
        return full + (rest > 0 and not self.config.data.drop_last)

    def build_model(self) -> nn.Module:
        """A new module, after `prepare_data`, `setup("fit")` and `configure_model`."""
        module = self._made()
        self._module = weakref.ref(module)
        return module  # type: ignore[no-any-return]

    def _made(self) -> Any:
        with kept_generators():
            datamodule = self._prepared_datamodule()
        module = self.source.module(self.config)
        check_module(module)
        adapt(module, self, datamodule)
        with kept_generators():
            prepare(module, self.config.seed)
        module.configure_model()
        return module

    def dataset(self, split: str) -> Dataset[Any] | None:
        """The dataset of a loader."""
        size = self.config.batch_size if split == "train" else self.config.eval_batch_size
        found: Dataset[Any] | None = self.loaders.dataset(split, size)
        return found

    def collate(self, samples: list[Any]) -> Any:
        """The batch that a `Split` has made, or one of a stream's samples."""
        if isinstance(samples[0], Batch):
            return samples[0]
        return self.loaders.train.collate_fn(samples)

    def sample_weights(self) -> Any:
        """Weights of the loader's sampler, if it has some."""
        return order_of(self.loaders.train, "train").weights

    def data_remarks(self) -> list[str]:
        """What Lockstep does otherwise than Lightning."""
        config = self.config
        return [
            *self.loaders.remarks(config.batch_size, config.data.shuffle),
            *self.remarks.values(),
        ]

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer | None:
        """The optimizer of `configure_optimizers`; None, the config's, where there is none."""
        found = configured(model)
        if found.optimizer is not None:
            self._optimizer = weakref.ref(found.optimizer)
            self._configured = found, detached(found.optimizer)
        # Steps are tried before the run begins, and read what these hooks set.
        with kept_generators(), Logbook(lambda event: None).opened(0):
            self.clock.begin(model)
        return found.optimizer  # type: ignore[no-any-return]

    def build_scheduler(self, optimizer: Any) -> Any:
        """The scheduler of `configure_optimizers`, if it has one."""
        if self._configured is None:
            return None
        (found, attach), self._configured = self._configured, None
        if found.scheduler is None:
            return None
        attach()
        return Scheduler(found.scheduler, found.interval, found.frequency, found.metric)

    def hooks(self) -> list[Hook]:
        """The hooks of the module."""
        return [self.clock]

    def metrics(self) -> dict[str, Any]:
        """All metrics of the module, as one."""
        if not _has_end(self.module):
            return {}
        return {"": ModuleMetrics(self.module, self.splits, Holder(self._finished))}

    def loss(self, model: Any, batch: Any) -> Loss:
        """The loss of `training_step`, weighted by the number of samples."""
        placed = batch if isinstance(batch, Batch) else Batch(0, "train", 0, batch)
        with self._step(model, placed, "train") as (data, journal):
            number = self.clock.step - self.clock.first
            if overrides(model, "on_train_batch_start"):
                skips = model.on_train_batch_start(data, number) == -1
                if skips:
                    raise TaskError(
                        "on_train_batch_start: returned -1, which skips an epoch; leave samples "
                        "out of the dataset instead"
                    )
            output = model.training_step(*step_arguments(model.training_step, (data, number)))
            for name, metric in journal.metrics.items():
                journal.put(name, metric.compute(), f"self.log({name!r})")
                self.remarks[name] = (
                    f"training_step: self.log({name!r}, {type(metric).__name__}): is the mean of "
                    "its values of microbatches, weighted by their samples"
                )
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TaskError(
                f"training_step: returned {shown(output)}; must return the loss, a scalar tensor, "
                "or a dict with it as 'loss'; a batch cannot be skipped (None)"
            )
        loss = loss.reshape(())
        self.of_epoch += [name for name in journal.of_epoch if name not in self.of_epoch]
        weight = journal.given_weight(loss) or float(self._count(data))
        return Loss.mean(loss, weight, self._numbers(journal, "train", loss))

    def evaluate(self, model: Any, batch: Any) -> Loss:
        """What `validation_step` or `test_step` returns and logs."""
        split = batch.split if batch.split != "train" else "val"
        stage, place = STEPS[split], f"{split}_{batch.loader}" if batch.loader else split
        with self._step(model, batch, split) as (data, journal):
            is_one = f"{split}_1" not in self.splits
            at = (data, batch.number) if is_one else (data, batch.number, batch.loader)
            if overrides(model, f"on_{stage}_batch_start"):
                getattr(model, f"on_{stage}_batch_start")(*at)
            step = getattr(model, f"{stage}_step")
            output = step(*step_arguments(step, at))
            if overrides(model, f"on_{stage}_batch_end"):
                getattr(model, f"on_{stage}_batch_end")(output, *at)
            states = {path: state_of(metric) for path, metric in metrics_in(model).items()}
        self.logged[place] = journal.metric_paths(model)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        loss = loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None
        numbers = self._numbers(journal, place, loss)
        updates = {"": {"split": place, "states": states}} if _has_end(model) else {}
        if loss is not None:
            weight = journal.given_weight(loss) or float(self._count(data))
            return Loss.mean(loss, weight, numbers, updates)
        pair = numbers.pop("loss", None) or numbers.get(f"{split}_loss")
        if pair is not None:
            return Loss(pair[0], pair[1], numbers, updates=updates)
        if self.config.watch == "loss":
            raise TaskError(
                f"{stage}_step: returns no loss, and logs none as {split}_loss; do one of them, or "
                "say in the config which metric is watched (watch=val_acc)"
            )
        return Loss(torch.zeros(()), 0.0, numbers, updates=updates)

    @contextmanager
    def _step(self, model: Any, batch: Batch, split: str) -> Iterator[tuple[Any, Journal]]:
        """Within it, the module computes one batch, which it gets as Lightning would move it."""
        trainer = model.trainer
        data = moved(batch, model, self._datamodule)
        journal = Journal(split, lambda: self._count(data))
        kept = keeping_nothing(model, STEPS[split])
        with self.clock.opened(model), trainer.during(split, journal), kept:
            yield data, journal

    def _count(self, data: Any) -> int:
        """Number of samples of a batch: the first size of its first tensor, as Lightning has it."""
        found = list(sizes(data))
        if not found:
            raise TaskError(
                "the batch has no tensor whose size tells its number of samples; give it to "
                "self.log(…, batch_size=…) with the loss"
            )
        if len({*found}) > 1:
            self.remarks.setdefault(
                "",  # of the first batch alone: sizes of batches differ
                f"the tensors of a batch have first sizes {sorted({*found})}, and {found[0]} is "
                "taken for its number of samples; give another one to self.log(…, batch_size=…) "
                "with the loss",
            )
        return found[0]

    def _numbers(self, journal: Journal, stage: str, loss: Tensor | None) -> dict[str, Any]:
        """The numbers that a step has logged, the same names each time.

        Raises:
            TaskError: there is a new name, or one for the loss that has another value.
        """
        numbers = journal.numbers_beside(loss)
        known = self.names.setdefault(stage, sorted(numbers))
        new = sorted(numbers.keys() - {*known})
        if new:
            raise TaskError(
                f"self.log({new[0]!r}): the first batch did not log it; every batch must log the "
                "same names"
            )
        return {name: numbers.get(name, (0.0, 0.0)) for name in known}

    def _finished(
        self, split: str, states: Mapping[str, Mapping[str, Any]], count: int
    ) -> dict[str, Any]:
        """What the module logs at the end of an evaluation.

        Args:
            split: name of the split.
            states: of each metric, over all batches.
            count: number of batches.
        """
        module, stage = self.module, STEPS[split.partition("_")[0]]
        if split not in self.logged:  # this rank has computed no batch of it
            with kept_generators(), torch.no_grad():
                self.evaluate(module, self.dataset(split)[0])  # type: ignore[index]
        was_training = module.training
        module.eval()
        try:
            own = metrics_in(module)
            fed = {path: state for path, state in states.items() if not is_start(own[path], state)}
            with kept_generators(), torch.no_grad(), self.clock.changing(module, fed) as changes:
                seed_all(random_key(self.config.seed, Stream.EVALUATION, self.clock.step, 2))
                found = self._ended(module, stage, split, fed, count)
            # Until the engine says that this evaluation counts.
            self.pending[split] = changes
            return found
        finally:
            module.train(was_training)

    def _ended(
        self,
        module: Any,
        stage: str,
        split: str,
        states: Mapping[str, Mapping[str, Any]],
        count: int,
    ) -> dict[str, Any]:
        journal = Journal(split.partition("_")[0], lambda: 1)
        metrics = metrics_in(module)
        with module.trainer.during(split.partition("_")[0], journal):
            for name in (f"on_{stage}_start", f"on_{stage}_epoch_start"):
                if overrides(module, name):
                    getattr(module, name)()
            for path, state in states.items():
                load_state(metrics[path], state, count)
            found = {name: metrics[path].compute() for name, path in self.logged[split].items()}
            for name in (f"on_{stage}_epoch_end", f"on_{stage}_end"):
                if overrides(module, name):
                    getattr(module, name)()
            found |= {name: metric.compute() for name, metric in journal.metrics.items()}
        return found | {name: total / w for name, (total, w) in journal.numbers.items()}

    def _prepared_datamodule(self) -> Any:
        if self._datamodule is None:
            self._datamodule = self.source.datamodule(self.config)
            if self._datamodule is not None:
                check_datamodule(self._datamodule)
                prepare(self._datamodule, self.config.seed)
        return self._datamodule


def _has_end(module: Any) -> bool:
    """Whether there is something to compute when an evaluation's batches are done."""
    return bool(metrics_in(module)) or any(overrides(module, name) for name in _ENDS)
