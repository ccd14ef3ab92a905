"""Checks of arguments that all simulators share."""

from __future__ import annotations

import torch

from lockstep.errors import ConfigError


def checked_amplitudes(
    dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.dtype, torch.device]:
    """The dtype of amplitudes, and the device on which they are computed.

    Raises:
        ConfigError: the dtype is not complex64 or complex128, or there is no such device.
    """
    if dtype not in (torch.complex64, torch.complex128):
        raise ConfigError(f"dtype {dtype}: must be torch.complex64 or torch.complex128")
    try:
        return dtype, torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r}: there is no such device") from error
