"""`lockstep init`: a script that trains at once, and never writes over one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import result


@pytest.mark.docs
def test_the_task_trains_on_any_number_of_ranks(here, lockstep, tmp_path: Path) -> None:
    done = here("init")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrote task.py; train it with: lockstep train task.py -n 2\n"
    hashes = set()
    for num_ranks in ("1", "2"):
        run_dir = tmp_path / num_ranks
        done = lockstep("train", "task.py", "-n", num_ranks, "--run-dir", run_dir)
        assert done.returncode == 0, done.stderr
        ended = result(run_dir)
        hashes.add(ended["params_sha256"])
        assert ended["metrics"]["val/accuracy"] > 0.95
        assert ended["metrics"]["test/accuracy"] > 0.95
    assert len(hashes) == 1


def test_it_names_itself_and_its_keys(here, tmp_path: Path) -> None:
    assert here("init", "my spirals.py").returncode == 0
    text = (tmp_path / "my spirals.py").read_text()
    assert "my spirals.py" in text
    assert "task.py" not in text
    assert 35 <= text.count("\n") <= 60
    done = here("config", "my spirals.py")
    assert "width = 64" in done.stdout
    assert "Units of the hidden layer." in done.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine.py", "is there already"),
        ("link.py", "is there already"),
        ("folder.py", "is there already"),
        ("mine.txt", "must end in .py"),
        ("none/mine.py", "cannot be written: No such file or directory"),
        ("x" * 300 + ".py", "cannot be written: File name too long"),
    ],
)
def test_refusals(here, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text("precious")
    (tmp_path / "link.py").symlink_to("nowhere.py")
    (tmp_path / "folder.py").mkdir()
    done = here("init", name)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert not (tmp_path / "nowhere.py").exists()
