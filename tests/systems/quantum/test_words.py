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
from lockstep.systems.quantum.baselines import (
    NETWORKS,
    NGram,
    WittenBell,
    fitted,
    largest,
    of_network,
    score,
    targets_of,
    tuned,
)
from lockstep.systems.quantum.config import QuantumConfig
from lockstep.systems.quantum.task import Quantum

EXAMPLE = Path(__file__).parents[3] / "examples" / "quantum_words.yaml"


def quantum(**keys: Any) -> Quantum:
    return Quantum(QuantumConfig(**{"grammar": 40, "objective": "likelihood", **keys}))


@given(st.integers(0, 2**64 - 1), st.integers(1, 60))
@settings(max_examples=15, deadline=None)
def test_the_grammar_draws_different_sentences_and_splits_are_disjoint(
    seed: int, count: int
) -> None:
    found = grammar.splits(count, seed)
    sizes = {name: len(split) for name, split in found.items()}
    assert sizes == {"train": count, "test": max(1, count // 8), "val": max(1, count // 8)}
    every = [sentence for split in found.values() for sentence in split]
    assert len({*every}) == len(every)
    for sentence in every:
        for place, word in enumerate(sentence):
            assert word in grammar.followers(sentence[:place])
        assert not grammar.followers(sentence)
    assert grammar.splits(count, seed) == found


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
    expected = task.score(model, "test")
    assert found.sum.item() / float(found.weight) == pytest.approx(expected.loss)
    for name, value in (("accuracy", expected.accuracy), ("mean_rank", expected.rank)):
        total, count = found.metrics[name]
        assert float(total) / float(count) == pytest.approx(value)


def test_restarts_have_their_own_likelihoods() -> None:
    task = quantum(restarts=2, clip_norm=None)
    torch.manual_seed(0)
    model = task.build_model()
    held_out = task.dataset("val")
    batch = task.collate([held_out[i] for i in range(len(held_out))])
    totals = [task.evaluate(model, batch).metrics[f"restart_{i}"] for i in range(2)]
    losses = [float(total) / float(count) for total, count in totals]
    assert task.score(model, "val").loss == pytest.approx(min(losses))
    assert task.best_restart(model) == losses.index(min(losses))
    task.loss(model, batch).sum.backward()
    assert model.angles.grad.abs().amin(0).max() > 0


@pytest.mark.slow
def test_nothing_beats_the_grammar_itself_and_networks_beat_chance() -> None:
    task = quantum(grammar=300)
    found = task.baselines(task.build_model(), "test")
    assert found["chance"]["loss"] == pytest.approx(math.log(64))
    best = found.pop("the grammar itself (limit)")
    assert all(best["loss"] < other["loss"] for other in found.values())
    assert found["bigrams"]["loss"] < found["unigrams"]["loss"] < found["chance"]["loss"]
    assert found["trigrams (Witten-Bell)"]["loss"] < found["bigrams"]["loss"]
    most = task.build_model().angles.numel() + 64 * task.config.embedding_dim
    for kind in NETWORKS:
        name = next(name for name in found if name.startswith(f"{kind}, "))
        assert int(name.split()[1].replace(",", "")) <= most
        assert found[name]["loss"] < found["chance"]["loss"]


def test_witten_bell_is_what_its_equation_says() -> None:
    model = WittenBell([[0, 1, 2], [0, 1, 1], [1, 2]], 2, 3)
    # Of the five words that follow, 1 is seen three times and 2 twice: two kinds.
    unigrams = [2 / 7 * (1 / 3), 3 / 7 + 2 / 7 * (1 / 3), 2 / 7 + 2 / 7 * (1 / 3)]
    assert model.probabilities([]).tolist() == pytest.approx(unigrams)
    # After 1: 2 twice, 1 once.
    after = [2 / 5 * unigrams[0], 1 / 5 + 2 / 5 * unigrams[1], 2 / 5 + 2 / 5 * unigrams[2]]
    assert model.probabilities([0, 1]).tolist() == pytest.approx(after)
    assert model.probabilities([2]).tolist() == pytest.approx(unigrams)  # never followed


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_learns_what_follows_and_sees_no_later_word(kind: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[kind](4, largest(NETWORKS[kind], 300, 4, 6), 6)
    cycle = [[(first + i) % 4 for i in range(6)] for first in range(4)] * 20
    fitted(net, cycle, cycle[:4], seed=1)
    assert score(of_network(net, cycle[:4]), targets_of(cycle[:4])).accuracy == 1
    one, other = of_network(net, [[0, 1, 2, 3]]), of_network(net, [[0, 1, 2, 1]])
    assert torch.equal(one, other)


def test_held_out_sentences_do_not_depend_on_order_and_are_never_learned(tmp_path: Path) -> None:
    words = [f"a{i} b{i}" for i in range(30)]
    text = [*words, *words[:7]]  # some are there twice
    runs = []
    for lines in (text, text[::-1]):
        path = tmp_path / f"{len(runs)}.txt"
        path.write_text("\n".join(lines))
        runs.append(Quantum(QuantumConfig(corpus=path, val_fraction=0.2)).sentences)
    first, second = runs
    assert set(first["val"]) == set(second["val"])
    assert len(set(first["val"])) == 6
    assert not set(first["val"]) & set(first["train"])
    assert len(first["val"]) + len(first["train"]) == 37
    whole = Quantum(QuantumConfig(corpus=path, validate_on="train")).sentences
    assert whole["val"] == whole["train"]
    assert len(whole["train"]) == 37
    other = tmp_path / "val.txt"
    other.write_text("x y\n")
    assert Quantum(QuantumConfig(corpus=path, val_corpus=other)).sentences["val"] == [("x", "y")]
    nothing = Quantum(QuantumConfig(corpus=path, val_fraction=0))
    assert nothing.dataset("val") is None
    assert Quantum(QuantumConfig()).dataset("val") is None  # eight built-in sentences
    kept = Quantum(QuantumConfig(corpus=path)).vocabulary
    assert kept == nothing.vocabulary, "a word has the same vector whatever is held out"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grammar": 9, "corpus": "a.txt"}, "grammar=9: is a corpus itself"),
        ({"validate_on": "train", "val_corpus": "a.txt"}, "validate_on=train: leave val_corpus"),
        ({"val_fraction": 0.5}, "val_fraction=0.5"),
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


def test_of_very_few_sentences_none_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The cat flies\nA dog barks\n")
    task = Quantum(QuantumConfig(corpus=path))
    assert {name: len(split) for name, split in task.sentences.items()} == {"train": 2}
    assert task.baselines(task.build_model(), "train")["the model"]["loss"] > 0


def test_networks_do_not_choose_by_the_sentences_that_they_are_measured_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "lockstep.systems.quantum.task.reached", lambda *given: seen.append(given) or {}
    )
    task = quantum()
    for split in ("val", "test"):
        task.baselines(task.build_model(), split)
    for learned, chosen, measured, *_ in seen:
        assert not {*map(tuple, measured)} & {*map(tuple, learned), *map(tuple, chosen)}


def test_sentences_of_other_splits_that_are_learned_are_told(tmp_path: Path) -> None:
    for name, text in (("a", "The cat flies\nA dog barks\n"), ("b", "The cat flies\n")):
        (tmp_path / name).write_text(text)
    task = Quantum(QuantumConfig(corpus=tmp_path / "a", val_corpus=tmp_path / "b"))
    assert task.data_remarks() == ["1 sentences of val are training sentences, too"]
    assert quantum().data_remarks() == []


def test_any_number_of_ranks_gives_the_same_bits_and_commands_follow(
    here, lockstep, tmp_path: Path
) -> None:
    keys = ("--config", str(EXAMPLE), "grammar=48", "batch_size=24", "embedding_dim=8", "epochs=2")
    assert here("train", "quantum", *keys, "--run-dir", "one").returncode == 0
    done = lockstep("train", "quantum", *keys, "--run-dir", "two", "-n", "2", "--launcher", "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (result(tmp_path / run) for run in ("one", "two"))
    assert one["params_sha256"] == two["params_sha256"]
    done = here("eval", "two", "--baselines")
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("\n\n")[2].splitlines()
    assert table[0].split() == ["test,", "step", "4", "accuracy", "rank", "loss"]
    assert table[-2].startswith("the model ")
    assert table[-1].startswith("better loss than the model (")
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
    beside = task.baselines(model, "test")
    found, bigrams = beside["the model"], beside["bigrams"]
    assert found["accuracy"] > bigrams["accuracy"] + 0.01
    assert found["rank"] < bigrams["rank"] - 0.7
    assert found["loss"] < bigrams["loss"] - 0.2
