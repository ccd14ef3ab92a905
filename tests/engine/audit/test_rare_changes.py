"""What is changed once, in an evaluation or after a step, wherever it is.

No later step may need what an evaluation has changed, and a resumed run needs all else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.stepping import CountsSteps, repeat_no_more_steps
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.errors import TaskError
from lockstep.launching import api as front
from lockstep.launching.api import Session
from lockstep.observe import read_events

SHARED: dict[str, float] = {}
FACTOR = 1.0
VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)
OF_THREAD = threading.local()
NAME = "FACTOR_OF_RARE_CHANGES"


@pytest.fixture(autouse=True)
def _only_what_evaluations_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_no_more_steps(monkeypatch)
    monkeypatch.setenv(NAME, "1")  # and takes it away again


class Seeming:
    """Says that it is a dict."""

    factor = 1.0
    __class__ = property(lambda self: dict)  # type: ignore[assignment]


class Scaled(CountsSteps):
    """What `change` does once, in an evaluation, `factor` may make something of."""

    kind_factor = 1.0

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.factors, self.listed = {"now": 1.0}, [1.0]
        self.criterion = nn.CrossEntropyLoss(reduction="sum")
        self.tensor = torch.ones(1)
        self.proxy = Seeming()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))

    def dataset(self, split: str) -> TensorDataset | None:
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(48, 3, generator=generator), torch.arange(48) % 2
        return None if split == "test" else TensorDataset(x, y)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return ls.Loss(self.criterion(model(batch[0]), batch[1]) * self.factor(), len(batch[1]))

    def evaluate(self, model: Any, batch: Any) -> ls.Loss:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        if self.step >= 6:
            self.change(model)
        return ls.Loss(loss, len(batch[1]))

    def factor(self) -> float:
        return 1.0

    def change(self, model: Any) -> None:
        pass


def run(folder: Path, task: ls.Task, steps: int = 12) -> ls.Result:
    config = ls.TrainConfig(
        batch_size=12, num_microbatches=4, steps=steps, lr=0.1, eval_every=3,
        checkpoint={"every": 3},
    )  # fmt: skip
    return front.run(task, config, Session(str(folder), console=False))


def global_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


def hooked(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 0.5 * output if module.training else output


def replaced(model: Any) -> None:
    if isinstance(model[2], nn.Dropout):
        model[2] = nn.Identity()


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], float]]] = {
    "task.factors['now']": (
        lambda task, model: task.factors.update(now=0.5), lambda task: task.factors["now"],
    ),
    "task.listed": (
        lambda task, model: task.listed.__setitem__(0, 0.5), lambda task: task.listed[0],
    ),
    "task.tensor": (lambda task, model: task.tensor.fill_(0.5), lambda task: float(task.tensor)),
    "task.kind_factor": (
        lambda task, model: setattr(Scaled, "kind_factor", 0.5), lambda task: Scaled.kind_factor,
    ),
    "task.criterion.label_smoothing": (
        lambda task, model: setattr(task.criterion, "label_smoothing", 0.5), lambda task: 1.0,
    ),
    f"{__name__}.SHARED['now']": (
        lambda task, model: SHARED.update(now=0.5), lambda task: SHARED.get("now", 1.0),
    ),
    f"{__name__}.FACTOR": (lambda task, model: global_factor(0.5), lambda task: FACTOR),
    f"{__name__}.VARIABLE": (lambda task, model: VARIABLE.set(0.5), lambda task: VARIABLE.get()),
    f"{__name__}.OF_THREAD.factor": (
        lambda task, model: setattr(OF_THREAD, "factor", 0.5),
        lambda task: getattr(OF_THREAD, "factor", 1.0),
    ),
    f"{__name__}.hooked.factor": (
        lambda task, model: setattr(hooked, "factor", 0.5),
        lambda task: getattr(hooked, "factor", 1.0),
    ),
    f"os.environ['{NAME}']": (
        lambda task, model: os.environ.update({NAME: "0.5"}),
        lambda task: float(os.environ.get(NAME, "1")),
    ),
    "task.proxy.factor": (
        lambda task, model: setattr(task.proxy, "factor", 0.5), lambda task: task.proxy.factor,
    ),
    "model.2.p": (lambda task, model: setattr(model[2], "p", 0.5), lambda task: 1.0),
    "model.1.momentum": (lambda task, model: setattr(model[1], "momentum", 0.9), lambda task: 1.0),
    "model.2": (lambda task, model: replaced(model), lambda task: 1.0),
    "model.0._forward_hooks": (
        lambda task, model: model[0]._forward_hooks or model[0].register_forward_hook(hooked),
        lambda task: 1.0,
    ),
    "model.2.forward": (
        lambda task, model: setattr(model[2], "forward", nn.Identity().forward), lambda task: 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", CHANGES)
def test_a_step_that_needs_what_an_evaluation_has_changed_is_refused_by_name(
    tmp_path: Path, place: str
) -> None:
    changes, reads = CHANGES[place]

    class Changing(Scaled):
        def change(self, model: Any) -> None:
            changes(self, model)

        def factor(self) -> float:
            return reads(self)

    try:
        with pytest.raises(TaskError) as caught:
            run(tmp_path / "run", Changing())
    finally:
        SHARED.clear()
        global_factor(1.0)
        VARIABLE.set(1.0)
        vars(OF_THREAD).clear()
        vars(hooked).clear()
        Scaled.kind_factor = 1.0
    message = str(caught.value)
    assert "step 6: gave another result when it was repeated" in message
    assert f"have left in {place}" in message


@pytest.mark.parametrize(
    ("setting", "change", "back"),
    [
        ("get_default_dtype", torch.set_default_dtype, (torch.float64, torch.float32)),
        ("get_num_threads", torch.set_num_threads, (2, 1)),
        ("get_float32_matmul_precision", torch.set_float32_matmul_precision, ("high", "highest")),
        (
            "are_deterministic_algorithms_enabled",
            torch.use_deterministic_algorithms,
            (True, False),
        ),
    ],
)
def test_a_setting_of_torch_that_an_evaluation_leaves_is_refused(
    tmp_path: Path, setting: str, change: Callable[[Any], None], back: tuple[Any, Any]
) -> None:
    class Setting(Scaled):
        def change(self, model: Any) -> None:
            change(back[0])

    try:
        with pytest.raises(TaskError, match=f"torch.{setting}"):
            run(tmp_path / "run", Setting())
    finally:
        change(back[1])


class Memo(Scaled):
    """Keeps what can be computed again, and a line for people."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.memo: dict[float, float] = {}
        self.lines = {"last": ""}

    def factor(self) -> float:
        return self.memo.setdefault(0.5, 2 * 0.5)

    def change(self, model: Any) -> None:
        self.memo[0.5] = self.memo[0.25] = 1.0
        self.lines["last"] = "evaluated"


def test_what_no_step_needs_may_stay(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", Scaled())
    assert run(tmp_path / "memo", Memo()).params_sha256 == plain.params_sha256


class Hostile:
    """Has no attribute that can be read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


HOSTILE = Hostile()


class Proxied(Scaled):
    """Holds objects that say they are of another class, and one that says nothing."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.others = [Mock(spec=dict), Mock(spec=torch.Tensor), Mock(spec=[]), Hostile()]
        self.other, self.table, self.kind = Hostile(), Mock(spec=dict), Mock(spec=type)
        self.module, self.weight = Mock(spec=nn.Module), Mock(spec=torch.Tensor)


def test_objects_that_seem_what_they_are_not_may_be_held(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", Scaled())
    assert run(tmp_path / "proxied", Proxied()).params_sha256 == plain.params_sha256


class Needed(Scaled):
    """A step cannot be done without what an evaluation has left: it is done once."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.handles: dict[str, Any] = {"log": None}

    def change(self, model: Any) -> None:
        self.handles["log"] = self.handles["log"] or []

    def factor(self) -> float:
        return 1.0 if self.step < 6 else 1.0 + len(self.handles["log"])


def test_a_step_that_fails_without_it_is_taken_as_it_was(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", Scaled())
    assert run(tmp_path / "needed", Needed()).params_sha256 == plain.params_sha256


def note_anchor(task: Any, model: Any) -> None:
    task.anchor = 0.5


AFTER_STEP: dict[str, Callable[[Any, Any], Any]] = {
    "task.anchor": note_anchor,
    "task.factors['now']": lambda task, model: task.factors.update(now=0.5),
    "model.2.p": lambda task, model: setattr(model[2], "p", 0.5),
    "model.0._forward_hooks": lambda task, model: model[0].register_forward_hook(hooked),
    "torch.get_float32_matmul_precision()": (
        lambda task, model: torch.set_float32_matmul_precision("high")
    ),
}


class Anchored(Scaled):
    """Changes something after a step that nobody looks at."""

    anchor = 1.0

    def once(self, model: nn.Module) -> None:
        pass

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        if step == 15:
            self.once(model)


def warnings_of(folder: Path) -> list[str]:
    rows = read_events(folder / "events.jsonl")
    return [row["message"] for row in rows if row["event"] == "Warned" and row["step"]]


@pytest.mark.parametrize("place", AFTER_STEP)
def test_what_a_resumed_run_would_lack_is_told_before_a_checkpoint(
    tmp_path: Path, place: str
) -> None:
    class Changing(Anchored):
        def once(self, model: nn.Module) -> None:
            AFTER_STEP[place](self, model)

    if place.startswith("torch"):
        with pytest.raises(TaskError, match=r"precision.*was changed"):
            run(tmp_path / "run", Changing(), steps=24)
        torch.set_float32_matmul_precision("highest")
        return
    run(tmp_path / "run", Changing(), steps=24)
    [warning] = warnings_of(tmp_path / "run")  # once, though checkpoints follow
    assert place.partition("[")[0] in warning
    assert "no checkpoint holds it" in warning


class Restored(Anchored):
    """Saves what it changes, or need not."""

    scratch = ("task.seen",)
    seen = 0

    def factor(self) -> float:
        self.factors[f"of {self.step}"] = 0.5  # a cache
        return 1.0

    def once(self, model: nn.Module) -> None:
        self.anchor, self.seen = 0.5, 15

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "anchor": self.anchor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.anchor = state["step"], state["anchor"]


def test_what_comes_back_or_need_not_is_no_warning(tmp_path: Path) -> None:
    run(tmp_path / "run", Restored(), steps=24)
    assert warnings_of(tmp_path / "run") == []
