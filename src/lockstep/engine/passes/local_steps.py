"""Workers that step parameters of their own between two exchanges: local SGD and DiLoCo.

A microbatch is a worker. Its gradient is where the worker has come from where it began, after some
optimizer steps by itself (Stich 2019; Douillard et al. 2023, algorithm 1): parameters before minus
parameters after. These are summed as gradients are, and the outer optimizer steps their mean.
All workers begin at the same parameters again, so that what remains of one is the state of its
inner optimizer, which is the carry of the microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.config import TrainConfig
from lockstep.engine.audit.hidden_state import hidden_state
from lockstep.engine.carry import Carry
from lockstep.engine.optimizer import fast_steps
from lockstep.engine.optimizer.choice import check_optimizer, default_optimizer, has_modes
from lockstep.engine.optimizer.optimizer_state import home_of
from lockstep.engine.passes.loss_checks import norm_overflows
from lockstep.engine.task import Loss, Number, Task
from lockstep.errors import NonFiniteError, TaskError
from lockstep.nn.sharded.layers import has_gradient_hook
from lockstep.parallel.layout import split


def check_norm(norm: Tensor, copies: Mapping[str, Tensor]) -> None:
    """Refuse finite gradients whose norm overflows: Adam would make steps of zero.

    NaN and infinity in gradients reach the parameters, where all ranks see them.

    Raises:
        NonFiniteError: naming the parameter with the greatest one.
    """
    if bool(norm.isfinite()):
        return
    gradients = {n: c.grad for n, c in copies.items() if c.grad is not None and c.numel()}
    greatest = [(name, float(gradient.abs().max())) for name, gradient in gradients.items()]
    if all(math.isfinite(value) for _, value in greatest):
        raise NonFiniteError(f"local.steps: in a step of a worker {norm_overflows(greatest)}")


def check_read(common: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
    """Refuse a loss that reads the common parameters, which a worker does not step.

    Raises:
        TaskError: naming one.
    """
    for name, gradient in zip(common, gradients, strict=True):
        if gradient is not None:
            raise TaskError(
                f"Task.loss: reads parameter {name} from elsewhere than the model it is given, "
                "so it would not see the steps of a worker; take it from the model each time, "
                "or set local.steps=1"
            )


def check_copied(named: Mapping[str, Tensor], config: TrainConfig) -> None:
    """Refuse parameters that have what copies of them would not have.

    Raises:
        TaskError: naming one.
    """
    begin = f"local.steps={config.local.steps}: parameter"
    for name, parameter in named.items():
        if type(parameter) is not nn.Parameter:
            raise TaskError(
                f"{begin} {name} is a {type(parameter).__name__}, and workers step copies of "
                "parameters, which are plain ones; make it an nn.Parameter, or set local.steps=1"
            )
        if has_gradient_hook(parameter):
            raise TaskError(
                f"{begin} {name} has a hook on its gradient (register_hook or "
                "register_post_accumulate_grad_hook), which gradients of workers pass by; remove "
                "the hook, or set local.steps=1"
            )


LossOf = Callable[[Any, Any], Loss]
"""The loss of a model and a batch."""


class LocalSteps:
    """Computes what a worker does in a step of the run.

    Attributes:
        optimizer: the inner one, over copies of the parameters.
    """

    def __init__(self, task: Task, model: nn.Module, config: TrainConfig) -> None:
        """Make the inner optimizer, over copies of the parameters.

        Args:
            task: task that defines the loss, and maybe the inner optimizer.
            model: model on its device.
            config: config of the run.

        Raises:
            TaskError: the task's optimizer cannot be that of a worker, or a parameter has what
                copies would not have.
        """
        self._config = config
        self._within = _Within(model)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        check_copied(named, config)
        self._copies: dict[str, Tensor] = {n: _copy_of(p) for n, p in named.items()}
        self._fetched = _by_place(model, named, self._copies)
        self.optimizer = self._with_copies(lambda there: _inner_optimizer(task, there, config))
        check_copied(self._copies, config)  # which the task has just been given
        of = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self._copies = {n: copy for n, copy in self._copies.items() if id(copy) in of}
        self._groups = [of[id(copy)] for copy in self._copies.values()]
        self._parameters: list[Tensor] = [named[name] for name in self._copies]
        self._fetched = _by_place(model, named, self._copies)
        self._first = Carry.of(self._state(), "build_optimizer: state of a parameter")
        self._is_known = False

    def outer_optimizer(self) -> optim.Optimizer:
        """SGD with Nesterov's momentum over the parameters, in the inner optimizer's groups."""
        about = self._config.local
        of_copy = {id(c): p for c, p in zip(self._copies.values(), self._parameters, strict=True)}
        groups = [
            {"params": [of_copy[id(c)] for c in group["params"] if id(c) in of_copy]}
            for group in self.optimizer.param_groups
        ]
        momentum = about.outer_momentum
        return optim.SGD(groups, lr=about.outer_lr, momentum=momentum, nesterov=momentum > 0)

    def run(self, loss_of: LossOf, batch: Any, state: Any) -> tuple[Loss, Any]:
        """Step a worker.

        Args:
            loss_of: loss of the model and a part of the batch.
            batch: samples of all its steps.
            state: what its inner optimizer has from the step before; None at first.

        Returns:
            The sum of the losses, whose gradient is how far the worker has come, times its weight;
            and the inner optimizer's state.

        Raises:
            TaskError: the batch cannot be cut into steps.
        """
        before = self._held()
        self._begin(state)
        losses = [self._step(loss_of, part) for part in parts_of(batch, self._config.local.steps)]
        weight = sum(_number(loss.weight) for loss in losses)
        with torch.no_grad():
            come = torch._foreach_sub(self._parameters, list(self._copies.values()))
            torch._foreach_mul_(come, weight)
        value = torch.stack([loss.sum.detach().double() for loss in losses]).sum()
        pairs = {
            name: (
                sum(_number(loss.metrics[name][0]) for loss in losses),
                sum(_number(loss.metrics[name][1]) for loss in losses),
            )
            for name in losses[0].metrics
        }
        total = with_gradients(value, come, self._parameters)
        after = self._state()
        self._check_held(before)
        return Loss(total, weight, pairs), after

    def _begin(self, state: Any) -> None:
        """Begin where all workers do, with the state of one."""
        copies = list(self._copies.values())
        with torch.no_grad():
            torch._foreach_copy_(copies, self._parameters)
        self.optimizer.state.clear()
        for index, values in (self._first.tree if state is None else state).items():
            copy, group = copies[int(index)], self._groups[int(index)]
            self.optimizer.state[copy] = {
                k: v.to(home_of(k, group, copy.device))
                if isinstance(v, Tensor) and not v.dim()
                else v
                for k, v in values.items()
            }

    def _held(self) -> dict[str, str]:
        """What there is in the optimizer as it begins; once only, for that takes long."""
        if self._is_known:
            return {}
        self._begin(None)
        return hidden_state({"optimizer": self.optimizer})

    def _check_held(self, before: dict[str, str]) -> None:
        """Refuse an optimizer that has more state than `state`: the next worker would find it.

        Raises:
            TaskError: naming it.
        """
        after = self._held()
        self._is_known = True
        for path in sorted({*before, *after}):
            if before.get(path) != after.get(path):
                raise TaskError(
                    f"build_optimizer: {path} changes with a step, and the next worker would go on "
                    "from there; keep it in the optimizer's state of parameters, or set "
                    "local.steps=1"
                )

    def _step(self, loss_of: LossOf, part: Any) -> Loss:
        copies = list(self._copies.values())

        def compute(model: nn.Module) -> Loss:
            loss = loss_of(model, part)
            # Where one was frozen since, the audit of the step says so.
            common = {
                name: parameter
                for name, parameter in zip(self._copies, self._parameters, strict=True)
                if parameter.requires_grad
            }
            both = [*copies, *common.values()]
            gradients = torch.autograd.grad(loss.sum, both, allow_unused=True)
            check_read(common, gradients[len(copies) :])
            for copy, gradient in zip(copies, gradients, strict=False):
                copy.grad = gradient
            return loss

        loss: Loss = self._with_copies(compute)
        weight, there = _number(loss.weight), [c.grad for c in copies if c.grad is not None]
        if weight and there:
            torch._foreach_div_(there, weight)
            norm = nn.utils.get_total_norm(there)
            check_norm(norm, self._copies)
            if self._config.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(copies, self._config.clip_norm, norm)
            fast_steps.step(self.optimizer)
        self.optimizer.zero_grad()
        return loss

    def _state(self) -> dict[str, Any]:
        indices = {id(copy): str(n) for n, copy in enumerate(self._copies.values())}
        for key in self.optimizer.state:
            if isinstance(key, str):
                raise TaskError(
                    f"build_optimizer: keeps state[{key!r}], and a worker has state of parameters "
                    "only; keep it there, or set local.steps=1"
                )
        state = self.optimizer.state.items()
        return {indices[id(p)]: dict(values) for p, values in state if id(p) in indices}

    def _with_copies(self, function: Callable[[nn.Module], Any]) -> Any:
        """What a function makes of the model while that has the copies for parameters."""
        # By each place once: `tie_weights` leaves a module that is at two places with the copies.
        return functional_call(self._within, self._fetched, (function,), tie_weights=False)


def _copy_of(parameter: Tensor) -> Tensor:
    """A parameter of the same values, with the marks that a task has made on it."""
    copy = nn.Parameter(parameter.detach().clone())
    copy.__dict__.update(parameter.__dict__)
    return copy


def _by_place(
    model: nn.Module, named: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The copy for each place of a parameter in the modules of `_Within`, of which each is one."""
    of = {id(named[name]): copy for name, copy in copies.items()}
    return {
        f"model.{prefix}.{key}".replace("..", "."): of[id(parameter)]
        for prefix, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if id(parameter) in of
    }


class _Within(nn.Module):
    """Calls a function with a model, so that `functional_call` can replace its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model)


class _Given(torch.autograd.Function):
    """A value with given gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return (None, None, *(outer[0] * gradient for gradient in ctx.gradients))


def with_gradients(value: Tensor, gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """A scalar whose gradients are given.

    Args:
        value: value of the scalar.
        gradients: its gradient in each of the tensors.
        tensors: tensors that have a gradient.
    """
    made: Tensor = _Given.apply(value, gradients, *tensors)  # type: ignore[no-untyped-call]
    return made


def parts_of(batch: Any, num_parts: int) -> list[Any]:
    """A batch cut along its samples into parts of like size; no part is empty.

    Args:
        batch: tensors, or lists, tuples and dicts of them, whose first dimension is the samples.
        num_parts: number of parts; fewer come of fewer samples.

    Raises:
        TaskError: it is something else.
    """
    leaves = tree_leaves(batch)
    lengths = {len(t) if isinstance(t, Tensor) and t.dim() else -1 for t in leaves}
    if len(lengths) != 1 or lengths & {-1}:
        raise TaskError(
            "local.steps: a batch is cut into the steps of a worker, so it must be made of tensors "
            "whose first dimension is its samples; return such from dataset or collate, or set "
            "local.steps=1"
        )
    ranges = split(lengths.pop(), num_parts)
    return [tree_map(lambda t, r=r: t[r.first : r.last], batch) for r in ranges if len(r)]


def _number(value: Number) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _inner_optimizer(task: Task, model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    own = task.build_optimizer(model)
    if own is None:
        return default_optimizer(model, config)
    if not isinstance(own, optim.Optimizer):
        raise TaskError(
            "build_optimizer: returns several optimizers, and a worker has one; return one, or set "
            "local.steps=1"
        )
    if has_modes(own):
        raise TaskError(
            f"build_optimizer: {type(own).__name__} has modes (train, eval), and each worker would "
            "average parameters of its own; return another optimizer, or set local.steps=1"
        )
    return check_optimizer(own, model, config)
