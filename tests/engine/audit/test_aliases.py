"""What shares a parameter's memory without being it is refused: it would not follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine.audit.hints import check_aliases
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError


class Nothing(Task):
    """A task that only keeps what it is given."""

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def dataset(self, split: str) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise NotImplementedError


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def view_as_buffer() -> nn.Module:
    model = two()
    model[0].register_buffer("wt", model[0].weight.detach().t())
    return model


def row_in_an_attribute() -> nn.Module:
    model = two()
    model[1].rows = [model[0].weight[1]]
    return model


def same_memory() -> nn.Module:
    model = two()
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def one_element() -> nn.Module:
    model, both = two(), torch.zeros(17)
    model[0].weight = nn.Parameter(both[:9].view(3, 3))
    model[1].weight = nn.Parameter(both[8:].view(3, 3))
    return model


def spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (spectral_norm, r"weight_orig.*; use torch\.nn\.utils\.parametrizations\.spectral_norm"),
        (view_as_buffer, r"0\.wt: shares memory with the parameter 0\.weight"),
        (row_in_an_attribute, r"rows.*: shares memory with the parameter 0\.weight"),
        (same_memory, r"0\.weight: shares memory with the parameter 1\.weight"),
        (one_element, r"0\.weight: shares memory with the parameter 1\.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_would_stay_behind(build: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        check_aliases(Nothing(), build())


def test_a_view_that_the_task_keeps() -> None:
    task, model = Nothing(), two()
    vars(task)["first"] = model[0].weight.data
    with pytest.raises(TaskError, match=r"task\.first: shares memory with the parameter 0\.weight"):
        check_aliases(task, model)


def test_what_does_not_share_a_trained_element() -> None:
    task, model, both = Nothing(), two(), torch.zeros(3, 6)
    vars(task)["model"] = model
    vars(task)["weights"] = list(model.parameters())
    model[0].weight = nn.Parameter(both[:, :3])
    model[1].weight = nn.Parameter(both[:, 3:])
    model.append(nn.Linear(3, 3))
    model[2].weight = model[1].weight
    model.append(nn.LSTM(3, 3))
    model.append(nn.Linear(3, 3).requires_grad_(False))
    model[4].register_buffer("wt", model[4].weight.t())
    model[4].register_buffer("empty", model[0].weight.detach()[:0])
    check_aliases(task, model)
