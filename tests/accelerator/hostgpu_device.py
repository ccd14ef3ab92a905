"""Adds `hostgpu` to torch when that is imported, as a package of an accelerator's maker does.

Torch calls `autoload` by the entry point `torch.backends`.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType
from typing import Any

import torch

NAME = "hostgpu"


def autoload() -> None:
    """Register the device, its module and the backend that moves its tensors between ranks."""
    import _hostgpu as extension

    if hasattr(torch, NAME):
        return
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module_of(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.distributed.Backend.register_backend(
        "hostccl", _create_group, extended_api=True, devices=[NAME]
    )
    if os.environ.get("HOSTGPU_TRACE"):
        extension.listen(_say_where)


def _create_group(options: Any, more: Any) -> Any:
    from hostccl import create_group

    return create_group(options, more)


def _say_where(why: str) -> None:
    lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()]
    own = [line for line in lines if "/lockstep/" in line or "/torch/optim" in line]
    print(f"WAIT {why} {' < '.join(own[:-8:-1])}", file=sys.stderr, flush=True)


def module_of(extension: ModuleType) -> ModuleType:
    """What `torch.cuda` is to CUDA."""
    count: int = extension.device_count()

    def generator(device: int | str | torch.device = -1) -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device).index
        return module.default_generators[
            extension.current_device() if index is None or index < 0 else index
        ]

    module = ModuleType(f"torch.{NAME}")
    given = {
        "default_generators": tuple(extension.default_generator(n) for n in range(count)),
        "_is_in_bad_fork": extension.is_in_bad_fork,
        "is_initialized": extension.is_initialized,
        "is_available": lambda: True,
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(torch.device(device).index),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in module.default_generators],
        "get_rng_state": lambda device=-1: generator(device).get_state(),
        "set_rng_state": lambda state, device=-1: generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "waits": extension.waits,
        "reset": extension.reset,
    }
    vars(module).update(given)
    return module
