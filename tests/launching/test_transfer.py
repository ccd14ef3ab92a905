"""Which tasks ranks get by name, and which as a copy."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launching.api import test_train

import lockstep as ls
from lockstep.launching.systems import load_recipe
from lockstep.launching.transfer import copied, received, target_of

SOURCE = """
import random

from tests.launching.api.test_train import Line


class Plain(Line):
    pass


class Grown(Line):
    def __init__(self, config=None):
        super().__init__(config)
        self.sizes = {"a": [1, 2]}


class Counts(Line):
    def __init__(self, config=None):
        super().__init__(config)
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Drawn(Line):
    def __init__(self, config=None):
        super().__init__(config)
        self.width = random.random()


class TakesMore(Line):
    def __init__(self, config=None, width=3):
        super().__init__(config)


class Outer:
    class Inner(Line):
        pass


def within():
    class Local(Line):
        pass

    return Local


if True:

    class Guarded(Line):
        pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "with classes.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("with classes")
    yield made
    del sys.modules["with classes"]


@pytest.mark.parametrize("name", ["Plain", "Grown"])
def test_by_name(module: Any, tmp_path: Path, name: str) -> None:
    task = getattr(module, name)(ls.TrainConfig(steps=3))
    assert target_of(task) == (f"{tmp_path}/with classes.py:{name}", "")


def test_state_of_a_checkpoint_is_no_reason_for_a_copy(module: Any, tmp_path: Path) -> None:
    task = module.Counts()
    assert target_of(task)[0].endswith(":Counts")
    task.count = 3
    assert target_of(task)[0] == ""
    assert target_of(task, resume=True)[0].endswith(":Counts")
    task.more = 1
    assert target_of(task, resume=True)[0] == ""


def test_a_recipe_by_its_name() -> None:
    assert target_of(load_recipe("digits")()) == ("digits", "")


def test_as_a_copy(module: Any) -> None:
    changed = module.Plain()
    changed.more = 1
    for task in (changed, module.TakesMore(), module.Drawn()):
        assert "holds more than its config makes of it" in target_of(task)[1]
    in_a_package = test_train.Line()
    assert in_a_package.__module__ == "tests.launching.api.test_train"
    for task in (module.Outer.Inner(), module.within()(), module.Guarded(), in_a_package):
        target, reason = target_of(task)
        assert target == ""
        assert "is not a class at the top level of a script, or of a module outside" in reason


def test_a_class_that_a_prompt_has_made_again(module: Any) -> None:
    exec("class Plain(Plain):\n    def more(self): return 3\n", vars(module))
    assert target_of(module.Plain())[0] == ""


def test_the_copy_is_all_there(module: Any) -> None:
    task = module.within()(ls.TrainConfig(steps=3))
    task.scale = lambda x: 2 * x
    with copied(task, task.config) as fd:
        for _ in range(2):  # each rank reads it from its beginning
            again, config = received(fd)
            assert again.scale(4) == 8  # type: ignore[attr-defined]
            assert type(again).__name__ == "Local"
            assert config == task.config
