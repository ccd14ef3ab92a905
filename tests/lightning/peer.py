"""Lightning's own training of `modules.py`, for comparison."""

from __future__ import annotations

import inspect
import warnings

import torch
from tests.lightning import modules
from torch.utils.data import DataLoader

import lightning as L

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1,
}  # fmt: skip


class Losses(L.Callback):
    """The loss of each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def by_lightning(kind, start, epochs, pieces=1, **arguments):
    """What Lightning's Trainer makes of a module.

    Args:
        kind: class of the module.
        start: parameters and buffers to begin with.
        epochs: number of epochs.
        pieces: parts that a batch is cut into, of which gradients are accumulated.
        arguments: arguments of the module.

    Returns:
        The module, its losses by step, and the numbers of its last evaluation.
    """
    losses = Losses()
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=[losses], accumulate_grad_batches=pieces, **QUIET
    )
    module = kind(**arguments)
    data = None
    if "train_dataloader" not in vars(kind) and kind is modules.Autoencoder:
        data = modules.Points()
    module.on_fit_start = lambda: module.load_state_dict(start)  # when setup has made layers
    if pieces > 1:
        whole = module.train_dataloader()
        module.train_dataloader = lambda: DataLoader(
            whole.dataset, batch_size=whole.batch_size // pieces
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data)
    assert inspect.isclass(kind)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module, losses.seen, metrics


def start_of(task):
    """Parameters and buffers of a task's model before its first step, as a run has them."""
    from lockstep.engine.step.model import build_model

    return build_model(task, task.config, torch.device("cpu")).state_dict()
