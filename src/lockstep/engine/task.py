"""The task, which a user writes: a model, its data and its loss. Nothing in it mentions ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from lockstep.config import TrainConfig
from lockstep.errors import TaskError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torchmetrics import Metric

    from lockstep.engine.hook import Hook
    from lockstep.engine.optimizer.schedulers import Scheduler


Number = Tensor | float | int


@dataclass(frozen=True)
class Loss:
    """The loss and metrics of one batch, as sums with their weights.

    Batches of different sizes are combined by adding sums and weights; the division happens
    once, at the end. So an uneven last batch counts for just what it holds.

    Attributes:
        sum: loss summed over the batch, a scalar tensor with a gradient.
        weight: divisor of the sum over the global batch, as a rule the number of samples.
        metrics: pairs (sum, weight) by name, scalars without gradient.
        updates: in evaluations, what each metric of `Task.metrics` is updated with: a tuple of
            arguments, a dict of them by name, or a tensor.
    """

    sum: Tensor
    weight: Number
    metrics: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    updates: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @classmethod
    def mean(
        cls,
        loss: Tensor,
        weight: Number,
        metrics: Mapping[str, tuple[Number, Number]] | None = None,
        updates: Mapping[str, Any] | None = None,
    ) -> Loss:
        """A loss from a mean, which torch's loss functions return by default.

        Args:
            loss: mean loss of the batch, a scalar tensor with a gradient.
            weight: divisor of the mean, as a rule the number of samples.
            metrics: pairs (sum, weight) by name, scalars without gradient.
            updates: arguments of the updates of the metrics of `Task.metrics`, by name.
        """
        return cls(loss * weight, weight, metrics or {}, updates=updates or {})


@dataclass(frozen=True)
class Phase:
    """One of several kinds of optimizer step that alternate, as in a GAN.

    Attributes:
        name: its name; an identifier.
        loss: as `Task.loss`, a function of the model and a batch, and of the carry if there is one.
        steps: number of its optimizer steps, before the next phase begins.
    """

    name: str
    loss: Callable[..., Any]
    steps: int = 1


class Task(ABC):
    """A trainable system: subclass it, then call `lockstep.main(MyTask(), config)`.

    Methods that get the model or a batch may declare its type: `def loss(self, model: MyModel,
    batch: tuple[Tensor, Tensor])`.

    Attributes:
        Config: the config class, for tasks with keys of their own; declare `config: MyConfig` too,
            so that type checkers know their types.
        config: the config this task was made with. A run whose command overrides keys makes a
            new task.
        scratch: paths of values that batches may change since no result depends on them, such as
            timers: `scratch = ("task.calls",)`; a path includes what lies below it. All others must
            stay as they are between steps.
        data_buffers: names of the model's buffers, or patterns (`scale.*`), that `build_model` sets
            from the data and the config, such as the mean with which `dataset` normalises. A run
            that starts from another's weights (`--from`) keeps its own.
        splits: names of the splits that are evaluated: while training goes on if they begin with
            `val`, at its end if they begin with `test`. Only those count for which `dataset` gives
            one.
    """

    Config: ClassVar[type[TrainConfig]] = TrainConfig
    scratch: ClassVar[tuple[str, ...]] = ()
    data_buffers: ClassVar[tuple[str, ...]] = ()
    splits: ClassVar[tuple[str, ...]] = ("val", "test")

    def __init__(self, config: TrainConfig | None = None) -> None:
        """Make a task.

        Raises:
            TaskError: `config` is not of the task's own config class.
        """
        self.config = self.Config() if config is None else config
        check_config(type(self), self.config)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model. Called once on every rank, with the same random state."""

    @abstractmethod
    def dataset(self, split: str) -> Dataset[Any] | None:
        """The map-style dataset (`__len__`, `__getitem__`, optionally `__getitems__`) of a split.

        Splits are `train` and those in `splits`; None says there is no such split.
        """

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of one batch: `loss(model, batch) -> Loss`.

        In a task with a `carry`: `loss(model, batch, carry) -> (Loss, carry)`. Not needed with
        `phases`, or with `outputs` and `batch_loss`. `model` is what `build_model` has made, in
        training mode.

        Random numbers drawn here (dropout, noise, augmentation) come from a state that depends
        on seed, step and microbatch only.
        """
        if has_batch_loss(self):
            model, batch = args
            return self.batch_loss(self.outputs(model, batch), batch)
        raise TaskError(f"{type(self).__name__}.loss: is missing; write it, or `evaluate` too")

    def outputs(self, model: Any, batch: Any) -> Any:
        """What the model makes of each sample of a microbatch, for `batch_loss`.

        For losses that compare samples with one another: contrastive, redundancy, ranking.

        Args:
            model: what `build_model` has made, in training mode.
            batch: samples of one microbatch.

        Returns:
            A tensor, or dicts, lists and tuples of tensors, each with a row for each sample:
            [samples, …]. Rows have one shape in all microbatches.
        """
        raise NotImplementedError

    def batch_loss(self, outputs: Any, batch: Any) -> Loss:
        """The loss of the whole global batch, instead of `loss`.

        Computed on every rank, with random state that depends on seed and step only; gradients go
        back through the rows to each microbatch. Evaluations call it for each of their batches.

        Args:
            outputs: as `outputs` returns them, with the rows of all samples of the global batch, in
                order.
            batch: the batch, of which tensors with a row for each sample have all rows.
        """
        raise NotImplementedError

    def carry(self, model: Any, batch: Any) -> Any:
        """What a microbatch carries into its first step; `loss` returns it for the next step.

        For models that continue from the step before: truncated backpropagation through time,
        memories, adaptive computation. It belongs to the position in the global batch, not to the
        samples: microbatch 3 gets what microbatch 3 of the step before has returned.
        It is kept without its graph, moves with the microbatch when ranks change, is in
        checkpoints, and is the same on any number of ranks. Gradients do not go through it.

        Args:
            model: model in training mode; no graph is recorded here.
            batch: first batch of the microbatch; evaluations call it for each of their batches.

        Returns:
            A tensor, or dicts, lists and tuples of tensors, finite numbers, text and None. Its
            shapes may change from step to step.
        """
        raise NotImplementedError

    def lookups(self, *args: Any, **kwargs: Any) -> Any:
        """Rows of each `lockstep.nn.SparseEmbedding` that a batch needs: `lookups(batch)`.

        In a task with a `carry`: `lookups(batch, carry)`. Needed where the model has such tables:
        their rows are with their owners, and come before the forward pass. Rows that are named are
        stepped, even if the loss does not use them.

        Returns:
            For each table, by the name of its module in the model ("users", "towers.items"), the
            numbers of rows: integers of any shape, in any order, also more than once.
        """
        raise NotImplementedError

    def phases(self) -> Sequence[Phase]:
        """Kinds of optimizer steps that follow one another, each with a loss of its own.

        They alternate: `[Phase("critic", self.critic_loss, steps=5), Phase("generator",
        self.generator_loss)]` makes five steps of the critic, then one of the generator, and so on.
        Every one is an optimizer step with a batch of its own, and counts as a step in `steps`, the
        schedule and checkpoints. `build_optimizer` then returns an optimizer for each phase, by its
        name; gradients are computed for the parameters of that optimizer only.
        """
        return ()

    def evaluate(self, model: Any, batch: Any) -> Loss:
        """The metrics of one batch, with `model` in evaluation mode and no gradients.

        In a task with a `carry`, each batch begins with one of its own.
        """
        loss: Loss
        if has_carry(self):
            loss, _ = self.loss(model, batch, self.carry(model, batch))
        else:
            loss = self.loss(model, batch)
        return loss

    def metrics(self) -> Mapping[str, Metric]:
        """Metrics of evaluations that are no ratios, by name: of torchmetrics (extra `metrics`).

        `evaluate` says by `Loss.updates` what each is updated with. Results that are one number
        are metrics like others; vectors and matrices are in the `Evaluated` event and in
        `result.json`. Called once for each split, at the start.
        """
        return {}

    def sample_weights(self) -> Sequence[float] | Tensor | None:
        """Weights with which an epoch's samples of `train` are drawn, with replacement.

        One number, at least 0, for each sample of `dataset("train")`: [number of samples]. An epoch
        draws as many samples as there are, by a generator of its own, from the seed. None, the
        default, takes every sample once. Called once, at the start.
        """
        return None

    def epoch_indices(
        self, epoch: int, generator: np.random.Generator
    ) -> Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor | None:
        """The samples of `train` that an epoch goes through, in order, instead of `data.shuffle`.

        For curricula, buckets and balanced classes. It must depend on its arguments alone, so it is
        the same on every rank and after a resume; samples may come several times or never. Steps
        take `batch_size` of them after one another.

        Args:
            epoch: number of the epoch, from 0.
            generator: random generator of this epoch.

        Returns:
            Indices into `dataset("train")`, as many in each epoch; None, the default, leaves the
            order to `data.shuffle`.
        """
        return None

    def data_digest(self) -> str | None:
        """A digest of all samples of all splits, such as their SHA-256.

        Checkpoints keep it: a run does not go on with other data, and an evaluation on other data
        says so. None, the default, compares the first microbatch only.
        """
        return None

    def data_remarks(self) -> Sequence[str]:
        """Remarks about the data that users should know, such as values that were corrected.

        Each is a warning at the start of a run, and a line of an evaluation.
        """
        return ()

    def build_optimizer(
        self, model: Any
    ) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None:
        """An optimizer over `model.parameters()`; None takes the one `config.optimizer` names.

        Several by name, such as `{"encoder": AdamW(…), "head": SGD(…)}`, step one after another in
        every step. Names are identifiers; a parameter belongs to one optimizer at most, and one
        that belongs to none stays as it is. The learning rate that is reported is that of the first
        parameter group of the first one.

        With `phases`, one for each phase, by its name: a step then has that of its phase alone. A
        single one steps all parameters in each phase, with gradients of zero for those that the
        phase's loss does not depend on.
        """
        return None

    def build_scheduler(
        self, optimizer: Any
    ) -> LRScheduler | Scheduler | Mapping[str, LRScheduler | Scheduler] | None:
        """A learning-rate scheduler of `torch.optim.lr_scheduler`, instead of `config.schedule`.

        It is stepped after each step of its optimizer, before `after_step`; `ReduceLROnPlateau`
        after each evaluation, by the metric that `watch` names. `lockstep.Scheduler` says
        otherwise: each epoch, another metric. Its state is saved by its `state_dict`. It must not
        look at ranks, time or files.

        Args:
            optimizer: what `build_optimizer` has returned, or the one that `config.optimizer`
                names; a dict of them, if it has returned several.

        Returns:
            A scheduler of that optimizer; of several, a dict of schedulers by the names of
            optimizers, in which some may be missing. None goes by `config.schedule`.
        """
        return None

    def lr_factor(
        self, step: int, total_steps: int
    ) -> float | Sequence[float] | Mapping[str, float | Sequence[float]]:
        """What the learning rate is multiplied with at a step, instead of `config.schedule`.

        It must be a function of its arguments and the config alone. `lockstep.lr_factor` gives the
        factors of a schedule of the config: a task may have several.

        Args:
            step: number of the step, from 0.
            total_steps: number of steps of the whole run.

        Returns:
            One factor for all parameter groups of the optimizer, or one for each. Of several
            optimizers: for all groups of all of them in their order, or by name, for each optimizer
            one factor or one for each of its groups.
        """
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        """A batch from samples, where the dataset does not make batches itself."""
        return default_collate(samples)

    def after_step(self, model: Any, step: int) -> None:  # noqa: B027
        """Change what a step changes beside the optimizer: averages of weights, counters, targets.

        Runs once for each optimizer step, on every rank alike and with the same random state, after
        the parameters have been stepped. It must not look at ranks, batches, time or files, or the
        replicas part. State of the task's own that it changes belongs in `state_dict`.

        Args:
            model: model in training mode; its parameters and buffers may be changed in place.
            step: number of optimizer steps that have been done, 1 after the first.
        """

    def hooks(self) -> Sequence[Hook]:
        """What is to be done beside training, called in this order; see `lockstep.Hook`.

        Called once on every rank, before the model is built.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """State of the task's own by name: tensors, and values that JSON can hold.

        It is saved in checkpoints, copied to ranks that join, and compared across ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, before training goes on.

        Raises:
            TaskError: there is state, and the task does not say how to load it.
        """
        if state:
            raise TaskError(
                f"{type(self).__name__}.load_state_dict: is missing; there is state to load: "
                f"{', '.join(sorted(state))}"
            )

    @property
    def name(self) -> str:
        """A short name for run directories and logs."""
        return type(self).__name__.lower()


def has_carry(task: Task) -> bool:
    """Whether microbatches of a task carry state from one step to the next."""
    return type(task).carry is not Task.carry


def has_batch_loss(task: Task) -> bool:
    """Whether a task's loss is one over the whole global batch."""
    return type(task).batch_loss is not Task.batch_loss


def check_config(kind: type[Task], config: TrainConfig) -> None:
    """Refuse a config that is not of a task's own class.

    Raises:
        TaskError: naming both classes.
    """
    if not isinstance(config, kind.Config):
        raise TaskError(
            f"{kind.__name__}: needs a {kind.Config.__name__}, got a {type(config).__name__}"
        )
