"""Autocast and dynamic loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lockstep.config import PrecisionConfig
from lockstep.parsing import as_type

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = 2.0**24


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context forward passes run in; parameters and gradients stay as they are."""
    if config.dtype == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[config.dtype])


@dataclass(frozen=True)
class LossScaleState:
    """The state of a `LossScale` that checkpoints keep."""

    value: float
    good_steps: int

    @classmethod
    def from_json(cls, values: Any) -> LossScaleState:
        """From a manifest's values, by name or, as earlier versions wrote them, in order.

        Raises:
            ValueError: names what is missing or of another type.
        """
        if isinstance(values, list):
            return cls(*as_type(tuple[float, int], values))
        return as_type(cls, values)


class LossScale:
    """Keeps small fp16 gradients from vanishing; always 1 for other dtypes.

    All ranks see the same gradient norm, so all take the same decisions.

    Attributes:
        value: factor of losses in backward passes.
        good_steps: number of steps since the last change.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.enabled = config.dtype == "fp16"
        self.value = config.loss_scale if self.enabled else 1.0
        self.good_steps = 0
        self._growth_interval = config.growth_interval

    def state_dict(self) -> dict[str, Any]:
        """As JSON values by name."""
        return asdict(LossScaleState(self.value, self.good_steps))

    def load_state_dict(self, values: Any) -> None:
        """Go on from what `state_dict` said.

        Raises:
            ValueError: these are no such values.
        """
        state = LossScaleState.from_json(values)
        self.value, self.good_steps = state.value, state.good_steps

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after `growth_interval` steps without one."""
        if not self.enabled:
            return
        if not finite:
            self.value, self.good_steps = max(self.value / 2, 2.0**-14), 0
            return
        self.good_steps += 1
        if self.good_steps >= self._growth_interval:
            self.value, self.good_steps = min(self.value * 2, _LARGEST), 0
