"""A task never goes on with another config than the run's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.engine.task import Loss, Task
from lockstep.engine.task_config import with_config
from lockstep.errors import TaskError


class OwnConfig(TrainConfig):
    width: int = 3


class Lazy(Task):
    Config = OwnConfig

    def build_model(self):
        return nn.Linear(1, self.config.width)

    def dataset(self, split):
        return None

    def loss(self, model, batch):
        return Loss(torch.zeros(()), 1)


class Eager(Lazy):
    def __init__(self, config=None):
        super().__init__(config)
        self.width = self.config.width


class Closed(Lazy):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.width = self.config.width


def test_a_task_gets_the_config():
    task = Lazy()
    assert with_config(task, OwnConfig(width=5)) is task
    assert task.build_model().out_features == 5


def test_a_task_that_used_its_config_is_rebuilt():
    task = with_config(Eager(), OwnConfig(width=5))
    assert (type(task), task.width, task.config.width) == (Eager, 5, 5)
    assert with_config(task, OwnConfig(width=5)) is task


def test_a_task_that_cannot_be_rebuilt_is_refused():
    task = with_config(Closed("here"), OwnConfig(lr=0.5))
    assert (task.config.lr, task.folder) == (0.5, "here")
    with pytest.raises(TaskError, match=r"width=5: Closed.__init__ may have used width=3 already"):
        with_config(Closed("here"), OwnConfig(width=5))


def test_a_config_that_is_not_the_tasks_own():
    for make in (Lazy, lambda config: with_config(Lazy(), config)):
        with pytest.raises(TaskError, match="Lazy: needs a OwnConfig, got a TrainConfig"):
            make(TrainConfig(lr=0.5))
