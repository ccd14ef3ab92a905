"""Every example of the gallery: the commands of its page, and the same bits however it is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import environment, result

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "gallery"


class Small(NamedTuple):
    """What makes an example quick.

    Attributes:
        keys: that are added to each training.
        stop_at: step at which the run that is compared is stopped.
    """

    keys: tuple[str, ...]
    stop_at: int


SLOW = {
    "cartpole",
    "clip",
    "finetune",
    "maxcut",
    "ranking",
    "recommender",
    "stream",
    "tabular",
    "teacher",
}
"""Examples that take longest, and show nothing that the others do not show as well."""

SIZES = {
    "cartpole": Small(("epochs=4", "longest=40", "batch_size=16"), 3),
    "circuit": Small(("epochs=2", "num_qubits=2", "num_layers=1"), 3),
    "clip": Small(("epochs=2", "width=8", "eval_every=7"), 5),
    "digits": Small(("epochs=2",), 7),
    "finetune": Small(("epochs=2",), 3),
    "gan": Small(("steps=24", "width=16", "eval_every=12", "eval_batch_size=512"), 10),
    "gpt": Small(("steps=6", "context=16", "width=16", "num_layers=2", "eval_every=6"), 4),
    "h2": Small(("epochs=4",), 3),
    "huggingface": Small(("epochs=1",), 3),
    "ising": Small(("epochs=4", "num_qubits=3", "num_layers=1"), 3),
    "maxcut": Small(
        (
            "epochs=4",
            "num_nodes=4",
            "num_layers=1",
            "batch_size=4",
            "eval_batch_size=4",
            "eval_every=2",
        ),
        3,
    ),
    "memory": Small(("steps=6", "batch_size=8", "width=16", "num_eval=4", "eval_every=6"), 4),
    "own_loop": Small(("epochs=2",), 30),
    "phases": Small(("epochs=2", "num_qubits=3", "num_layers=1", "eval_every=2"), 3),
    "ranking": Small(("epochs=3", "eval_every=3"), 5),
    "recommender": Small(
        ("steps=8", "num_clicks=2000", "num_users=100", "num_items=80", "width=4", "eval_every=4"),
        5,
    ),
    "simclr": Small(("epochs=2", "width=16", "eval_every=6"), 5),
    "stream": Small(
        (
            "steps=6",
            "context=16",
            "width=16",
            "num_eval=64",
            "eval_every=6",
            "data.shuffle_buffer=50",
        ),
        4,
    ),
    "tabular": Small(("epochs=3",), 10),
    "teacher": Small(("epochs=1",), 4),
}


def commands(name: str) -> list[list[str]]:
    """The commands that a page shows, as words; small sizes are added to trainings."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block, f"{name}.md shows no command"
    lines = [shlex.split(line) for line in block[1].splitlines()]
    return [
        [*words, *(SIZES[name].keys if words[:2] == ["lockstep", "train"] else ())]
        for words in lines
    ]


def called(words: list[str], folder: Path) -> str:
    """Run a command in a folder that has `examples`; its output."""
    interpreter = {"lockstep": [sys.executable, "-m", "lockstep"], "python": [sys.executable]}
    done = subprocess.run(
        [*interpreter[words[0]], *words[1:]],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def on_one_rank(training: list[str], run_dir: str) -> list[str]:
    """The same training in one process, with another run directory."""
    words = list(training)
    at = words.index("-n")
    assert words[at + 1] == "2"
    del words[at : at + 2]
    words[words.index("--run-dir") + 1] = run_dir
    return words


def evaluated(ended: dict[str, Any]) -> dict[str, float]:
    """Metrics of whole splits; those of training are means over the steps since the last report."""
    return {name: v for name, v in ended["metrics"].items() if not name.startswith("train/")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(SIZES)
    ],
)
def test_the_commands_of_the_page_and_the_same_bits(name: str, tmp_path: Path) -> None:
    os.symlink(ROOT / "examples", tmp_path / "examples")
    shown = commands(name)
    outputs = [called(words, tmp_path) for words in shown]
    assert all(outputs)

    training = [words for words in shown if words[:2] == ["lockstep", "train"]][-1]
    trained = result(tmp_path / training[training.index("--run-dir") + 1])
    assert trained["status"] == "completed"
    assert trained["world_size"] == 2

    called([*on_one_rank(training, "one"), f"stop_at_step={SIZES[name].stop_at}"], tmp_path)
    stopped = result(tmp_path / "one")
    assert stopped["status"] == "stopped"
    assert stopped["params_sha256"] != trained["params_sha256"]
    called(["lockstep", "resume", "one"], tmp_path)
    resumed = result(tmp_path / "one")
    assert resumed["world_size"] == 1
    assert resumed["params_sha256"] == trained["params_sha256"]
    assert evaluated(resumed) == evaluated(trained)
    assert resumed["arrays"] == trained["arrays"]


def test_every_example_has_a_page_and_a_test() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")} - {"index"}
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")}
    notebooks = {path.stem for path in (ROOT / "examples").glob("*.ipynb")}
    assert pages == scripts | notebooks
    assert scripts == set(SIZES)
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    assert {name for name in pages if f"({name}.md)" in index} == pages


def test_the_page_shows_the_code_of_the_notebook() -> None:
    """Cells are run in tests/launching/test_notebooks.py."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]).strip() for cell in notebook["cells"]]
    page = (PAGES / "notebook.md").read_text(encoding="utf-8")
    shown = re.findall(r"^``` \{ \.python \}\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    assert len(shown) >= 3
    assert [code for code in shown if code not in cells] == []
