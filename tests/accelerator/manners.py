"""What `hostgpu` does as a GPU does, and what the engine says of it."""

from __future__ import annotations

import os

import pytest
import torch

from lockstep import TrainConfig
from lockstep.data.loader import SMALL_BYTES, BatchCopies
from lockstep.errors import ConfigError
from lockstep.launching.api import on_device
from lockstep.launching.rank.environment import Environment

ALONE = Environment("python", 0, 1, 0, 1)
CONFIG = TrainConfig(device="accelerator")


def enter(environment: Environment) -> torch.device:
    """The device of a rank."""
    with on_device(CONFIG, environment) as device:
        return device


def check() -> None:
    """Try all of it."""
    ranks = Environment("local", 8, 9, 8, 9)
    with pytest.raises(ConfigError, match="this host has 8 GPUs for 9 ranks"):
        enter(ranks)
    second = enter(Environment("local", 1, 2, 1, 2))
    assert second == torch.device("hostgpu", 1)
    assert torch.accelerator.current_device_index() == 1
    here = torch.arange(6.0, device="hostgpu")  # the device of the rank, not the first one
    assert here.device == second
    pattern = "same device"
    with pytest.raises(RuntimeError, match=pattern):
        here + torch.ones(6)
    with pytest.raises(RuntimeError, match=pattern):
        here + torch.ones(6, device="hostgpu:0")
    with pytest.raises(TypeError, match="numpy"):
        here.numpy()

    module = torch.get_device_module()
    module.reset()
    pinned = torch.zeros(6, pin_memory=True)
    here.copy_(pinned, non_blocking=True)
    assert module.waits() == {}
    here.sum().item()
    here.cpu()
    here.copy_(torch.zeros(6))
    here[here > 0]
    expected = {"item": 1, "to host": 1, "to device": 1, "aten::nonzero": 1}
    assert module.waits() == expected, module.waits()

    if not (child := os.fork()):
        try:
            with pytest.raises(ConfigError, match="was forked from has used the GPU"):
                enter(ALONE)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    races(second)


def races(device: torch.device) -> None:
    """What a copy on a stream of its own needs, and that those of batches have it."""
    module, stream = torch.get_device_module(), torch.Stream(device)
    pinned = torch.ones(SMALL_BYTES, pin_memory=True)

    def copied() -> torch.Tensor:
        with stream:
            return pinned.to(device, non_blocking=True)

    with pytest.raises(RuntimeError, match="race"):
        copied().sum()
    module.reset()
    copy = copied()
    torch.accelerator.current_stream().wait_stream(stream)
    copy.sum()
    del copy
    assert module.waits() == {"race: freed while another stream reads it": 1}
    module.reset()
    copies = BatchCopies(device)
    assert copies.stream is not None
    for batch in range(3):
        there = copies([torch.full((SMALL_BYTES,), batch), "label"])
        assert there[0].device == device
        assert bool((there[0] == batch).all())
    del there
    assert module.waits() == {"item": 3}
