"""The table of axes on the page of systems: each one of each recipe, started for a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pages import docs_module

from lockstep.launching.systems import recipe_names

TABLES = docs_module("tables")


def test_the_table_has_all_recipes_and_is_up_to_date() -> None:
    assert [*TABLES.NO_AXES] == recipe_names()
    page = TABLES.AXES_PAGE.read_text(encoding="utf-8")
    assert TABLES.with_axes(page) == page, "run `make docs-tables`"


@pytest.mark.slow
@pytest.mark.parametrize("items", TABLES.AXES)
@pytest.mark.parametrize("recipe", recipe_names())
def test_an_axis_of_a_recipe(lockstep: Any, tmp_path: Path, recipe: str, items: str) -> None:
    keys = ["steps=1", "schedule.warmup_steps=0", "eval_every=0"]
    if recipe == "cifar":
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        rows = np.random.default_rng(0).integers(0, 256, (20, 3073), np.uint8)
        rows[:, 0] %= 10
        for name in names:
            rows.tofile(tmp_path / f"{name}.bin")
        keys += ["data_dir=.", "depth=8", "batch_size=8", "eval_batch_size=8"]
    done = lockstep("train", recipe, *items.split(), *keys, "-n", "2", "--launcher", "local", "-q")
    takes = items not in TABLES.NO_AXES[recipe]
    assert done.returncode == (0 if takes else 2), done.stdout + done.stderr
    if not takes:
        assert items.partition("=")[0] in done.stderr or "num_shards=2" in done.stderr
