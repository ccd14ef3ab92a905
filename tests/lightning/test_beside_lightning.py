"""LightningModules train to what Lightning's own Trainer makes of them, on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
from tests.lightning import modules
from tests.lightning.peer import by_lightning, start_of
from tests.lightning.trained import task_of, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")

SCRIPT = Path(__file__).parent / "trained.py"
FEW = ("MLP", "CNN", "OneCycle")
"""Those of the quick tests: metrics of steps and of epochs, hooks, batch norm, a scheduler."""
PLAIN = {"VAE": ("noise", 0.0), "Mixup": ("alpha", 0.0), "SimCLR": ("noise", 0.0)}
"""Arguments with which modules draw no random numbers."""
OFTEN_ZERO = ("GPT", "Bert")
"""Modules with gradients that are zero but for rounding, which Adam makes as large as any."""

every = [kind.__name__ for kind in (*modules.ALIKE, *modules.BY_MICROBATCH, *modules.RANDOM)]


def quick_or_slow(names):
    return [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in names]


def test_there_are_twenty():
    assert len(every) + len(modules.REFUSED) == 20


@pytest.mark.parametrize("name", quick_or_slow(every))
def test_one_rank_has_the_losses_of_lightning(name, tmp_path):
    kind = getattr(modules, name)
    pieces = 4 if kind in modules.BY_MICROBATCH else 1
    arguments = dict([PLAIN[name]] if name in PLAIN else [])
    keys = [f"module.{key}={value}" for key, value in arguments.items()]
    start = start_of(task_of(name, *keys))
    result, losses = trained(name, tmp_path, *keys)
    module, theirs, metrics = by_lightning(kind, start, result.config.epochs, pieces, **arguments)

    groups = [theirs[i : i + pieces] for i in range(0, len(theirs), pieces)]
    if name != "Quasi":  # Lightning's losses are those at the end of its line searches
        assert losses == pytest.approx([*map(sum, groups)], rel=2e-5)
    if name not in OFTEN_ZERO:
        mine = result.model.get_parameter
        for key, value in module.named_parameters():
            torch.testing.assert_close(mine(key), value, rtol=1e-4, atol=1e-5)
    if pieces == 1:
        evaluated = {k: v for k, v in metrics.items() if k.startswith("val")}
        own = {k.replace("val/", "", 1): v for k, v in result.metrics.items()} | result.metrics
        assert {k: own[k] for k in evaluated} == pytest.approx(evaluated, rel=1e-4)


def on_ranks(ranks, count, names, folder):
    ended = ranks("mpi" if count > 1 else "python", count, SCRIPT, folder, *names, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"name"')]
    return {row["name"]: row["sha256"] for row in rows}


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one(ranks, tmp_path):
    both = on_ranks(ranks, 2, ["CNN"], tmp_path / "2")
    assert both == {"CNN": trained("CNN", tmp_path / "1")[0].params_sha256}


@pytest.mark.slow
def test_any_number_of_ranks_has_the_bits_of_one(ranks, tmp_path):
    one, two, three = (on_ranks(ranks, n, every, tmp_path / str(n)) for n in (1, 2, 3))
    assert {*one} == {*every}
    assert one == two == three
