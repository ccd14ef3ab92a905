"""The training split of a task, its batches, and the order of its samples."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.data.loader import BatchSource, Loader
from lockstep.data.parts import StreamParts
from lockstep.data.parts_loader import PartsLoader
from lockstep.data.passes import is_stream, stream_length
from lockstep.data.sampler import (
    BatchLayout,
    ElasticSampler,
    GivenOrder,
    Order,
    PartsLayout,
    order_generator,
    weighted,
)
from lockstep.data.stream_reader import StreamLoader
from lockstep.engine.runtime import Runtime, everywhere
from lockstep.engine.task import Task
from lockstep.engine.task_config import own_collate
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
    if config.data.stream_shards:
        return *_parts(task, config, device, dataset), None
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
    _check_length_known(config, length, f"is a {kind} without __len__")
    if data.num_workers:
        raise ConfigError(
            f"data.num_workers={data.num_workers}: dataset('train') is a {kind}, a stream, which "
            "is read in the training process; set data.num_workers=0, or let workers read parts "
            "of it (data.stream_shards)"
        )
    _check_order_free(task, config, f"is a {kind}, a stream")
    layout = BatchLayout(length, config.batch_size, config.num_microbatches, data.drop_last)
    loader = StreamLoader(
        dataset, own_collate(task), layout, config.seed, device, data.shuffle_buffer
    )
    loader.check_skipping()
    return layout, loader


def _parts(
    task: Task, config: TrainConfig, device: torch.device, dataset: Any
) -> tuple[BatchLayout, BatchSource]:
    """The layout of the batches of a stream that is read in parts, and their loader.

    Raises:
        LockstepError: the dataset has no such parts, or they cannot be trained on with this config.
    """
    kind, data = type(dataset).__name__, config.data
    if not hasattr(dataset, "shard"):
        whole = "reads its own samples only" if not is_stream(dataset) else "reads the whole stream"
        raise ConfigError(
            f"data.stream_shards={data.stream_shards}: dataset('train') is a {kind}, which has no "
            "shard(index, count) that returns a part of it; add one, or leave the key out: then "
            f"every rank {whole}"
        )
    parts = StreamParts(dataset, data.stream_shards, config.num_microbatches, config.seed)
    _check_length_known(config, parts.lengths, f"is a {kind}, with parts that have no __len__")
    _check_order_free(task, config, f"is a {kind} that is read in parts")
    microbatches = range(config.num_microbatches)
    lengths = None if parts.lengths is None else [parts.length_of(m) or 0 for m in microbatches]
    layout = PartsLayout(lengths, config.batch_size, config.num_microbatches, data.drop_last)
    loader = PartsLoader(
        dataset, parts, own_collate(task), layout, config.seed, device,
        data.num_workers, data.prefetch, data.shuffle_buffer,
    )  # fmt: skip
    loader.check_resuming()
    return layout, loader


def check_parts(loader: BatchSource, transport: Transport) -> None:
    """Refuse parts of a stream that are empty, or that have samples in common; a collective.

    Each rank reads the beginnings of some parts.

    Raises:
        DataError: on all ranks.
    """
    if not isinstance(loader, PartsLoader) or transport.is_joining:
        return
    parts = loader.parts
    own = range(transport.rank, parts.count, transport.size)
    digests = everywhere(transport, lambda: {i: parts.first_digests(i) for i in own})
    found = [pair for theirs in transport.gather_json([*digests.items()]) for pair in theirs]
    everywhere(transport, lambda: parts.check_apart(dict(found)))


def share_places(loader: BatchSource, runtime: Runtime, step: int, all_known: bool = False) -> None:
    """Tell all ranks how far the parts of a stream have been read; a collective.

    Args:
        loader: loader of the samples.
        runtime: the group of ranks.
        step: number of the next step, from 0.
        all_known: whether some ranks may not know what was told before.

    Raises:
        GroupBroken: a rank was lost.
    """
    if loader.has_places and runtime.transport.size > 1:
        runtime.at("places", step)
        for places in runtime.transport.gather_json(loader.places(step, all_known)):
            loader.add_places(places)


def _check_length_known(config: TrainConfig, length: object, which: str) -> None:
    if length is None and config.steps is None:
        raise ConfigError(
            f"steps: must be set, since dataset('train') {which}, so it is not known how many "
            "steps an epoch has"
        )


def _check_order_free(task: Task, config: TrainConfig, which: str) -> None:
    """Refuse a task that gives an order of its own where the data have one."""
    for hook, given in (
        ("sample_weights", task.sample_weights()),
        ("epoch_indices", task.epoch_indices(0, order_generator(config.seed, 0))),
    ):
        if given is not None:
            raise TaskError(
                f"Task.{hook}: is for map-style datasets; dataset('train') {which}, which has its "
                "own order"
            )


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


def dataset_size(dataset: Any, split: str) -> int:
    """Number of samples.

    Raises:
        DataError: the dataset has no `__len__` or `__getitem__`.
    """
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"dataset({split!r}): a {type(dataset).__name__} has no {missing[0]}; a dataset must "
            "have __len__ and __getitem__ (torch.utils.data.Dataset)"
        )
    return len(dataset)
