"""What a trained model answers is what `lockstep eval` scores, by the average of parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.cli.start.evaluate import evaluate
from lockstep.config import override
from lockstep.errors import ConfigError, DataError
from lockstep.hooks import EMA
from lockstep.systems.hrm.reports.scores import accuracy, answer_split, by_segments
from lockstep.systems.hrm.reports.trained_model import Answers, TrainedModel, load_trained
from lockstep.systems.hrm.task import Hrm


@pytest.mark.parametrize("segments", [1, 4, 7])
def test_scores_are_those_of_lockstep_eval(sudokus: Path, segments: int) -> None:
    metrics, _ = evaluate(sudokus, "val", "latest", None, (f"eval_segments={segments}",))
    run = load_trained(sudokus, "latest")
    assert run.task.average is not None
    assert run.task.average.average  # else this says nothing of it
    (score,) = by_segments(run, *run.puzzles("val"), [segments], False)
    assert score.accuracy == pytest.approx(metrics["token_accuracy"], abs=1e-6)
    assert score.exact == pytest.approx(metrics["exact"], abs=1e-6)
    assert 0 < score.accuracy < 1


def test_scores_without_the_average_are_others(sudokus: Path) -> None:
    run = load_trained(sudokus, "latest")
    inputs, _ = run.puzzles("val")
    averaged = run.answers(inputs, 4)
    run.task.average = None
    plain = run.answers(inputs, 4)
    assert (averaged.q_halt != plain.q_halt).all()


def test_bf16_and_two_networks_answer_as_in_lockstep_eval(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    keys = {
        "model": "hierarchical", "mixing": "attention", "precision": {"dtype": "bf16"},
        "ema": 0.0, "early_halting": True,
    }  # fmt: skip
    folder = make_run(tmp_path / "run", **keys)
    metrics, _ = evaluate(folder, "val", "latest")
    run = load_trained(folder, "latest")
    (score,) = by_segments(run, *run.puzzles("val"), [4], True)
    assert score.accuracy == pytest.approx(metrics["token_accuracy"], abs=1e-6)
    assert score.segments == pytest.approx(metrics["segments"])
    inputs = run.puzzles("val")[0]
    tokens = torch.from_numpy(inputs).long()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, _, q_halt, _ = run.model(run.model.initial(len(tokens), torch.bfloat16), tokens)
    assert np.array_equal(run.answers(inputs, 1).q_halt[0], q_halt.numpy())


@pytest.mark.parametrize("most", [1, 2, 4, 9])
def test_halting_early_is_that_of_the_task(model: TrainedModel, most: int) -> None:
    inputs, _ = model.puzzles("val")
    solver = Hrm(override(model.config, (f"eval_segments={most}", "early_halting=true")))
    solver.average = model.task.average
    with torch.no_grad():
        solved = solver.solve(model.model, torch.from_numpy(inputs).long())
    answers = model.answers(inputs, 9)
    segments = answers.segments(most)
    assert segments.tolist() == solved.steps.tolist()
    assert np.array_equal(answers.after(segments), solved.logits[-1].argmax(-1).numpy())


def test_some_of_the_tests_puzzles_halt_and_others_do_not(model: TrainedModel) -> None:
    answers = model.answers(model.puzzles("val")[0], 9)
    assert len({*answers.segments(9).tolist()}) > 1
    assert {*answers.wants.any(axis=0).tolist()} == {False, True}


def test_generators_are_as_they_were(model: TrainedModel, sudokus: Path) -> None:
    drawn = []
    for looks in (False, True):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        if looks:
            load_trained(sudokus, "best").answers(model.puzzles("val")[0], 1)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_what_is_gathered_is_what_was_answered(model: TrainedModel) -> None:
    inputs, labels = model.puzzles("val")
    for early in (False, True):
        found = answer_split(model, inputs, labels, 6, early, 3)
        whole = [answers for _, answers in model.batches(inputs, 6)]
        tokens = np.concatenate([answers.tokens for answers in whole], axis=1)
        parts = accuracy(tokens, labels)
        assert found.accuracy == pytest.approx(parts.mean(axis=1))
        assert found.exact == pytest.approx((parts == 1).mean(axis=1))
        halts = np.concatenate([answers.wants.any(axis=0) for answers in whole])
        assert found.halting[-1] == (~halts).sum()
        assert found.halting[:-1].tolist() == [
            (found.segments[halts] == number).sum() for number in range(1, 7)
        ]
        assert found.segments.tolist() == [n for a in whole for n in a.segments(6).tolist()]
        assert found.used.tolist() == (found.segments.tolist() if early else [6] * len(inputs))
        for index, used in enumerate(found.used.tolist()):
            assert np.array_equal(found.predictions[index], tokens[used - 1, index])
        for seen in found.examples(9):
            assert np.array_equal(seen.answers, tokens[:, seen.number - 1])
            assert np.array_equal(seen.question, inputs[seen.number - 1])
        assert len(found.wrong) == 3


def test_accuracy_counts_no_places_without_label() -> None:
    labels = np.array([[0, 2, 3], [0, 0, 0]])
    tokens = np.array([[[1, 2, 4], [1, 1, 1]], [[1, 2, 3], [1, 1, 1]]])
    assert accuracy(tokens, labels).tolist() == [[0.5, 0.0], [1.0, 0.0]]


def test_who_never_halts_has_all_segments() -> None:
    wants = np.array([[0, 0, 1], [0, 1, 1], [0, 0, 0]], bool)
    answers = Answers(np.zeros((3, 3, 1), np.uint8), np.zeros((3, 3), np.float32), wants)
    assert [answers.segments(most).tolist() for most in (1, 2, 3)] == [
        [1, 1, 1], [2, 2, 1], [3, 2, 1],
    ]  # fmt: skip


def test_an_average_follows_its_model_to_another_device() -> None:
    model = torch.nn.Linear(2, 3, device="meta")
    average = EMA()
    average.load_state_dict({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
    assert average(model, torch.zeros(4, 2, device="meta")).device.type == "meta"


def test_other_data_are_told(make_run: Callable[..., Path], sudokus: Path, tmp_path: Path) -> None:
    assert not load_trained(sudokus, "latest").warnings
    folder = make_run(tmp_path / "run", steps=1, eval_every=1)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("data_seed: 0", "data_seed: 1"))
    assert len(load_trained(folder, "latest").warnings) == 1


def test_bad_splits_and_too_many_tokens(
    model: TrainedModel, sudokus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--split test: must be one of train, val"):
        model.puzzles("test")
    monkeypatch.setattr("lockstep.systems.hrm.reports.trained_model.MOST_TOKENS", 5)
    with pytest.raises(ConfigError, match="its puzzles have 6 tokens; at most 5 can be shown"):
        load_trained(sudokus, "latest")
    empty = torch.zeros(0, 16, dtype=torch.uint8)
    monkeypatch.setattr(Hrm, "dataset", lambda *_: torch.utils.data.TensorDataset(empty, empty))
    with pytest.raises(DataError, match="--split val: has no puzzles"):
        model.puzzles("val")
