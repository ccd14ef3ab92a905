"""Learning next words: the grammar, n-grams, scores, and what training them does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import result

import lockstep as ls
from lockstep import config as config_module
from lockstep.errors import ConfigError
from lockstep.systems.quantum import language as grammar
from lockstep.systems.quantum.commands import baselines, of_model
from lockstep.systems.quantum.config import QuantumConfig
from lockstep.systems.quantum.language import NGram, score, tuned
from lockstep.systems.quantum.task import Quantum

EXAMPLE = Path(__file__).parents[3] / "examples" / "quantum_words.yaml"


def quantum(**keys: Any) -> Quantum:
    return Quantum(QuantumConfig(**{"grammar": 40, "objective": "likelihood", **keys}))


@given(st.integers(0, 2**64 - 1), st.integers(1, 60))
@settings(max_examples=15, deadline=None)
def test_the_grammar_draws_different_sentences_and_splits_are_disjoint(
    seed: int, count: int
) -> None:
    train, test = grammar.splits(count, seed)
    assert (len(train), len(test)) == (count, max(1, count // 8))
    assert len({*train, *test}) == len(train) + len(test)
    for sentence in (*train, *test):
        for place, word in enumerate(sentence):
            assert word in grammar.followers(sentence[:place])
        assert not grammar.followers(sentence)
    assert grammar.splits(count, seed) == (train, test)


def test_the_grammar_has_as_many_words_and_sentences_as_it_says() -> None:
    words: set[str] = set()
    count = 0
    beginnings: dict[tuple[str, ...], int] = {(): 1}
    while beginnings:
        longer: dict[tuple[str, ...], int] = {}
        for beginning, ways in beginnings.items():
            following = grammar.followers(beginning)
            words.update(following)
            count += 0 if following else ways
            for word in following:
                # What follows depends on the opener, the noun, the last two words and the length.
                noun = next((w for w in beginning if w in grammar._FITTING), "-")
                whole = (*beginning, word)
                key = (whole[0], *([noun] if len(whole) > 3 else []), *whole[-2:])
                key = whole if len(whole) < 5 else key
                longer[key] = longer.get(key, 0) + ways
        beginnings = longer
    assert len(words) == 64
    assert count == 532_480


def test_a_bigram_model_counts_pairs() -> None:
    model = NGram([[0, 1, 2], [0, 1, 1], [1, 2]], 2, 3, added=0.5)
    assert model.probabilities([2, 0]).tolist() == pytest.approx([0.5 / 3.5, 2.5 / 3.5, 0.5 / 3.5])
    assert model.probabilities([1]).tolist() == pytest.approx([0.5 / 4.5, 1.5 / 4.5, 2.5 / 4.5])
    assert model.probabilities([2]).tolist() == pytest.approx([1 / 3] * 3)
    unigram = NGram([[0, 1, 2], [0, 1, 1], [1, 2]], 1, 3, added=1e-9)
    assert unigram.probabilities([0]).tolist() == pytest.approx([0, 3 / 5, 2 / 5], abs=1e-8)


def test_the_added_number_is_tuned_on_training_sentences() -> None:
    assert tuned([[0, 1]], 2, 3).added == 1.0
    certain = tuned([[0, 1, 2, 0]] * 40, 2, 3)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 20, (30, 4), generator=generator).tolist()
    assert certain.added < tuned(noise, 2, 20).added


def test_scores_share_out_ties() -> None:
    likely = torch.tensor([[0.5, 0.25, 0.25], [0.4, 0.4, 0.2], [1 / 3] * 3]).double()
    found = score(likely.log(), torch.tensor([1, 0, 2]))
    assert found.accuracy == pytest.approx((0 + 1 / 2 + 1 / 3) / 3)
    assert found.rank == pytest.approx((2.5 + 1.5 + 2) / 3)
    assert found.loss == pytest.approx(-math.log(0.25 * 0.4 / 3) / 3)


def test_the_metrics_of_training_are_those_of_the_comparison() -> None:
    task = quantum(embedding="trainable", word_scale=1.0)
    torch.manual_seed(0)
    model = task.build_model()
    held_out = task.dataset("test")
    found = task.evaluate(model, task.collate([held_out[i] for i in range(len(held_out))]))
    expected = of_model(task, model)
    assert found.sum.item() / float(found.weight) == pytest.approx(expected.loss)
    for name, value in (("accuracy", expected.accuracy), ("mean_rank", expected.rank)):
        total, count = found.metrics[name]
        assert float(total) / float(count) == pytest.approx(value)


def test_restarts_have_their_own_likelihoods() -> None:
    task = quantum(restarts=2, clip_norm=None)
    torch.manual_seed(0)
    model = task.build_model()
    held_out = task.dataset("test")
    batch = task.collate([held_out[i] for i in range(len(held_out))])
    found = task.evaluate(model, batch)
    for restart in range(2):
        total, count = found.metrics[f"restart_{restart}"]
        assert float(total) / float(count) == pytest.approx(of_model(task, model, restart).loss)
    task.loss(model, batch).sum.backward()
    assert model.angles.grad.abs().amin(0).max() > 0


def test_the_grammar_itself_is_the_best_of_the_baselines() -> None:
    found = baselines(quantum(grammar=300))
    assert found["chance"].loss == pytest.approx(math.log(64))
    best = found.pop("the grammar itself")
    assert all(best.loss < other.loss and best.rank < other.rank for other in found.values())
    assert found["bigram"].loss < found["unigram"].loss < found["chance"].loss


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grammar": 9, "corpus": "a.txt"}, "grammar=9: is a corpus itself"),
        ({"grammar": 0}, "grammar=0"),
        ({"grammar": 10**6}, "grammar=1000000"),
        ({"embedding": "trainable", "backend": "circuit"}, "embedding=trainable: needs backend"),
        ({"objective": "likelihood", "backend": "circuit"}, "objective=likelihood: needs backend"),
        ({"objective": "likelihood", "deal": "transitions"}, "needs deal=sentences"),
        ({"embedding": "trainable", "restarts": 2, "clip_norm": None}, "needs embedding=fixed"),
        (
            {"embedding": "trainable", "optimizer": {"name": "natural"}, "clip_norm": None},
            "natural: has no metric of words",
        ),
        ({"word_scale": 0}, "word_scale=0"),
        ({"position_scale": -1}, "position_scale=-1"),
        ({"embedding": "learned"}, "embedding='learned'"),
    ],
)
def test_bad_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^test: .*{message}"):
        config_module.build(QuantumConfig, keys, "test")


def test_without_held_out_sentences_there_is_nothing_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The cat flies\n")
    task = Quantum(QuantumConfig(corpus=path))
    with pytest.raises(ConfigError, match="no held-out sentences"):
        baselines(task)


def test_any_number_of_ranks_gives_the_same_bits_and_commands_follow(
    here, lockstep, tmp_path: Path
) -> None:
    keys = ("--config", str(EXAMPLE), "grammar=48", "batch_size=24", "embedding_dim=8", "epochs=2")
    assert here("train", "quantum", *keys, "--run-dir", "one").returncode == 0
    done = lockstep("train", "quantum", *keys, "--run-dir", "two", "-n", "2", "--launcher", "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (result(tmp_path / run) for run in ("one", "two"))
    assert one["params_sha256"] == two["params_sha256"]
    done = here("quantum", "compare", "two")
    assert done.stdout.splitlines()[0] == "next words of 6 held-out sentences"
    assert done.stdout.splitlines()[-1].startswith("the model ")
    word = Quantum(QuantumConfig(grammar=48)).sentences["train"][0][0]
    assert here("quantum", "predict", "one", word).stdout.splitlines()[1].split()[0] == "the"
    assert here("quantum", "export", "one", "--output", "x.npz").returncode == 0


@pytest.mark.slow
def test_training_words_gives_the_same_bits_on_1_to_4_ranks(lockstep) -> None:
    keys = ("grammar=200", "batch_size=40", "epochs=2", "embedding=trainable", "clip_norm=null")
    for objective in ("likelihood", "fidelity"):
        done = lockstep(
            "verify", "quantum", "--launchers", "mpi", *keys, f"objective={objective}",
            "word_scale=1", "optimizer.name=adam", "data.shuffle=true",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "equal: 5 runs, one SHA-256" in done.stdout


@pytest.mark.slow
def test_what_it_learns_beats_bigrams(tmp_path: Path) -> None:
    keys = yaml.safe_load(EXAMPLE.read_text())
    task = Quantum(QuantumConfig(**keys))
    model = ls.train(task, task.config, run_dir=tmp_path / "run", quiet=True).model
    found, bigram = of_model(task, model), baselines(task)["bigram"]
    assert found.accuracy > bigram.accuracy + 0.01
    assert found.rank < bigram.rank - 0.7
    assert found.loss < bigram.loss - 0.2
