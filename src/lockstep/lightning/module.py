"""A LightningModule as the model of a task: what it sees of Lightning, and what it is refused."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from lockstep.engine.log import log
from lockstep.errors import TaskError
from lockstep.lightning.data import overrides
from lockstep.lightning.logs import Journal, metrics_in

if TYPE_CHECKING:
    from lockstep.lightning.task import LightningTask

_MANUAL = (
    "with one optimizer, return the loss and leave automatic_optimization as it is; with several, "
    "write a lockstep.Task with phases, one for each (docs/tasks.md)"
)
_GRADIENTS = "gradients are summed over all microbatches and ranks after the last of these"
_AT_STEP = f"{_GRADIENTS}; do it in on_train_batch_end, which is called after each step"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "backward": _GRADIENTS,
        "on_before_backward": _AT_STEP,
        "on_after_backward": _AT_STEP,
        "on_before_optimizer_step": f"{_AT_STEP}; the norm of the gradient is logged by itself",
        "on_before_zero_grad": _AT_STEP,
        "configure_gradient_clipping": f"{_GRADIENTS}; set clip_norm in the config",
        "optimizer_step": f"{_GRADIENTS}; warm up by a scheduler in configure_optimizers",
        "optimizer_zero_grad": f"{_GRADIENTS}; leave it out",
        "lr_scheduler_step": "Lockstep steps schedulers itself; leave it out",
        "configure_sharded_model": "use configure_model, and sharding in the config",
        "on_save_checkpoint": "checkpoints hold parameters and buffers; keep it in a buffer",
        "on_load_checkpoint": "checkpoints hold parameters and buffers; keep it in a buffer",
        "on_validation_model_eval": "modes are set by Lockstep; leave it out",
        "on_validation_model_train": "modes are set by Lockstep; leave it out",
        "on_validation_model_zero_grad": "gradients are cleared by Lockstep; leave it out",
        "on_test_model_eval": "modes are set by Lockstep; leave it out",
        "on_test_model_train": "modes are set by Lockstep; leave it out",
    }
)
"""Methods that Lockstep does not call, with what to do instead."""

_SEEN = (
    "current_epoch, global_step, max_epochs, max_steps, num_training_batches, "
    "estimated_stepping_batches, gradient_clip_val, training, validating, testing, evaluating, "
    "sanity_checking, datamodule, optimizers"
)
_RANKS = "is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "strategy"


class TrainerView:
    """What a module's `self.trainer` has; anything else is refused by name.

    Attributes:
        stage: what the module does: `train`, `val` or `test`, or `hook` between steps.
        journal: what it logs in the present pass; None between passes.
    """

    def __init__(self, task: LightningTask, datamodule: Any) -> None:
        # Weak, so that what an audit reaches from the model is the model's.
        self._task = weakref.ref(task)
        self._datamodule = datamodule
        self.stage = "hook"
        self.journal: Journal | None = None

    @contextmanager
    def during(self, stage: str, journal: Journal | None) -> Iterator[None]:
        """Within it, the module is in a stage, and logs into a journal."""
        self.stage, self.journal = stage, journal
        try:
            yield
        finally:
            self.stage, self.journal = "hook", None

    @property
    def task(self) -> LightningTask:
        """The task whose model the module is."""
        task = self._task()
        assert task is not None, "the model of a task lives no longer than it"
        return task

    @property
    def datamodule(self) -> Any:
        """The LightningDataModule, if there is one."""
        return self._datamodule

    @property
    def current_epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self.task.clock.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps that have been done."""
        return self.task.clock.step

    @property
    def max_epochs(self) -> int:
        """Number of epochs of the run; -1 where it is `steps` that end it."""
        return -1 if self.task.config.steps else self.task.config.epochs

    @property
    def max_steps(self) -> int:
        """Number of steps of the run; -1 where it is `epochs` that end it."""
        return self.task.config.steps or -1

    @property
    def num_training_batches(self) -> int:
        """Number of steps of an epoch."""
        return self.task.steps_per_epoch

    @property
    def estimated_stepping_batches(self) -> int:
        """Number of steps of the whole run."""
        config = self.task.config
        return config.steps or config.epochs * self.task.steps_per_epoch

    @property
    def gradient_clip_val(self) -> float | None:
        """The norm that gradients are scaled down to."""
        return self.task.config.clip_norm

    @property
    def training(self) -> bool:
        """Whether this is a training step, or a hook of training."""
        return self.stage in ("train", "hook")

    @property
    def validating(self) -> bool:
        """Whether this is a validation."""
        return self.stage == "val"

    @property
    def testing(self) -> bool:
        """Whether this is a test."""
        return self.stage == "test"

    @property
    def evaluating(self) -> bool:
        """Whether this is a validation or a test."""
        return self.validating or self.testing

    @property
    def sanity_checking(self) -> bool:
        """False: before the first step, Lockstep tries steps and evaluations by itself."""
        return False

    @property
    def optimizers(self) -> list[Any]:
        """The optimizer, in a list; its learning rates may be read."""
        return [] if self.task.optimizer is None else [self.task.optimizer]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _RANKS:
            raise TaskError(
                f"self.trainer.{name}: what a module computes must not depend on ranks; to print "
                "or write on one rank, use a lockstep.Hook with first_only = True"
            )
        if name in ("logger", "loggers"):
            raise TaskError(
                f"self.{name}: Lockstep writes curves, pictures and text itself; use self.log for "
                "numbers, and lockstep.log(name, value) in on_train_epoch_end for the others"
            )
        raise TaskError(f"self.trainer.{name}: is not there under Lockstep; there are: {_SEEN}")


class Adapted:
    """Methods of a LightningModule that Lockstep has its own of."""

    _trainer: TrainerView
    _in_evaluation_mode: tuple[str, ...]

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number, or a metric of torchmetrics, as Lightning's `log`."""
        asked = _SIGNATURE.bind(name, value, *args, **options).arguments
        journal = self._trainer.journal
        if journal is None:
            log(name, value.compute() if hasattr(value, "compute") else value)
        else:
            journal.add(asked)

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Log several values by name, as Lightning's `log_dict`."""
        is_collection = hasattr(dictionary, "compute_groups")
        items = dictionary.items(keep_base=False) if is_collection else dictionary.items()
        for name, value in items:
            self.log(name, value, *args, **options)

    def train(self, mode: bool = True) -> Any:
        """Set the mode; modules that were made in evaluation mode stay in it, as in Lightning."""
        nn.Module.train(self, mode)  # type: ignore[type-var]
        if mode:
            for name in self._in_evaluation_mode:
                self.get_submodule(name).training = False  # type: ignore[attr-defined]
        return self

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, whose learning rates may be read."""
        found = self._trainer.optimizers
        return found[0] if len(found) == 1 else found

    def manual_backward(self, *args: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError(f"self.manual_backward: {_GRADIENTS}; {_MANUAL}")

    def clip_gradients(self, *args: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError(f"self.clip_gradients: {_GRADIENTS}; set clip_norm in the config")

    def toggle_optimizer(self, *args: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError(f"self.toggle_optimizer: {_GRADIENTS}; {_MANUAL}")

    def lr_schedulers(self) -> NoReturn:
        """Refused."""
        raise TaskError(
            "self.lr_schedulers: Lockstep steps schedulers itself; return them from "
            "configure_optimizers, with interval and frequency"
        )

    def all_gather(self, *args: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError(
            "self.all_gather: a step sees one microbatch, and no rank others' tensors; a loss over "
            "the whole batch is for a lockstep.Task (docs/tasks.md)"
        )

    def print(self, *args: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise TaskError(
            "self.print: every rank would print; use a lockstep.Hook with first_only = True"
        )


def adapt(module: Any, task: LightningTask, datamodule: Any) -> None:
    """Turn a new LightningModule into the model of a task, in place."""
    kind: Any = type(module)
    module.__class__ = _adapted(kind)
    module.trainer = TrainerView(task, datamodule)
    module._in_evaluation_mode = tuple(
        name for name, inner in module.named_modules() if name and not inner.training
    )
    for metric in metrics_in(module).values():
        metric.sync_on_compute = False
        metric._to_sync = False


@cache
def _adapted(kind: Any) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Adapted, kind), names | {"__doc__": kind.__doc__})


def check_module(module: Any) -> None:
    """Refuse a module with methods that Lockstep cannot honour.

    Raises:
        TaskError: naming the first, with what to do.
    """
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise TaskError(
            f"{kind}.automatic_optimization: is False: {_GRADIENTS}, which manual optimization "
            f"cannot wait for; {_MANUAL}"
        )
    for name, remedy in _REFUSED.items():
        if overrides(module, name):
            raise TaskError(f"{kind}.{name}: is not called under Lockstep: {remedy}")
    if not overrides(module, "training_step"):
        raise TaskError(f"{kind}.training_step: is missing; it returns the loss of a batch")


def check_datamodule(datamodule: Any) -> None:
    """Refuse a LightningDataModule with state of its own.

    Raises:
        TaskError: naming the method.
    """
    for name in ("state_dict", "load_state_dict", "on_exception"):
        if overrides(datamodule, name):
            raise TaskError(
                f"{type(datamodule).__name__}.{name}: is not called under Lockstep, which keeps "
                "the position in the data itself; leave it out"
            )


@contextmanager
def keeping_nothing(module: Any, stage: str) -> Iterator[None]:
    """Within it, a step of a stage (`training`, …) must keep no values of its batch in a list.

    Raises:
        TaskError: it does, or lacks the list, which a hook would make before the first batch.
    """
    instead = (
        "and a rank sees some batches only; log it by self.log, whose mean is taken over all "
        "batches, or update a metric of torchmetrics (CatMetric keeps values)"
    )
    lists = {k: len(v) for k, v in vars(module).items() if isinstance(v, list)}
    hooks = [n for n in (f"on_{stage}_start", f"on_{stage}_epoch_start") if overrides(module, n)]
    try:
        yield
    except AttributeError as error:
        if not hooks:
            raise
        raise TaskError(
            f"{stage}_step: {error}. If it is made by {hooks[-1]}, that is called when all batches "
            f"are done: make it in __init__. If {stage}_step keeps something there, it must not, "
            f"{instead}"
        ) from error
    for name, count in lists.items():
        if len(vars(module).get(name, ())) != count:
            raise TaskError(f"{stage}_step: keeps something in self.{name}, {instead}")


def step_arguments(method: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of some arguments that a step takes, by position, since their names are free.

    Args:
        method: `training_step`, `validation_step` or `test_step`.
        values: the batch, its number, and the number of its loader where there are several.

    Raises:
        TaskError: it takes others.
    """
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return values
    taken = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if any(p.default is p.empty for p in taken[len(values) :]) or any(
        p.name == "dataloader_iter" or p.kind is p.KEYWORD_ONLY for p in taken
    ):
        raise TaskError(
            f"{method.__qualname__}: takes {', '.join(p.name for p in taken)}; a step takes batch, "
            "batch_idx, and dataloader_idx where there are several loaders"
        )
    return values[: len(taken)]


def _as_lightning(
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> None:
    """The signature of Lightning's `log`."""


_SIGNATURE = inspect.signature(_as_lightning)
