"""Every way to train a layer gives one SHA-256, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import result

TASK = str(Path(__file__).parent / "tasks.py")


def test_a_hybrid_network_is_equal_on_one_and_two_ranks(lockstep: Any, tmp_path: Path) -> None:
    digests = set()
    for count in (1, 2):
        folder = f"ranks_{count}"
        done = lockstep("train", TASK, "-n", str(count), "--run-dir", folder, "steps=4")
        assert done.returncode == 0, done.stdout + done.stderr
        ended = result(tmp_path / folder)
        assert ended["world_size"] == count
        digests.add(ended["params_sha256"])
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("how", ["adam", "lbfgs", "natural", "spsa", "rotosolve"])
def test_it_is_equal_on_one_to_four_ranks(lockstep: Any, how: str) -> None:
    keys = ("--ranks", "1,2,3,4", "--launchers", "python,torchrun", f"how={how}")
    done = lockstep("verify", TASK, *keys, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one SHA-256" in done.stdout
