"""A config that notes reads of the run's length."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.config import TrainConfig
from lockstep.engine.task_config import TOTAL_STEPS, LengthReads, length_reads, plain, watched


class Config(TrainConfig):
    """With a key of its own."""

    width: int = 3


def seen() -> tuple[Config, LengthReads]:
    reads = LengthReads()
    return watched(Config(epochs=7), reads), reads


@pytest.mark.parametrize(
    "read",
    [
        lambda c: c.epochs,
        lambda c: c.steps,
        lambda c: getattr(c, "epochs"),  # noqa: B009
        lambda c: c.hash,
        lambda c: c.to_yaml(),
        lambda c: c.model_dump(),
        lambda c: c.model_dump_json(),
        lambda c: dict(c),
        lambda c: vars(c),
        repr,
        str,
        hash,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda c: c.model_copy(update={"width": 4}).epochs,
        lambda c: c == Config(epochs=7),
        lambda c: Config(epochs=7) == c,
        lambda c: c != Config(epochs=7),
    ],
)
def test_every_way_to_the_length_is_noted(read: Callable[[Any], object]) -> None:
    config, reads = seen()
    read(config)
    assert reads.names


def test_other_keys_are_not() -> None:
    config, reads = seen()
    assert (config.width, config.lr, config.optimizer.name) == (3, 1e-3, "adamw")
    assert isinstance(config, Config)
    assert type(config).__name__ == "Config"
    assert not config.shards_optimizer
    assert length_reads(config) is reads
    assert not reads.names


def test_plain_and_pickled_ones_are_the_callers_class() -> None:
    config, _ = seen()
    for made in (plain(config), pickle.loads(pickle.dumps(config))):
        assert type(made) is Config
        assert made == Config(epochs=7)
        assert length_reads(made) is None
    assert plain(made) is made


def test_watching_again_is_watching_once() -> None:
    config, reads = seen()
    other = LengthReads()
    again = watched(config, other)
    assert again.epochs == 7
    assert (len(other.names), len(reads.names)) == (1, 0)
    assert type(plain(again)) is Config


def test_what_was_read_travels_as_bits() -> None:
    config, reads = seen()
    assert reads.bits == 0
    config.steps  # noqa: B018
    reads.add([TOTAL_STEPS, "something that all ranks have read in a checkpoint"])
    other = LengthReads()
    other.add(["config.epochs"])
    other.add_bits(reads.bits)
    assert other.names == {"config.epochs", "config.steps", TOTAL_STEPS}
