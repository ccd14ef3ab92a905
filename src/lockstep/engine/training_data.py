"""The training split of a task, its batches, and the order of its samples."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchSource, Loader, dataset_size
from lockstep.data.passes import is_stream, stream_length
from lockstep.data.sampler import (
    BatchLayout,
    ElasticSampler,
    GivenOrder,
    Order,
    order_generator,
    weighted,
)
from lockstep.data.stream_reader import StreamLoader
from lockstep.engine.task import Task, own_collate
from lockstep.errors import ConfigError, DataError, TaskError


def training_data(
    task: Task, config: TrainConfig, device: torch.device
) -> tuple[BatchLayout, BatchSource, str | None]:
    """The layout of batches, their loader, and a digest of the task's own order of samples.

    Raises:
        LockstepError: the task's data cannot be trained on with this config.
    """
    dataset = task.dataset("train")
    if dataset is None:
        raise DataError("dataset('train'): is None; training needs a dataset")
    if is_stream(dataset):
        return *_stream(task, config, device, dataset), None
    data = config.data
    if data.shuffle_buffer:
        raise ConfigError(
            f"data.shuffle_buffer={data.shuffle_buffer}: is for streams, and dataset('train') is a "
            f"map-style {type(dataset).__name__}, which data.shuffle shuffles as a whole; leave "
            "the key out"
        )
    num_samples = dataset_size(dataset, "train")
    order, length, digest = _own_order(task, config, num_samples)
    sampler = ElasticSampler(
        length,
        config.batch_size,
        config.num_microbatches,
        config.seed,
        data.shuffle,
        data.drop_last,
        order,
    )
    loader = Loader(
        dataset, own_collate(task), sampler, config.seed, device, data.num_workers, data.prefetch
    )
    return sampler, loader, digest


def _stream(
    task: Task, config: TrainConfig, device: torch.device, dataset: Any
) -> tuple[BatchLayout, BatchSource]:
    """The layout of a stream's batches, and their loader.

    Raises:
        LockstepError: the stream cannot be trained on with this config.
    """
    kind, data = type(dataset).__name__, config.data
    length = stream_length(dataset, "train")
    if length is None and config.steps is None:
        raise ConfigError(
            f"steps: must be set, since dataset('train') is a {kind} without __len__, so it is not "
            "known how many steps an epoch has"
        )
    if data.num_workers:
        raise ConfigError(
            f"data.num_workers={data.num_workers}: dataset('train') is a {kind}, a stream, which "
            "is read in the training process; set data.num_workers=0"
        )
    for hook, given in (
        ("sample_weights", task.sample_weights()),
        ("epoch_indices", task.epoch_indices(0, order_generator(config.seed, 0))),
    ):
        if given is not None:
            raise TaskError(
                f"Task.{hook}: is for map-style datasets; dataset('train') is a {kind}, a stream, "
                "which has its own order"
            )
    layout = BatchLayout(length, config.batch_size, config.num_microbatches, data.drop_last)
    loader = StreamLoader(
        dataset, own_collate(task), layout, config.seed, device, data.shuffle_buffer
    )
    loader.check_skipping()
    return layout, loader


def _own_order(
    task: Task, config: TrainConfig, num_samples: int
) -> tuple[Order | None, int, str | None]:
    """The task's own order, if any, the number of samples in it, and its digest."""
    if not num_samples:
        return None, 0, None
    weights = task.sample_weights()
    first = task.epoch_indices(0, order_generator(config.seed, 0))
    if weights is not None and first is not None:
        raise TaskError(
            f"{type(task).__name__}: has sample_weights and epoch_indices, which both say what an "
            "epoch consists of; leave one of them out"
        )
    if first is not None:
        given = GivenOrder(task.epoch_indices, num_samples, config.seed)
        return given, given.length, given.digest
    if weights is None:
        return None, num_samples, None
    if not config.data.shuffle:
        raise ConfigError(
            "data.shuffle=False: Task.sample_weights has samples drawn at random; leave the key "
            "out, or give the order by Task.epoch_indices"
        )
    order = weighted(weights, num_samples)
    drawn = order(0, order_generator(config.seed, 0))
    return order, num_samples, hashlib.sha256(np.ascontiguousarray(drawn).tobytes()).hexdigest()
