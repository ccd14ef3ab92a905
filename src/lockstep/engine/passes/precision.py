"""What passes round: mixed precision with its loss scale, and shapes that the compiler sees."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import PrecisionConfig
from lockstep.config.parsing import as_type

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = 2.0**24
NOTHING = nullcontext()
"""A context without effect: one for all, since each step enters it several times."""


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context forward passes run in; parameters and gradients stay as they are."""
    if config.dtype == "fp32":
        return NOTHING
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


_COMPILER = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""Where `torch._disable_dynamo` keeps what it calls instead of a function."""

_MANY = 2**30


def keep_compiler_out() -> None:
    """Have the compiler imported by nothing but code that compiles.

    Its import takes longer than that of all the rest of torch, and the first optimizer of a process
    asks for it, only to tell the compiler what to leave alone.

    From then on every shape is compiled by itself, whichever shapes were there before. Else a
    kernel for any size, or none, takes over after the first few shapes, rounds otherwise, and
    ranks meet shapes in different orders. Who compiles with `dynamic=True` asks for that.
    """
    if _COMPILER in sys.modules:
        _compile_by_shape()
    elif not any(isinstance(finder, _Awaited) for finder in sys.meta_path):
        for method in _disabled_methods():
            vars(method)[_DISABLED] = method
        sys.meta_path.insert(0, _Awaited())


class _Awaited(MetaPathFinder):
    """Waits for the import of the compiler."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loaded(spec.loader)
        return spec


class _Loaded(Loader):
    """Loads the compiler as another loader does, and then says what it may go by."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "it is being imported"
        module.__loader__ = module.__spec__.loader = self._loader
        for method in _disabled_methods():
            vars(method).pop(_DISABLED, None)
        self._loader.exec_module(module)
        _compile_by_shape()


def _disabled_methods() -> Iterator[Callable[..., Any]]:
    """Methods that the compiler is to leave alone: of optimizers, and of modes of dispatch."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(optim.Optimizer, name)
        if hasattr(method, "__wrapped__"):
            yield method.__wrapped__
    for mode in TorchDispatchMode.__subclasses__():
        if hasattr(mode.__torch_dispatch__, "__wrapped__"):
            yield mode.__torch_dispatch__.__wrapped__


def use_deterministic_algorithms(mode: bool, warn_only: bool = False) -> None:
    """As torch's function of this name, which imports the compiler to tell it so."""
    if _COMPILER in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def _compile_by_shape() -> None:
    if torch.are_deterministic_algorithms_enabled():  # and that was not said (see above)
        kernels: Any = importlib.import_module("torch._inductor.config")
        kernels.deterministic = True
    config = sys.modules[_COMPILER].config
    config.automatic_dynamic_shapes = False
    config.recompile_limit = _MANY
    config.accumulated_recompile_limit = _MANY
