"""`lockstep config`: keys in words, and a YAML file that can be trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field
from tests.conftest import TASKS, result, target
from tests.distributed.tasks import EverythingConfig

from lockstep.config import NO_OUTCOME, Positive, Section, TrainConfig, load
from lockstep.config.help import describe, in_words
from lockstep.config.section import keys
from lockstep.launching.systems import load_recipe, recipe_names

OWN = '''
import lockstep as ls
from lockstep.config import NO_OUTCOME, Section
from pydantic import Field

class Inner(Section):
    """Of the inside."""
    width: int = 3
    """How wide,
    in cells."""

class Mine(ls.TrainConfig):
    path: str
    inner: Inner = Inner(width=5)
    weights: dict[str, float] = {"a": 1.5}
    where: str = Field("", json_schema_extra=NO_OUTCOME, description="A: b # c.")

class Task(ls.Task):
    Config = Mine
    def build_model(self): ...
    def dataset(self, split): ...
    def loss(self, model, batch): ...
'''


@pytest.mark.parametrize("name", [*recipe_names(), "core"])
def test_every_key_is_described(name: str) -> None:
    kind = TrainConfig if name == "core" else load_recipe(name).Config
    groups = describe(kind)
    plain = [key for group in groups if not group.is_list for key in group.keys]
    assert {key.name for key in plain} == set(keys(kind))
    for group in groups:
        for key in group.keys:
            assert key.meaning.endswith("."), key
            assert key.type, key


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (Positive, "int ≥ 1"),
        (Positive | None, "int ≥ 1 or null"),
        (Annotated[float, Field(gt=0, le=1)], "0 < float ≤ 1"),
        (Annotated[float, Field(lt=2)], "float < 2"),
        (Annotated[int, Field(ge=0, lt=2**63)], "0 ≤ int < 2^63"),
        (Literal["a", "b"], "`a`, `b`"),
        (tuple[str, ...], "list of text"),
        (tuple[Positive, Positive], "two of int ≥ 1"),
        (list[Path], "list of path"),
        (dict[str, int], "dict"),
        (tuple, "tuple"),
        (Any, "Any"),
        (tuple[Section, ...], "list of sections"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert in_words(annotation) == words


def test_defaults_are_those_of_the_task() -> None:
    shown = {
        key.name: key for group in describe(load_recipe("digits").Config) for key in group.keys
    }
    assert shown["schedule.name"].shown == "cosine"
    assert shown["schedule.warmup_steps"].shown == "20"
    assert shown["lr"].shown == "0.01"
    assert not shown["log_every"].is_outcome
    assert shown["data_dir"].shown == "null"


def test_the_list_for_people(here) -> None:
    done = here("config", "digits")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = next(
        i for i, line in enumerate(lines) if line.startswith("schedule.warmup_steps = 20 ")
    )
    assert lines[start].endswith("  int ≥ 0")
    assert lines[start + 1] == "    Steps in which the learning rate rises linearly to lr."
    assert any(line.startswith("log_every = 10 ") and line.endswith("*") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", recipe_names())
def test_the_yaml_has_every_default(here, tmp_path: Path, name: str) -> None:
    done = here("config", name, "--yaml")
    assert done.returncode == 0, done.stderr
    (tmp_path / "my.yaml").write_text(done.stdout)
    kind = load_recipe(name).Config
    assert load(kind, tmp_path / "my.yaml") == kind()
    assert yaml.safe_load(done.stdout).keys() == kind.model_fields.keys()


def test_the_yaml_trains(here, tmp_path: Path) -> None:
    text = here("config", target(), "--yaml").stdout
    (tmp_path / "my.yaml").write_text(text)
    assert load(EverythingConfig, tmp_path / "my.yaml") == EverythingConfig()
    steps = ("steps=3", "--run-dir")
    done = here("train", target(), "--config", "my.yaml", *steps, "a")
    assert done.returncode == 0, done.stderr
    assert here("train", target(), *steps, "b").returncode == 0
    assert result(tmp_path / "a")["params_sha256"] == result(tmp_path / "b")["params_sha256"]


def test_keys_of_ones_own(here, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    done = here("config", "mine.py")
    assert done.returncode == 0, done.stderr
    for part in (
        "path    ",
        "text, needed",
        "inner: Of the inside.",
        "inner.width = 5",
        'where = ""',
    ):
        assert part in done.stdout, part
    assert "    How wide, in cells." in done.stdout.splitlines()
    text = here("config", "mine.py:Task", "--yaml").stdout
    assert "# path:" in text
    assert "(has no default)" in text
    assert yaml.safe_load(text)["inner"] == {"width": 5}
    assert yaml.safe_load(text)["weights"] == {"a": 1.5}
    assert "# A: b # c. [text]" in text


@pytest.mark.slow
def test_a_terminal_that_lacks_signs(lockstep) -> None:
    done = lockstep("config", "digits", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "int \\u2265 1" in done.stdout


HALF = """
import lockstep as ls

class Half(ls.Task):
    def dataset(self, split):
        return None
"""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["digit"], ["unknown recipe 'digit'", "did you mean digits?"]),
        (["none.py"], ["none.py: there is no such file"]),
        ([f"{TASKS}:Nothing"], ["no Task class 'Nothing'"]),
        (["half.py:Half"], ["half.py:Half: Half must define build_model"]),
        (["mine.py", "--yaml"], ["mine.py: is a script", "mine.py:Task"]),
    ],
)
def test_bad_targets(here, tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "half.py").write_text(HALF)
    done = here("config", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_a_description_changes_no_hash() -> None:
    class Plain(TrainConfig):
        own: int = 1
        place: str = Field("", json_schema_extra=NO_OUTCOME)

    class Described(TrainConfig):
        own: int = 1
        """Something."""
        place: str = Field("", json_schema_extra=NO_OUTCOME)
        """Somewhere."""

    assert Described.model_fields["own"].description == "Something."
    assert Plain().hash == Described(place="elsewhere").hash
