"""The device that a rank computes on."""

from __future__ import annotations

import torch

from lockstep.errors import ConfigError
from lockstep.launchers.rank.environment import Environment


def choose_device(wanted: str, environment: Environment) -> torch.device:
    """The device of this rank: its own GPU if there is one for each rank of the host.

    Raises:
        ConfigError: device=cuda, and there is no GPU for this rank.
    """
    device = find_device(wanted, environment)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def find_device(wanted: str, environment: Environment) -> torch.device:
    """As `choose_device`, without making it this process's current one."""
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and count < environment.local_world_size):
        return torch.device("cpu")
    if environment.local_rank >= count:
        raise ConfigError(
            f"device='cuda': this host has {count} GPUs for {environment.local_world_size} ranks; "
            "start fewer ranks or set device=cpu"
        )
    return torch.device("cuda", environment.local_rank)
