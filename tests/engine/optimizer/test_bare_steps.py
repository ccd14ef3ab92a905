"""Steps of torch's optimizers without what torch does around them: the same bits, seen by all."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.engine.optimizer import fast_steps

KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}), (optim.Adagrad, {}), (optim.Adam, {"amsgrad": True}), (optim.AdamW, {}),
    (optim.Adam, {"fused": True, "weight_decay": 0.1}),
    (optim.AdamW, {"fused": True, "maximize": True, "betas": (0.5, 0.9), "eps": 0.1}),
    (optim.Adam, {"fused": True, "amsgrad": True}),
    (optim.AdamW, {"fused": True, "lr": torch.tensor(0.25)}),
    (optim.Adamax, {}), (optim.ASGD, {}), (optim.NAdam, {}), (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9}), (optim.Rprop, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
]  # fmt: skip


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(5, 3, generator=generator)) for _ in range(2)]
    for parameter in made:
        parameter.grad = torch.randn(5, 3, generator=generator)
    return list(made)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_step_has_the_bits_of_the_optimizers_own(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    one, other = parameters(), parameters()
    ours, theirs = kind(one, **{"lr": 0.1, **options}), kind(other, **{"lr": 0.1, **options})
    for _ in range(3):
        fast_steps.step(ours)
        theirs.step()
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    assert repr(ours.state_dict()) == repr(theirs.state_dict())


class Own(optim.SGD):
    """A user's optimizer, which counts its steps."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def test_watched_steps_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Own(parameters(), lr=0.1)
    fast_steps.step(own)
    assert own.count == 1
    seen = []
    hooked = optim.SGD(parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: seen.append("hook"))
    fast_steps.step(hooked)
    scheduled = optim.SGD(parameters(), lr=0.1)
    step = copy.copy(scheduled.step)
    scheduled.step = lambda closure=None: seen.append("schedule") or step(closure)
    fast_steps.step(scheduled)
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("any"))
    fast_steps.step(optim.SGD(parameters(), lr=0.1))
    handle.remove()
    fast_steps.step(optim.SGD(parameters(), lr=0.1))
    assert seen == ["hook", "schedule", "any"]
    plain = optim.SGD.step

    @functools.wraps(plain)
    def counted(*arguments: Any) -> Any:
        seen.append("patched")
        return plain(*arguments)

    monkeypatch.setattr(optim.SGD, "step", counted)
    fast_steps.step(optim.SGD(parameters(), lr=0.1))
    assert seen.pop() == "patched"
    monkeypatch.undo()
    with torch.profiler.profile() as profile:
        fast_steps.step(optim.SGD(parameters(), lr=0.1))
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_a_step_can_be_differentiated() -> None:
    start = torch.ones(2, requires_grad=True)
    moved = start.clone()
    optimizer = optim.SGD([moved], lr=0.1, weight_decay=0.5, differentiable=True)
    moved.grad = torch.ones(2)
    fast_steps.step(optimizer)
    moved.sum().backward()
    assert start.grad is not None
    assert start.grad.tolist() == pytest.approx([0.95, 0.95])


def test_fused_groups_are_stepped_as_their_options_say() -> None:
    steps = []
    for is_bare in (True, False):
        one, two = parameters()
        late = nn.Parameter(torch.ones(3, dtype=torch.float64))
        groups = [
            {"params": [one], "lr": 0.3},
            {"params": [two]},
            {"params": []},
            {"params": [late]},
        ]
        optimizer = optim.AdamW(groups, lr=0.1, fused=True)
        for number in range(5):
            optimizer.param_groups[1]["lr"] = 0.1 / (number + 1)
            late.grad = torch.full_like(late, 0.5) if number != 2 else None
            if is_bare:
                fast_steps.step(optimizer)
            else:
                optimizer.step()
        steps.append((one, two, late, repr(optimizer.state_dict())))
    for ours, theirs in zip(*steps, strict=True):
        assert ours == theirs if isinstance(ours, str) else torch.equal(ours, theirs)


def test_a_patched_step_of_adam_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = [], optim.Adam.step

    @functools.wraps(plain)
    def counted(*arguments: Any) -> Any:
        seen.append("patched")
        return plain(*arguments)

    optimizer = optim.Adam(parameters(), fused=True)
    fast_steps.step(optimizer)
    monkeypatch.setattr(optim.Adam, "step", counted)
    fast_steps.step(optimizer)
    assert seen == ["patched"]
