"""torch's compiler: not imported by who does not compile, and told what to go by when it is."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.engine import compiler

KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}), (optim.Adagrad, {}), (optim.Adam, {"amsgrad": True}), (optim.AdamW, {}),
    (optim.Adamax, {}), (optim.ASGD, {}), (optim.NAdam, {}), (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9}), (optim.Rprop, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
]  # fmt: skip

TRAINING = """
import sys
from lockstep.cli.main import main

sys.argv = ["lockstep", "train", "digits", "steps=4", "checkpoint.every=2", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules
"""

COMPILING = """
import sys
import torch
from torch import nn
from lockstep.engine.compiler import keep_compiler_out

keep_compiler_out()
keep_compiler_out()
model = nn.Linear(3, 4)
optimizer = torch.optim.Adam(model.parameters())
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(model, backend="eager")
for rows in range(2, 18):
    compiled(torch.ones(rows, 3))
from torch._dynamo.utils import counters
assert counters["frames"]["ok"] == 16, counters["frames"]
optimizer.zero_grad()
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"].__name__
assert sys.modules["torch._dynamo"].__loader__ is sys.modules["torch._dynamo"].__spec__.loader
"""


def in_new_process(code: str, folder: Path, *arguments: str) -> None:
    argv = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_training_does_not_import_the_compiler(tmp_path: Path) -> None:
    in_new_process(TRAINING, tmp_path)


def test_who_compiles_has_it_compile_by_shape(tmp_path: Path) -> None:
    in_new_process(COMPILING, tmp_path)


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
    ours, theirs = kind(one, lr=0.1, **options), kind(other, lr=0.1, **options)
    for _ in range(3):
        compiler.step(ours)
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
    compiler.step(own)
    assert own.count == 1
    seen = []
    hooked = optim.SGD(parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: seen.append("hook"))
    compiler.step(hooked)
    scheduled = optim.SGD(parameters(), lr=0.1)
    step = copy.copy(scheduled.step)
    scheduled.step = lambda closure=None: seen.append("schedule") or step(closure)
    compiler.step(scheduled)
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("any"))
    compiler.step(optim.SGD(parameters(), lr=0.1))
    handle.remove()
    compiler.step(optim.SGD(parameters(), lr=0.1))
    assert seen == ["hook", "schedule", "any"]
    plain = optim.SGD.step

    @functools.wraps(plain)
    def counted(*arguments: Any) -> Any:
        seen.append("patched")
        return plain(*arguments)

    monkeypatch.setattr(optim.SGD, "step", counted)
    compiler.step(optim.SGD(parameters(), lr=0.1))
    assert seen.pop() == "patched"
    monkeypatch.undo()
    with torch.profiler.profile() as profile:
        compiler.step(optim.SGD(parameters(), lr=0.1))
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_a_step_can_be_differentiated() -> None:
    start = torch.ones(2, requires_grad=True)
    moved = start.clone()
    optimizer = optim.SGD([moved], lr=0.1, weight_decay=0.5, differentiable=True)
    moved.grad = torch.ones(2)
    compiler.step(optimizer)
    moved.sum().backward()
    assert start.grad is not None
    assert start.grad.tolist() == pytest.approx([0.95, 0.95])
