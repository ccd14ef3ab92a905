"""Gradients that are large, missing or of no elements: a message, or a result, but no silence."""

import re
from pathlib import Path

import pytest
from tests.conftest import result

from lockstep.observe import read_events

FILE = Path(__file__).parent / "odd_tasks.py"
SGD = ("optimizer.name=sgd", "local.outer_lr=1", "local.outer_momentum=0")


def one_line(ended):
    return " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.parametrize(
    "more", [(), ("clip_norm=1",), ("local.steps=2",), ("local.steps=2", "clip_norm=1", *SGD)]
)
def test_a_gradient_whose_norm_is_infinite_is_refused(here, tmp_path, more):
    """Adam's squares would be infinite, and its steps 0; clipping would multiply with 0."""
    ended = here("train", f"{FILE}:Large", "scale=1e30", *more, "--run-dir", "run")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    said = one_line(ended)
    assert "the gradient is finite, but too large for its norm" in said
    assert re.search(r"\(up to \S+e\+(29|30|31), in [02]\.(weight|bias)\)", said)
    assert "Traceback" not in said
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("local.steps=2",), ("sharding=optimizer",)])
def test_all_ranks_refuse_it_as_one(lockstep, more):
    ranks = ("-n", 3, "--launcher", "local")
    ended = lockstep("train", f"{FILE}:Large", "scale=1e30", *more, *ranks, "--run-dir", "run")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert one_line(ended).count("but too large for its norm") == 1


@pytest.mark.parametrize("more", [(), ("local.steps=2",)])
def test_gradients_below_that_are_learned_from(here, tmp_path, more):
    shas = []
    for scale in ("1e17", "0"):
        ended = here("train", f"{FILE}:Large", f"scale={scale}", *more, "--run-dir", scale)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        shas.append(result(tmp_path / scale)["params_sha256"])
    assert shas[0] != shas[1]


@pytest.mark.parametrize("more", [(), ("local.steps=2",)])
def test_what_is_frozen_on_the_way_is_refused(here, more):
    ended = here("train", f"{FILE}:Freezes", *more)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "0.weight.requires_grad was changed" in one_line(ended)


@pytest.mark.parametrize("name", ["none", "int8", "topk", "randomk", "onebit"])
def test_parameters_of_no_elements_are_trained(here, name):
    ended = here("train", f"{FILE}:Nothing", f"compression.name={name}")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_workers_with_too_few_samples_are_told_of(here, tmp_path):
    ended = here("train", f"{FILE}:Few", "local.steps=3", "--run-dir", "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    warned = [r for r in read_events(tmp_path / "run" / "events.jsonl") if r["event"] == "Warned"]
    assert [row["message"] for row in warned if "local.steps" in row["message"]] == [
        "local.steps=3: 5 samples of a step are less than one for each step of each of 4 workers; "
        "who has fewer takes fewer steps"
    ]
