from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import result

from lockstep import config as config_module
from lockstep.data.random import data_digest
from lockstep.errors import ConfigError, DataError
from lockstep.systems.quantum.commands import _without_row
from lockstep.systems.quantum.config import QuantumConfig
from lockstep.systems.quantum.task import Quantum
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quantum(**keys: Any) -> Quantum:
    return Quantum(QuantumConfig(**keys))


def model(task: Quantum) -> QuantumTransformer:
    torch.manual_seed(task.config.seed)
    return task.build_model()


def whole(task: Quantum, split: str = "train") -> Sentences:
    dataset = task.dataset(split)
    assert dataset is not None
    return task.collate([dataset[i] for i in range(len(dataset))])


def test_the_defaults_are_the_guides() -> None:
    config = QuantumConfig()
    assert (config.epochs, config.lr, config.seed, config.clip_norm) == (50, 0.01, 42, 1.0)
    assert (config.num_layers, config.embedding_dim, config.checkpoint.every) == (1, 4, 10)
    assert config.optimizer.name == "sgd"
    assert model(quantum()).angles.numel() == 48


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"embedding_dim": 6}, r"embedding_dim=6: must be a power of two.* take 4 or 8"),
        ({"embedding_dim": 1}, "embedding_dim=1"),
        ({"parts": 2}, "parts=2: needs another deal"),
        ({"deal": "restarts", "parts": 2}, "1 restarts cannot be distributed"),
        ({"shards": "strided", "data": {"shuffle": True}}, "needs data.shuffle=false"),
        ({"grad": "shift"}, "grad=shift: needs backend=circuit"),
        ({"shots": 9, "backend": "circuit"}, "shots=9: needs backend=circuit grad=shift"),
        ({"deal": "shifts", "backend": "circuit"}, "deal=shifts: needs"),
        ({"deal": "transitions", "backend": "circuit"}, "needs backend=closed_form"),
        ({"restarts": 2}, "set clip_norm=null"),
        ({"optimizer": {"name": "lbfgs"}}, "clip_norm=null"),
        ({"optimizer": {"name": "natural"}, "clip_norm": None, "restarts": 2}, "one restart"),
    ],
)
def test_bad_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^test: .*{message}"):
        config_module.build(QuantumConfig, keys, "test")


def train(task: Quantum) -> tuple[float, QuantumTransformer]:
    """The mean loss after plain steps on the whole corpus."""
    made = model(task)
    config = task.config
    optimizer = task.build_optimizer(made)
    if optimizer is None:
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config.optimizer.name]
        optimizer = kind(made.parameters(), lr=config.lr)
    batch = whole(task)
    for _ in range(config.epochs):
        optimizer.zero_grad()
        loss = task.loss(made, batch)
        (loss.sum / loss.weight).backward()
        optimizer.step()
    found = task.evaluate(
        made, whole(Quantum(config.model_copy(update={"validate_on": "train"})), "val")
    )
    return found.sum.item() / found.weight, made


@pytest.mark.parametrize(
    "keys", [{"backend": "circuit"}, {"optimizer": {"name": "natural"}, "clip_norm": None}]
)
def test_too_many_dimensions_are_refused_before_memory_is_requested(keys: dict[str, Any]) -> None:
    task = quantum(embedding_dim=4096, **keys)
    made = model(task)

    def start() -> None:
        if task.build_optimizer(made) is None:
            task.loss(made, whole(task))

    with pytest.raises(ConfigError, match=r"dimension 4096: needs [\d,]+ bytes .* there are [\d,]"):
        start()


def test_gradient_descent_for_50_epochs() -> None:
    assert 0.57 < train(quantum())[0] < 0.65


@pytest.mark.parametrize(
    ("optimizer", "lr", "epochs"),
    [("adam", 0.05, 300), ("lbfgs", 1.0, 100), ("natural", 0.1, 60)],
)
def test_good_optimizers_reach_the_optimum(optimizer: str, lr: float, epochs: int) -> None:
    keys = {"optimizer": {"name": optimizer}, "lr": lr, "epochs": epochs, "clip_norm": None}
    assert train(quantum(**keys))[0] == pytest.approx(0.2313, abs=0.0007)


def test_one_sentence_gets_as_good_as_any_unitaries_can(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("The cat flies\n")
    keys = {"optimizer": {"name": "lbfgs"}, "lr": 1.0, "epochs": 150, "clip_norm": None}
    loss, _ = train(quantum(corpus=path, **keys))
    assert loss == pytest.approx(0.063, abs=0.005)


def test_restarts_train_as_if_alone() -> None:
    keys: dict[str, Any] = {"clip_norm": None, "epochs": 5, "lr": 0.05}
    together = train(quantum(restarts=3, **keys))[1].angles
    alone = quantum(**keys)
    made = model(quantum(restarts=3, **keys))
    for index in range(3):
        one = model(alone)
        with torch.no_grad():
            one.angles.copy_(made.angles[index : index + 1])
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            (alone.loss(one, whole(alone)).sum / 8).backward()
            optimizer.step()
        assert (one.angles[0] - together[index]).abs().max() < 1e-14


@pytest.mark.parametrize(
    "keys",
    [
        {"deal": "transitions", "parts": 3},
        {"deal": "restarts", "parts": 2, "restarts": 4, "clip_norm": None},
        {"restarts": 4, "clip_norm": None},
        {"deal": "shifts", "parts": 5, "backend": "circuit", "grad": "shift"},
    ],
)
def test_dealing_out_parts_changes_neither_loss_nor_gradient(keys: dict[str, Any]) -> None:
    plain = quantum(**{k: v for k, v in keys.items() if k not in ("deal", "parts")})
    distributed = quantum(**keys)
    results = []
    for task in (plain, distributed):
        made, sum_, weight = model(task), 0.0, 0.0
        dataset = task.dataset("train")
        for first in range(0, len(dataset), 3):  # several microbatches
            rows = range(first, min(first + 3, len(dataset)))
            loss = task.loss(made, task.collate([dataset[i] for i in rows]))
            loss.sum.backward()
            sum_, weight = sum_ + loss.sum.item(), weight + loss.weight
            assert loss.metrics["probability"][1] == pytest.approx(loss.weight)
        assert made.angles.grad is not None
        results.append((sum_ / weight, made.angles.grad / weight))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-13)
    assert (results[0][1] - results[1][1]).abs().max() < 1e-13


def test_the_three_backends_train_alike() -> None:
    keys: dict[str, Any] = {"epochs": 3, "lr": 0.1, "restarts": 2, "clip_norm": None}
    angles = [
        train(quantum(**keys, **backend))[1].angles.detach()
        for backend in ({}, {"backend": "circuit"}, {"backend": "circuit", "grad": "shift"})
    ]
    assert (angles[0] - angles[1]).abs().max() < 1e-12
    assert (angles[0] - angles[2]).abs().max() < 1e-9


def test_shots_are_noise_around_the_exact_loss() -> None:
    exact = quantum()
    noisy = quantum(backend="circuit", grad="shift", shots=20_000)
    made = model(exact)
    expected = exact.loss(made, whole(exact)).sum.item()
    torch.manual_seed(1)
    found = noisy.loss(made, whole(noisy)).sum
    assert 0 < abs(found.item() - expected) < 0.5
    torch.manual_seed(1)
    assert found.item() == noisy.loss(made, whole(noisy)).sum.item()


def test_strided_shards() -> None:
    words = {tuple(s) for s, _ in (quantum().dataset("train")[i] for i in range(8))}
    assert len(words) == 8
    task = quantum(shards="strided", num_microbatches=3)
    plain = [quantum().dataset("train")[i][0].tolist() for i in range(8)]
    distributed = [task.dataset("train")[i][0].tolist() for i in range(8)]
    assert distributed == [plain[i] for i in (0, 3, 6, 1, 4, 7, 2, 5)]


def test_bad_corpora_are_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The cat\nstop\n")
    with pytest.raises(DataError, match=r"corpus\.txt: line 2: 'stop' is one word"):
        quantum(corpus=path).build_model()
    path.write_text("")
    with pytest.raises(DataError, match="holds no sentence"):
        quantum(corpus=path).dataset("train")


def test_a_corpus_without_a_test_corpus_has_no_test_split(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The cat flies\n")
    assert quantum(corpus=path).dataset("test") is None
    assert len(quantum(corpus=path, test_corpus=path).dataset("test")) == 1
    assert len(quantum().dataset("test")) == 4


def test_thousands_of_sentences(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    lines = [" ".join(f"w{(i * j) % 97}" for j in range(1, 3 + i % 9)) for i in range(5000)]
    path.write_text("\n".join(lines))
    task = quantum(corpus=path, val_fraction=0)
    loss = task.loss(model(task), whole(task))
    assert loss.weight == 5000
    loss.sum.backward()


def test_prediction_ranks_the_training_vocabulary() -> None:
    _, made = train(quantum(optimizer={"name": "adam"}, lr=0.05, epochs=100))
    task = quantum()
    ranked = task.predict(made, "The quick brown")
    assert len(ranked) == len({each.word for each in ranked}) == 36
    likely = [each.probability for each in ranked]
    assert likely == sorted(likely, reverse=True)
    assert sum(likely) == pytest.approx(1)
    assert sum(each.bigram for each in ranked) == pytest.approx(1)
    alike = made.rank_next([0, 3, 4], torch.tensor(task.rows(made, ranked[0].word)))
    rest = made.rank_next([0, 3, 4], torch.arange(36))
    assert likely[0] == pytest.approx(float(alike / rest.sum()), rel=1e-6)
    with pytest.raises(ConfigError, match="has no vector for 'zebra'"):
        task.predict(made, "The zebra")
    with pytest.raises(ConfigError, match="at least one"):
        task.predict(made, " ")


def test_any_number_of_ranks_gives_the_same_bits(here, lockstep, tmp_path) -> None:
    keys = ("quantum", "epochs=6", "--run-dir")
    assert here("train", *keys, "one").returncode == 0
    done = lockstep("train", *keys, "two", "-n", "2", "--launcher", "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (result(tmp_path / run) for run in ("one", "two"))
    assert one["params_sha256"] == two["params_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["deal=transitions", "parts=3"],
        ["deal=shifts", "parts=2", "backend=circuit", "grad=shift", "shots=1000"],
        ["deal=restarts", "parts=2", "restarts=4", "clip_norm=null"],
        ["optimizer.name=lbfgs", "lr=1", "clip_norm=null"],
        ["optimizer.name=natural", "lr=0.05", "clip_norm=null", "embedding_dim=8"],
        ["dtype=complex64", "embedding_dim=16", "shards=strided", "num_microbatches=5"],
    ],
)
def test_any_number_of_ranks_gives_the_same_bits_whatever_is_distributed(lockstep, keys) -> None:
    done = lockstep("verify", "quantum", "--launchers", "mpi", "epochs=12", *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 5 runs, one SHA-256" in done.stdout


def test_a_run_says_how_many_samples_a_step_has_and_not_how_many_fit(here, tmp_path) -> None:
    """The corpus has 8 sentences, and batch_size is a million."""
    ended = here("train", "quantum", "steps=2", "--run-dir", "run")
    assert "a step: 8 samples in 8 microbatches" in ended.stdout
    rows = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (started,) = (row for row in rows if row["event"] == "RunStarted")
    assert (started["batch_size"], started["num_samples"]) == (8, 8)
    assert {row["samples"] for row in rows if row["event"] == "StepDone"} == {8}


def test_an_export_says_which_epochs_have_no_row() -> None:
    log = "epoch,loss,grad_norm,seconds\n4,1.0,0.1,1\n8,1.0,0.1,1\n"
    (line,) = _without_row(log, 10)
    assert line.startswith("epochs without a row: 1-3, 5-7, 9-10 (")
    assert "log_every=1" in line
    assert _without_row(log, 0) == []


def test_stop_resume_predict_and_export(here, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    done = here("train", "quantum", "--run-dir", run, "epochs=20", "stop_at_step=7")
    assert done.returncode == 0, done.stderr
    done = here("resume", run)
    assert done.returncode == 0, done.stderr
    again = here("train", "quantum", "--run-dir", run, "--resume", "epochs=20")
    assert again.returncode == 0, again.stderr  # a finished run has nothing to do
    straight = str(tmp_path / "straight")
    here("train", "quantum", "--run-dir", straight, "epochs=20")
    assert result(run)["params_sha256"] == result(straight)["params_sha256"]

    done = here("quantum", "export", run, "--output", str(tmp_path / "found.npz"))
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz", allow_pickle=False) as found:
        assert (found["params"].shape, found["epoch"]) == ((48,), 20)
        assert (found["lr"], found["seed"]) == (0.01, 42)
        assert found["embeddings"].shape == (len(found["words"]), 4)
    rows = (tmp_path / "found.csv").read_text().splitlines()
    assert rows[0] == "epoch,loss,grad_norm,seconds"
    assert [row.partition(",")[0] for row in rows[1:]] == [str(i) for i in range(1, 21)]
    assert "without a row" not in done.stdout
    done = here("quantum", "predict", run, "The quick", "--top", "3")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["model", "bigram"]
    assert len(rows) == 3
    pytest.importorskip("qiskit")
    assert "Rz(θ[47])" in here("quantum", "draw", run, "The cat flies").stdout
    for name, suffix in (("qasm3", "qasm3"), ("csv", "csv")):
        done = here("quantum", "export", run, "--sentence", "The cat flies", "--format", name)
        assert done.returncode == 0, done.stderr
        path, said = done.stdout.strip().split(": ")
        assert path == f"{run}/circuit.{suffix}"
        wanted, found = (float(text.split()[-1]) for text in said.split(", ")[1:])
        assert wanted == pytest.approx(found, rel=1e-8)
        assert 0 < wanted < 1
    done = here("quantum", "predict", run, "zebra")
    assert (done.returncode, "no vector for 'zebra'" in done.stderr) == (2, True)


def test_runs_of_older_versions_know_their_data_again() -> None:
    """Run directories keep this digest, and classes have other modules by now."""
    batch = Sentences(*[torch.arange(3) for _ in Sentences._fields])
    digest = "8d218abdf684d8edf03236b83cda3406303fca7128d58f3a4be687961924c620"
    assert data_digest(batch) == digest
