"""ARC in `lockstep hrm eval`: votes over augmentations, with identifiers and without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.cli.start.evaluate import evaluate
from lockstep.systems.hrm.data.arc import parse_name, to_tokens
from lockstep.systems.hrm.data.sources import Options
from lockstep.systems.hrm.puzzles import Puzzles, generate
from lockstep.systems.hrm.reports.scores import Votes, answer_split, by_segments
from lockstep.systems.hrm.reports.trained_model import Answers, TrainedModel, load_trained

Here = Callable[..., Any]

ARC = {
    "puzzle": "arc", "mixing": "attention", "num_train": 2, "num_val": 4, "augment": 3,
    "puzzle_ids": True, "puzzle_lr": 1.0, "batch_size": 12, "steps": 5, "eval_every": 5,
    "max_segments": 1, "eval_segments": 2, "dim": 8, "num_heads": 1, "inner_multiple": 8,
    "eval_batch_size": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """A run directory; not to be changed."""
    return make_run(tmp_path_factory.mktemp("arc") / "run", **ARC)


def black(cells: int) -> np.ndarray[Any, Any]:
    """The tokens of a black row, which has as many cells after each augmentation."""
    return to_tokens(np.zeros((1, cells), np.uint8))


def fake(puzzles: Puzzles, rules: list[str]) -> np.ndarray[Any, Any]:
    """Answers to a test [N, 900].

    "12r" says of a task's three puzzles that the first is answered by a black row of 1 cell, the
    second by one of 2, and the third rightly.
    """
    labels, answers = puzzles.labels.numpy(), []
    for group, rule in enumerate(rules):
        first, last = puzzles.groups[group : group + 2]
        assert last - first == len(rule)
        for puzzle, what in zip(range(first, last), rule, strict=True):
            for example in range(*puzzles.puzzles[puzzle : puzzle + 2]):
                answers.append(labels[example] if what == "r" else black(int(what)))
    return np.stack(answers)


RULES = ["r12r", "11r1", "r111", "1234"]
"""Right at the first attempt; at the second, twice; never."""


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is wrong after one segment, and without identifiers; else it is as `RULES` say."""

    def answers(self: TrainedModel, inputs: Any, segments: int, identifiers: Any) -> Answers:
        puzzles = self.task.puzzles["val"]
        wrong = np.stack([black(5)] * len(inputs)).astype(np.uint8)
        tokens = np.stack([wrong] * segments)
        if identifiers is not None:
            right = fake(puzzles, RULES)
            asked = puzzles.inputs.numpy()
            for place, (question, identifier) in enumerate(
                zip(inputs, identifiers.tolist(), strict=True)
            ):
                (same,) = np.nonzero((asked == question).all(1))
                (example,) = (e for e in same if puzzles.example_identifiers[e] == identifier)
                tokens[1:, place] = right[example]
        shape = tokens.shape[:2]
        return Answers(tokens, np.zeros(shape, np.float32), np.zeros(shape, np.bool_))

    monkeypatch.setattr(TrainedModel, "answers", answers)


def cells(line: str) -> list[list[str]]:
    return [part.split() for part in line.split("|")]


@pytest.mark.slow
def test_votes_with_identifiers_and_without_are_side_by_side(
    here: Here, arc: Path, answering: None
) -> None:
    done = here("hrm", "eval", str(arc), "--segments", "1,2,3", "--no-id")
    assert (done.returncode, done.stderr) == (0, "")
    first, above, head, *rows = done.stdout.splitlines()
    count = len(load_trained(arc, "latest").puzzles("val")[0])
    assert re.fullmatch(rf"4 tasks, \d questions, {count} puzzles of val, .* step 5", first)
    assert cells(above) == [["with", "identifiers"], ["without", "identifiers"]]
    names = ["exact", "accuracy", "pass@1", "pass@2"]
    assert cells(head) == [["segments", *names], names]
    with_ids, without = zip(*map(cells, rows), strict=True)
    assert [row[0] for row in with_ids] == ["1", "2", "3"]
    assert [row[3:] for row in with_ids] == [
        ["0.0000", "0.0000"], ["0.2500", "0.7500"], ["0.2500", "0.7500"],
    ]  # fmt: skip
    assert [row[0] for row in without] == ["0.0000"] * 3
    assert [row[2:] for row in without] == [["0.0000", "0.0000"]] * 3


@pytest.mark.parametrize(
    ("options", "heads", "scores"),
    [
        (("--attempts", "1"), ["pass@1"], ["0.2500"]),
        (("--attempts", "4"), ["pass@1", "pass@4"], ["0.2500", "0.7500"]),
        (("--subset", "2"), ["pass@1", "pass@2"], ["0.5000", "1.0000"]),
        (("--subset", "9"), ["pass@1", "pass@2"], ["0.2500", "0.7500"]),
    ],
)
def test_attempts_and_subsets_of_tasks(
    here: Here,
    arc: Path,
    answering: None,
    options: tuple[str, ...],
    heads: list[str],
    scores: list[str],
) -> None:
    done = here("hrm", "eval", str(arc), "--segments", "2", *options)
    first, head, row = done.stdout.splitlines()
    assert head.split()[3:] == heads
    assert row.split()[3:] == scores
    assert first.startswith("2 tasks" if options[1] == "2" else "4 tasks")


def test_answers_that_are_saved_give_the_same_votes(
    here: Here, arc: Path, tmp_path: Path, answering: None
) -> None:
    done = here("hrm", "eval", str(arc), "--segments", "1,2", "--no-id", "--save", "answers.npz")
    assert done.stdout.splitlines()[-1] == "wrote answers.npz"
    with np.load(tmp_path / "answers.npz", allow_pickle=False) as file:
        saved = dict(file)
    run = load_trained(arc, "latest")
    inputs, labels = run.puzzles("val")
    assert saved["segments"].tolist() == [1, 2]
    assert np.array_equal(saved["inputs"], inputs)
    assert np.array_equal(saved["labels"], labels)
    assert np.array_equal(saved["identifiers"], run.task.puzzles["val"].example_identifiers)
    assert saved["names"].tolist() == [run.task.names[i] for i in saved["identifiers"]]
    assert np.array_equal(saved["predictions"][1], fake(run.task.puzzles["val"], RULES))
    assert (saved["predictions_no_id"] == black(5)).all()
    assert saved["q_halt"].shape == saved["q_halt_no_id"].shape == (2, len(inputs))
    votes = Votes(run.task.puzzles["val"], run.task.names, 2, [1, 2])
    votes.add(slice(0, len(inputs)), saved["predictions"], saved["q_halt"])
    assert votes.passes.tolist() == [[0, 0], [0.25, 0.75]]


def test_batches_do_not_change_votes_and_questions_share_a_task() -> None:
    both = generate("arc", Options(train=1, test=30, augment=1, seed=2, version=1))
    puzzles = both["test"]
    counts = np.diff(puzzles.puzzles[puzzles.groups])
    sizes = np.diff(puzzles.groups)
    several = np.flatnonzero(counts > sizes)
    assert len(several)  # tasks with more questions than one
    tokens, q_halt = puzzles.labels.numpy()[None].copy(), np.zeros((1, len(puzzles.inputs)))
    for group in several:  # the second question of each is wrong, in all augmentations
        for puzzle in range(*puzzles.groups[group : group + 2]):
            tokens[0, puzzles.puzzles[puzzle] + 1] = black(30)
    expected = 1 - sum(1 / (counts[g] / sizes[g]) for g in several) / 30
    for size in (1, 7, 1000):
        votes = Votes(puzzles, puzzles.names, 1, [1])
        for first in range(0, len(puzzles.inputs), size):
            which = slice(first, min(first + size, len(puzzles.inputs)))
            votes.add(which, tokens[:, which], q_halt[:, which])
        assert votes.passes == pytest.approx(expected)
        assert votes.num_tasks == 30
        assert votes.num_questions == (counts / sizes).sum()


def test_surer_answers_come_first_among_equally_frequent_ones() -> None:
    puzzles = generate("arc", Options(train=1, test=1, augment=3, seed=1, version=1))["test"]
    tokens = fake(puzzles, ["11rr"])[None]
    for sure, passes in ((1.0, 1), (-1.0, 0)):
        rule = np.repeat(np.array([0, 0, sure, sure]), np.diff(puzzles.puzzles))
        votes = Votes(puzzles, puzzles.names, 1, [1])
        votes.add(slice(0, len(rule)), tokens, rule[None].astype(np.float32))
        assert votes.passes.tolist() == [[passes]]


def test_scores_are_those_of_lockstep_eval(arc: Path) -> None:
    metrics, _ = evaluate(arc, "val", "latest")
    run = load_trained(arc, "latest")
    identifiers = run.identifiers("val")
    (score,) = by_segments(run, *run.puzzles("val"), [2], False, identifiers)
    assert score.accuracy == pytest.approx(metrics["token_accuracy"], abs=1e-6)
    (blank,) = by_segments(run, *run.puzzles("val"), [2], False)
    assert blank.accuracy != score.accuracy


def test_puzzles_are_shown_as_they_are_known(here: Here, arc: Path, tmp_path: Path) -> None:
    run = load_trained(arc, "latest")
    inputs, labels = run.puzzles("val")
    identifiers = run.identifiers("val")
    assert identifiers is not None
    known, unknown = (run.answers(inputs, 2, ids).q_halt for ids in (identifiers, None))
    blank = run.answers(inputs, 2, np.zeros_like(identifiers)).q_halt
    assert np.array_equal(unknown, blank)
    assert (known != unknown).any(0).sum() > 3  # those of which some demonstration was learnt
    found = answer_split(run, inputs, labels, 2, False, 1, identifiers)
    assert np.array_equal(found.q_halt, known[1])

    done = here("hrm", "solve", str(arc), "val:3")
    assert done.returncode == 1
    alone = run.answers(inputs[2:3], 2, identifiers[2:3])
    halting = [float(1 / (1 + np.exp(-q))) for q in alone.q_halt[:, 0].tolist()]
    lines = [line for line in done.stdout.splitlines() if line.startswith("segment")]
    for line, probability in zip(lines, halting, strict=True):
        assert f"halting {probability:.3f}," in line
    assert here("hrm", "view", str(arc), "--output", "page", "--num", "2").returncode == 0
    with np.load(tmp_path / "page" / "predictions.npz", allow_pickle=False) as file:
        assert np.array_equal(file["predictions"], found.predictions)


def test_what_a_run_does_not_have_is_refused(here: Here, sudokus: Path, arc: Path) -> None:
    for options, message in {
        ("--no-id",): "--no-id: the run's model does not ask for identifiers",
        ("--attempts", "2"): "--attempts 2: is for ARC",
        ("--save", "no/where.npz"): "--save no/where.npz: name a file in a folder that is there",
        ("--save", "."): "--save .: name a file",
    }.items():
        done = here("hrm", "eval", str(sudokus), *options)
        assert done.returncode == 2
        assert message in done.stderr
        assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    done = here("hrm", "solve", str(arc), "1...")
    assert "name one of validation" in done.stderr


def test_answers_to_sudokus_are_saved(here: Here, sudokus: Path, tmp_path: Path) -> None:
    done = here(
        "hrm", "eval", str(sudokus), "--segments", "4", "--subset", "7", "--save", "some.npz"
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "some.npz", allow_pickle=False) as file:
        saved = dict(file)
    assert set(saved) == {"segments", "inputs", "labels", "predictions", "q_halt"}
    run = load_trained(sudokus, "latest")
    answers = run.answers(run.puzzles("val")[0][:7], 4)
    assert np.array_equal(saved["predictions"][0], answers.tokens[3])


def test_names_of_the_follow_up_are_understood() -> None:
    name, augmentation = parse_name("007bbfb7|||t6|||0213456789")
    assert (name, augmentation) == parse_name("007bbfb7_t6_0213456789")
    assert (name, augmentation.symmetry, augmentation.colours[:3]) == ("007bbfb7", 6, (0, 2, 1))
