"""The code of docs/data.md works."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.launching.api import Session, run

PAGE = Path(__file__).parents[1] / "docs" / "data.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A module with all code of the page, run in order."""
    pytest.importorskip("torchmetrics")
    module = types.ModuleType("data_page")
    sys.modules["data_page"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), vars(module))
        yield module
    del sys.modules["data_page"]


@pytest.mark.parametrize(
    "name", ["Points", "Balanced", "Curriculum", "Judged", "FromShards", "Measured"]
)
def test_tasks_of_the_page_train(page: Any, name: str, tmp_path: Path) -> None:
    config = ls.TrainConfig(batch_size=16, num_microbatches=4, steps=2)
    finished = run(getattr(page, name)(config), config, Session(str(tmp_path), console=False))
    assert finished.status == "completed"
    assert ("val_shifted/loss" in finished.metrics) == (name == "Judged")
    assert ("val/confusion" in finished.arrays) == (name == "Measured")


@pytest.mark.parametrize("name", ["Noisier", "Texts", "Rows"])
def test_datasets_of_the_page_are_trained_on(page: Any, name: str, tmp_path: Path) -> None:
    kind = getattr(page, name)
    points: TensorDataset = page.Points().dataset("train")
    data = kind(points) if name == "Noisier" else kind()
    task = type("Own", (page.Points,), {"dataset": lambda self, s: data if s == "train" else None})
    config = ls.TrainConfig(batch_size=16, num_microbatches=4, steps=9)
    finished = run(task(config), config, Session(str(tmp_path), console=False))
    assert finished.status == "completed"
