"""Stepping parameters: any torch optimizer, on flat tensors or slices of them where it can be.

An element-wise optimizer computes each element of a parameter from the same elements of its
gradient and state. So it may as well step one flat tensor instead of many parameters, or only the
slice of it that this rank owns, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from lockstep.config import TrainConfig
from lockstep.errors import ConfigError, TaskError
from lockstep.parallel.layout import Range
from lockstep.train.flat import FlatTensors

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.RAdam, optim.NAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
_FUSED_ON_CPU = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)

Scalars = dict[str, dict[str, Any]]
"""Optimizer state that is not a whole tensor, as JSON: owner to key to value."""


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it may step flat tensors: torch's own, or one with `elementwise = True`."""
    declared = getattr(optimizer, "elementwise", None)
    return type(optimizer) in ELEMENTWISE if declared is None else bool(declared)


def default_optimizer(model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer that `config.optimizer` names, over all trainable parameters."""
    o = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    if o.name == "sgd":
        return optim.SGD(
            parameters,
            lr=config.lr,
            momentum=o.momentum,
            nesterov=o.nesterov,
            weight_decay=o.weight_decay,
        )
    kind = optim.Adam if o.name == "adam" else optim.AdamW
    return kind(parameters, lr=config.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)


def check_optimizer(optimizer: Any, model: nn.Module, config: TrainConfig) -> None:
    """Refuse what cannot work.

    Raises:
        TaskError: it is not an optimizer, needs a closure, or holds foreign parameters.
        ConfigError: it is to be sharded but is not element-wise.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, optim.Optimizer):
        raise TaskError(f"build_optimizer: must return a torch.optim.Optimizer, not a {name}")
    if isinstance(optimizer, optim.LBFGS):
        raise TaskError("build_optimizer: LBFGS needs a closure, which training steps do not have")
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for g in optimizer.param_groups for p in g["params"]):
        raise TaskError(
            f"build_optimizer: the {name} holds parameters that are not the model's; build it "
            "over the model.parameters() it is given"
        )
    if config.optimizer.sharded and not is_elementwise(optimizer):
        raise ConfigError(
            f"optimizer.sharded=True: {name} is not known to be element-wise, so it cannot step "
            "slices; set optimizer.sharded=false, or `elementwise = True` on its class"
        )


class Stepper:
    """Applies an optimizer to flat parameters and gradients.

    Attributes:
        optimizer: over flat tensors if it is element-wise.
        flat: the parameters.
        elementwise: whether it is.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        flat: FlatTensors,
        gradients: Sequence[Tensor],
        owned: Sequence[Sequence[Range]],
    ) -> None:
        """Bind the optimizer to memory.

        Args:
            optimizer: over the parameters in `flat`; changed to step flat tensors if it can.
            flat: the parameters.
            gradients: the mean gradient, laid out as `flat.flats`.
            owned: for each segment, the ranges of elements to step.
        """
        self.optimizer = optimizer
        self.flat = flat
        self._base_lr = [group["lr"] for group in optimizer.param_groups]
        self.elementwise = is_elementwise(optimizer)
        self._pieces: list[tuple[nn.Parameter, int, int, Range]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        if self.elementwise:
            self.own(owned)
        self.bind(gradients)

    def own(self, owned: Sequence[Sequence[Range]]) -> None:
        """Step these ranges of elements from now on; an optimizer's state is then lost."""
        self.optimizer.state.clear()
        self._make_pieces(owned)

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Take gradients from this memory from now on."""
        for parameter, _, segment, range_ in self._pieces:
            parameter.grad = gradients[segment][range_.first : range_.last]
        if not self.elementwise:
            self._gradients = [
                (tensor, self.flat.view(gradients, entry))
                for tensor, entry in zip(self.flat.tensors, self.flat.entries, strict=True)
            ]

    def step(self, lr_factor: float) -> None:
        """One optimizer step at the base learning rates times `lr_factor`."""
        for group, lr in zip(self.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * lr_factor
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.optimizer.step()
        for parameter, _ in self._gradients:
            parameter.grad = None

    @property
    def base_lr(self) -> float:
        """The first group's learning rate before the schedule."""
        return float(self._base_lr[0])

    def state_flats(self) -> dict[str, list[Tensor]]:
        """Each whole-tensor state as flats laid out as the parameters', zero where not owned."""
        flats: dict[str, list[Tensor]] = {}
        for segment, range_, key, value in self._tensor_states():
            if key not in flats:
                flats[key] = [torch.zeros_like(f) for f in self.flat.flats]
            flats[key][segment][range_.first : range_.last] = value.reshape(-1)
        return flats

    def state_scalars(self) -> Scalars:
        """All other state: JSON values by group (flat) or by parameter."""
        scalars: Scalars = {}
        for owner, parameter in self._owners():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not _is_whole(value, parameter):
                    scalars.setdefault(owner, {})[key] = _to_json(key, value, self.optimizer)
        return scalars

    def load_state(self, flats: dict[str, list[Tensor]], scalars: Scalars) -> None:
        """Restore what `state_flats` (complete ones) and `state_scalars` gave."""
        self.optimizer.state.clear()
        places = self._places()
        for owner, parameter in self._owners():
            segment, range_ = places[id(parameter)]
            state = {
                key: flat[segment][range_.first : range_.last].view_as(parameter).clone()
                for key, flat in flats.items()
            }
            state |= {k: _from_json(v, parameter) for k, v in scalars.get(owner, {}).items()}
            if state:
                self.optimizer.state[parameter] = state

    def _make_pieces(self, owned: Sequence[Sequence[Range]]) -> None:
        """Give the optimizer the owned part of each group instead of its parameters."""
        self._pieces = []
        for group in self.optimizer.param_groups:
            group["params"] = []
            if type(self.optimizer) in _FUSED_ON_CPU and not group.get("foreach"):
                group["fused"] = group["fused"] is not False
        for piece in self.flat.pieces:
            for own in owned[piece.segment]:
                first, last = max(piece.range.first, own.first), min(piece.range.last, own.last)
                if first < last:
                    parameter = nn.Parameter(self.flat.flats[piece.segment][first:last])
                    self.optimizer.param_groups[piece.group]["params"].append(parameter)
                    self._pieces.append((parameter, piece.group, piece.segment, Range(first, last)))

    def _owners(self) -> list[tuple[str, nn.Parameter]]:
        """Each stepped tensor with the name its scalars are kept under."""
        if self.elementwise:
            return [(str(group), parameter) for parameter, group, _, _ in self._pieces]
        names = {id(t): e.name for t, e in zip(self.flat.tensors, self.flat.entries, strict=True)}
        groups = self.optimizer.param_groups
        return [(names[id(p)], p) for g in groups for p in g["params"] if id(p) in names]

    def _places(self) -> dict[int, tuple[int, Range]]:
        if self.elementwise:
            return {id(p): (segment, range_) for p, _, segment, range_ in self._pieces}
        pairs = zip(self.flat.tensors, self.flat.entries, strict=True)
        return {id(t): (e.segment, e.range) for t, e in pairs}

    def _tensor_states(self) -> list[tuple[int, Range, str, Tensor]]:
        places = self._places()
        return [
            (*places[id(parameter)], key, value)
            for _, parameter in self._owners()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if _is_whole(value, parameter)
        ]


def _is_whole(value: Any, parameter: Tensor) -> bool:
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return same and value.dtype == parameter.dtype and value.dim() > 0


def _to_json(key: str, value: Any, optimizer: optim.Optimizer) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TaskError(
        f"build_optimizer: {type(optimizer).__name__} keeps state {key!r} of type "
        f"{type(value).__name__}, which a checkpoint cannot hold"
    )


def _from_json(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
