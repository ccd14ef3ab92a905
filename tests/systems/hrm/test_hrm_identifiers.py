"""The recipe `hrm` with puzzle identifiers: rows follow slots; data and keys that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.systems.hrm.tiny_arc import RUN, TINY

from lockstep.config import override
from lockstep.errors import ConfigError, DataError, TaskError
from lockstep.nn import SparseEmbedding
from lockstep.nn.sparse_embedding import Fetched
from lockstep.optim import RowSignSGD
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_identifiers, read_split
from lockstep.systems.hrm.data.sources import Options
from lockstep.systems.hrm.puzzles import Puzzles, generate, read_both, to_puzzles
from lockstep.systems.hrm.task import Hrm


def tiny(*more: str) -> Hrm:
    return Hrm(override(HrmConfig(), [*TINY, *more]))


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of few tasks; not to be changed."""
    folder = tmp_path_factory.mktemp("identifiers") / "arc"
    build("arc", folder, Options(train=3, test=2, augment=2, version=1))
    return folder


def table_of(model: Any) -> SparseEmbedding:
    assert isinstance(model.puzzles, SparseEmbedding)
    return model.puzzles


@pytest.mark.parametrize("kind", ["recursive", "hierarchical"])
def test_identifiers_stay_with_their_slots(kind: str) -> None:
    """Rows that a step asks for are those of the puzzles that its slots work on, and no others."""
    task = tiny(f"model={kind}")
    torch.manual_seed(1)
    net = task.build_model()
    torch.nn.init.normal_(net.halting.weight)
    torch.nn.init.zeros_(net.halting.bias)
    table = table_of(net)
    inputs, labels, identifiers = task.dataset("train").tensors
    of_puzzle = {row.numpy().tobytes(): int(i) for row, i in zip(inputs, identifiers, strict=True)}
    order = torch.randperm(len(inputs))[:40].view(8, 5)
    batches = [(inputs[some], labels[some], identifiers[some]) for some in order]
    carry = task.carry(net, batches[0])
    went_on = took = 0
    for batch in batches:
        before, halted = carry["slots"]["identifiers"], carry["halted"]
        asked = task.lookups(batch, carry)["puzzles"]
        ids = torch.unique(asked)
        table.fetch(Fetched(ids, torch.randn(len(ids), table.dim).requires_grad_()))
        loss, carry = task.loss(net, batch, carry)
        loss.sum.backward()
        slots = carry["slots"]
        assert torch.equal(slots["identifiers"], asked)
        assert [of_puzzle[row.numpy().tobytes()] for row in slots["inputs"]] == asked.tolist()
        assert torch.equal(asked[~halted], before[~halted])
        assert torch.equal(asked[halted], batch[2][halted])
        assert table.fetched is not None
        assert table.fetched.rows.grad is not None
        assert table.fetched.rows.grad.any(1).all()
        went_on, took = went_on + int((~halted).sum()), took + int(halted.sum())
    assert min(went_on, took) > 5


def test_a_row_that_is_not_asked_for_is_an_error() -> None:
    task = tiny()
    net = task.build_model()
    batch = tuple(tensor[:5] for tensor in task.dataset("train").tensors)
    table_of(net).fetch(Fetched(torch.tensor([0]), torch.zeros(1, 8)))
    with pytest.raises(TaskError, match="has not named"):
        task.loss(net, batch, task.carry(net, batch))


@torch.no_grad()
def test_answers_depend_on_the_row_of_the_puzzle() -> None:
    task = tiny()
    net = task.build_model()
    inputs, labels, identifiers = task.dataset("val").tensors
    batch = inputs[:4], labels[:4], identifiers[:4]
    at_start = float(task.evaluate(net, batch).sum)
    fresh = task.carry(net, batch)
    assert torch.equal(task.lookups(batch, fresh)["puzzles"], batch[2])
    rows = torch.zeros(table_of(net).num_rows, 8)
    table_of(net).weight = rows
    rows[0] = 1.0
    assert float(task.evaluate(net, batch).sum) == at_start
    rows[batch[2][0]] = 1.0
    assert float(task.evaluate(net, batch).sum) != at_start
    blank = inputs[:4], labels[:4], torch.zeros(4, dtype=torch.int64)
    rows[0] = 0.0
    assert float(task.evaluate(net, blank).sum) == at_start


def test_the_table_is_that_of_the_config() -> None:
    task = tiny("puzzle_lr=0.25", "puzzle_weight_decay=0.5", "lr_rule=sqrt", "base_batch_size=20")
    table = table_of(task.build_model())
    assert table.optimizer == RowSignSGD(0.125, 0.5)
    assert table.num_rows == task.puzzles["train"].num_identifiers == 1 + 5 * 3
    assert table.start_of(torch.arange(5)).eq(0).all()
    sizes = tiny("puzzle_dim=20", "puzzle_tokens=null").build_model().sizes
    assert (sizes.puzzle_dim, sizes.leading, sizes.positions) == (20, 3, 903)


def test_puzzles_that_are_made_are_those_of_a_dataset(arc: Path) -> None:
    both = read_both(arc)
    for split, mine in generate("arc", Options(train=3, test=2, augment=2, version=1)).items():
        assert both[split].identified_digest == mine.identified_digest
        assert list(mine.names) == read_identifiers(arc)
    assert tiny(f"data_dir={arc}").names == read_identifiers(arc)
    assert list(tiny().names) == read_identifiers(arc)
    test = both["test"]
    assert test.example_identifiers.shape == (len(test.inputs),)
    assert set(test.example_identifiers) <= set(both["train"].example_identifiers)


def test_identifiers_are_part_of_the_data_where_they_are_used() -> None:
    with_ids, without = tiny(), tiny("puzzle_ids=false")
    assert with_ids.data_digest() != without.data_digest()
    assert [len(task.dataset("val").tensors) for task in (with_ids, without)] == [3, 2]
    assert without.build_model().puzzles is None
    puzzles = with_ids.puzzles["val"]
    swapped = {**vars(puzzles), "identifiers": puzzles.identifiers[::-1].copy()}
    fields = {name: swapped[name] for name in puzzles.__dataclass_fields__}
    other = type(puzzles)(**fields)
    assert other.digest == puzzles.digest
    assert other.identified_digest != puzzles.identified_digest


def test_sudokus_share_the_row_of_blanks() -> None:
    """Their published model has a puzzle's token too, which is the same one for all."""
    keys = ("puzzle_ids=true", "num_train=8", "num_val=4", "augment=1", "dim=8", "num_heads=1")
    task = Hrm(override(HrmConfig(), [*keys, "inner_multiple=8", "max_segments=2"]))
    net = task.build_model()
    assert (table_of(net).num_rows, net.sizes.positions) == (1, 17)
    batch = tuple(tensor[:4] for tensor in task.dataset("train").tensors)
    carry = task.carry(net, batch)
    assert task.lookups(batch, carry)["puzzles"].tolist() == [0] * 4
    fetched = Fetched(torch.tensor([0]), torch.zeros(1, 8).requires_grad_())
    table_of(net).fetch(fetched)
    task.loss(net, batch, carry)[0].sum.backward()
    assert fetched.rows.grad is not None
    assert fetched.rows.grad.any()


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (("puzzle_dim=17", "puzzle_tokens=2"), "puzzle_tokens=2: .* at least 3 tokens of dim=8"),
        (("puzzle_lr=-1",), "puzzle_lr=-1"),
        (("arc_version=3",), "arc_version=3"),
        (("size=9",), "size=9: is not for puzzle=arc; leave it out"),
        (("clues=3",), "clues=3: is not for puzzle=arc"),
        (("puzzle=maze", "clues=3"), "clues=3: is not for puzzle=maze"),
        (("preset=sudoku-4", "arc_version=2"), "arc_version=2: is not for puzzle=sudoku"),
    ],
)
def test_a_key_that_cannot_be_is_named(items: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny(*items)


def test_keys_of_other_puzzles_may_have_the_value_of_the_preset() -> None:
    assert tiny("size=4", "clues=0").config.size == 4
    assert tiny("preset=arc-2", "puzzle=sudoku").config.arc_version == 2
    assert tiny("preset=maze-hard", "size=30").config.size == 30


def test_what_a_run_cannot_make_is_said_of_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^augment=8: a maze has 7 symmetric ones"):
        tiny("puzzle=maze", "augment=8", "size=4").build_model()
    with pytest.raises(ConfigError, match=r"^data_seed=9\d+: must be from 0"):
        tiny(f"data_seed={10**19 - 1}").build_model()


def test_more_tasks_than_there_are_is_one_message() -> None:
    with pytest.raises(ConfigError, match=r"^num_val=401: there are 400 such tasks; ask for fewer"):
        tiny("num_val=401").build_model()


def copied(arc: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "arc"
    for path in arc.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(arc)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(arc)).write_bytes(path.read_bytes())
    return folder


def test_an_identifier_that_there_is_not_is_one_message(
    here: Callable[..., Any], arc: Path, tmp_path: Path
) -> None:
    path = copied(arc, tmp_path) / "train" / "all__puzzle_identifiers.npy"
    identifiers = np.load(path, allow_pickle=False)
    identifiers[4] = 16
    np.save(path, identifiers, allow_pickle=False)
    ended = here("train", "hrm", *RUN, "data_dir=arc")
    assert ended.returncode == 2
    assert "all__puzzle_identifiers.npy: number 4: 16: must be from 0 to 15" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def split_of_tests(folder: Path) -> Puzzles:
    return to_puzzles(folder / "test", read_split(folder, "test"))


def test_datasets_whose_parts_do_not_fit_are_refused(arc: Path, tmp_path: Path) -> None:
    folder = copied(arc, tmp_path)
    path = folder / "test" / "dataset.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "num_puzzle_identifiers": 99}))
    assert split_of_tests(folder).num_identifiers == 99
    with pytest.raises(DataError, match="num_puzzle_identifiers: is 16 in train, 99 in test"):
        tiny(f"data_dir={folder}").build_model()


@pytest.mark.parametrize("ignored", [None, 0, -100, 200])
def test_ignored_labels_are_0_whatever_they_were(
    arc: Path, tmp_path: Path, ignored: int | None
) -> None:
    folder = copied(arc, tmp_path)
    about = json.loads((folder / "test" / "dataset.json").read_text())
    (folder / "test" / "dataset.json").write_text(json.dumps({**about, "ignore_label_id": ignored}))
    path = folder / "test" / "all__labels.npy"
    labels = np.load(path, allow_pickle=False).astype(np.int64)
    np.save(path, np.where(labels == 0, ignored or 0, labels), allow_pickle=False)
    assert split_of_tests(folder).digest == split_of_tests(arc).digest
