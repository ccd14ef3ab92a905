"""`lockstep init`: a script that trains at once, and never writes over one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.conftest import result
from tests.observe.sample_events import full_disk


@pytest.mark.docs
@pytest.mark.slow
def test_the_task_trains_on_any_number_of_ranks(here, lockstep, tmp_path: Path) -> None:
    done = here("init")
    assert done.returncode == 0, done.stderr
    script, config = done.stdout.splitlines()
    assert script == "wrote task.py; train it with: lockstep train task.py -n 2"
    assert config.endswith("lockstep train task.py:Spirals --config task.yaml -n 2")
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


def test_the_config_names_all_keys_and_sets_none(here, tmp_path: Path) -> None:
    assert here("init", "mine.py").returncode == 0
    path = tmp_path / "mine.yaml"
    text = path.read_text()
    assert yaml.safe_load(text) is None
    path.write_text(re.sub(r"^( *)#(?! )", r"\1", text, flags=re.MULTILINE))
    values = yaml.safe_load(path.read_text())
    assert values["width"] == 64
    assert values["checkpoint"]["keep"] == 3
    done = here("config", "mine.py:Spirals", "--yaml")
    assert values == yaml.safe_load(done.stdout)


def test_what_is_set_in_the_config_counts(here, tmp_path: Path) -> None:
    assert here("init", "mine.py").returncode == 0
    path = tmp_path / "mine.yaml"
    path.write_text(path.read_text().replace("#width: 64", "width: 16"))
    done = here("train", "mine.py:Spirals", "--config", "mine.yaml", "epochs=1", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["width"], config["lr"]) == (16, 0.02)


@pytest.mark.parametrize("room", [100, 3000])
def test_a_full_disk_leaves_neither_file(here, tmp_path: Path, room: int) -> None:
    """Of the script, or of the config, which is the longer one, only a part can be written."""
    with full_disk(room):
        done = here("init", "mine.py")
    assert done.returncode == 2
    assert "cannot be written: File too large" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"__pycache__"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine.py", "is there already"),
        ("link.py", "is there already"),
        ("folder.py", "is there already"),
        ("other.py", "other.yaml: is there already"),
        ("elsewhere.py", "elsewhere.yaml: is there already"),
        ("mine.txt", "must end in .py"),
        ("none/mine.py", "cannot be written: No such file or directory"),
        ("x" * 300 + ".py", "cannot be written: File name too long"),
    ],
)
def test_refusals(here, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text("precious")
    (tmp_path / "link.py").symlink_to("nowhere.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "other.yaml").write_text("precious")
    (tmp_path / "elsewhere.yaml").symlink_to("nowhere.yaml")
    before = sorted(tmp_path.iterdir())
    done = here("init", name)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert (tmp_path / "other.yaml").read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == before
