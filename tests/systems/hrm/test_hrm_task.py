"""The recipe `hrm`: slots, orders, presets, averages, and one SHA-256 whatever happens."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from tests.conftest import result

from lockstep.config import override
from lockstep.data.random import seed_all
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.errors import ConfigError
from lockstep.systems.hrm.config import PRESETS, HrmConfig
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.sources import Options
from lockstep.systems.hrm.puzzles import generate, read_both
from lockstep.systems.hrm.reasoning import IGNORED, exact, stablemax_cross_entropy
from lockstep.systems.hrm.task import Hrm

SMALL = (
    "dim=16", "num_heads=2", "batch_size=12", "num_microbatches=5", "num_train=40", "num_val=20",
    "augment=2", "eval_batch_size=8", "max_segments=3", "eval_segments=2", "explore=0.5",
)  # fmt: skip
RUN = (*SMALL, "steps=10", "eval_every=4", "checkpoint.every=3", "log_every=1", "digest_every=2")


def small(*more):
    return Hrm(override(HrmConfig(), [*SMALL, *more]))


@pytest.mark.parametrize("model", ["recursive", "hierarchical"])
def test_a_step_is_a_segment_of_each_slot(model):
    """Against slots that are looked at one by one."""
    task = small(f"model={model}", "mixing=attention", "inner_multiple=8")
    torch.manual_seed(3)
    net = task.build_model()
    with torch.no_grad():
        net.halting.weight.normal_()
        net.halting.bias.zero_()
    puzzles = task.dataset("train").tensors
    batches = [tuple(t[i * 12 : i * 12 + 12] for t in puzzles) for i in range(6)]
    carry = task.carry(net, batches[0])
    expected = [None] * 12  # of each slot: puzzle, label, state, steps
    seen = Counter()
    for number, batch in enumerate(batches):
        seed_all(number)
        least = _drawn_least(12, 3)
        seed_all(number)
        loss, carry = task.loss(net, batch, carry)
        losses, halted_right, halted_steps = [], [], []
        for slot in range(12):
            if expected[slot] is None:
                expected[slot] = (batch[0][slot], batch[1][slot], net.initial(1), 0)
            inputs, stored, state, steps = expected[slot]
            one = inputs[None].long()
            state, logits, q_halt, q_continue = net(state, one)
            steps += 1
            labels = torch.where(stored == 0, IGNORED, stored.long())[None]
            right = exact(logits, labels)
            total = stablemax_cross_entropy(logits, labels) + _bce(q_halt, right.float()) / 2
            wants = q_halt > (0 if q_continue is None else q_continue)
            if q_continue is not None:
                _, _, next_halt, next_continue = net(state, one)
                best = next_halt if steps == 3 else torch.maximum(next_halt, next_continue)
                total = total + _bce(q_continue, best.sigmoid().detach()) / 2
            losses.append(total)
            halts = steps == 3 or (bool(wants) and steps >= least[slot])
            assert bool(carry["halted"][slot]) == halts
            if halts:
                halted_right.append(bool(right))
                halted_steps.append(steps)
            expected[slot] = None if halts else (inputs, stored, state, steps)
            seen[halts, steps] += 1
        torch.testing.assert_close(loss.sum, torch.stack(losses).sum(), rtol=1e-5, atol=1e-5)
        assert loss.weight == 12
        assert float(loss.metrics["exact"][0]) == sum(halted_right)
        assert [float(v) for v in loss.metrics["segments"]] == [
            sum(halted_steps),
            len(halted_steps),
        ]
    assert len(seen) >= 4  # slots that halted early, late, and that went on


def _drawn_least(count, most):
    explores = torch.rand(count) < 0.5
    return torch.where(explores, torch.randint(2, most + 1, (count,)), 0)


def _bce(q, target):
    p = q.double().sigmoid()
    return (-(target * p.log() + (1 - target) * (1 - p).log())).float()


def test_an_epoch_takes_a_random_puzzle_of_each_group_in_each_pass():
    puzzles = generate("sudoku", Options(4, 30, 10, 3, 0))["train"]
    assert puzzles.groups.tolist() == list(range(0, 124, 4))
    order = puzzles.epoch(12, np.random.default_rng(5))
    assert len(order) == 96  # 8 batches
    for start in (0, 30, 60):
        assert sorted(index // 4 for index in order[start : start + 30]) == list(range(30))
    assert len({index % 4 for index in order}) == 4
    assert order.tolist() == puzzles.epoch(12, np.random.default_rng(5)).tolist()
    assert order.tolist() != puzzles.epoch(12, np.random.default_rng(6)).tolist()


def test_puzzles_that_are_made_are_those_of_a_dataset(tmp_path):
    options = Options(4, 30, 10, 3, 7, clues=6)
    build("sudoku", tmp_path / "data", options)
    for split, mine in generate("sudoku", options).items():
        assert read_both(tmp_path / "data")[split].digest == mine.digest


def test_no_solution_of_validation_is_in_training():
    both = generate("sudoku", Options(4, 200, 100, 4, 0))
    train, val = ({tuple(row) for row in both[s].labels.tolist()} for s in ("train", "test"))
    assert train
    assert not train & val


@pytest.mark.parametrize("name", ["sudoku-4", *PRESETS])
def test_a_preset_sets_what_is_not_given(name, tmp_path):
    config = override(HrmConfig(), ["seed=3", f"preset={name}", "lr=0.5"])
    for key, value in PRESETS.get(name, {}).items():
        if key != "lr":
            there = getattr(config, key)
            given = value.items() if isinstance(value, dict) else None
            assert there == value if given is None else given <= there.model_dump().items()
    assert (config.lr, config.seed) == (0.5, 3)
    assert config == HrmConfig(preset=name, lr=0.5, seed=3)
    assert override(config, ["seed=4"]).dim == config.dim


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("preset=sudoku-5", "preset='sudoku-5'"),
        ("data.drop_last=false", "an epoch's last batch must fill all slots"),
        ("eval_segments=65", "eval_segments=65"),
        ("ema=1", "ema=1"),
    ],
)
def test_a_key_that_cannot_be_is_named(item, said):
    with pytest.raises(ConfigError, match=said):
        override(HrmConfig(), [item])


def test_the_learning_rate_grows_with_the_root_of_the_batch():
    task = small("batch_size=48", "base_batch_size=12", "lr_rule=sqrt", "lr=0.1")
    for name in ("adam_atan2", "adamw"):
        task.config = override(task.config, [f"optimizer.name={name}"])
        optimizer = task.build_optimizer(task.build_model())
        assert math.isclose(optimizer.param_groups[0]["lr"], 0.2)
        assert type(optimizer).__name__.lower() == name.replace("_", "")


def test_puzzles_that_halt_early_keep_their_answer():
    task = small("early_halting=true", "eval_segments=6")
    net = task.build_model()
    with torch.no_grad():
        net.halting.weight.normal_(generator=torch.Generator().manual_seed(1))
        net.halting.bias.zero_()
    inputs = task.dataset("val").tensors[0].long()
    answers, steps, _ = task.solve(net, inputs)
    assert len(set(steps.tolist())) > 1
    for number, count in enumerate(steps.tolist()):
        for later in answers[count - 1 :]:
            assert torch.equal(later[number], answers[count - 1][number])


def test_evaluations_use_the_average():
    task = small("ema=0.5")
    net = task.build_model()
    batch = task.dataset("val").tensors
    with torch.no_grad():
        plain = float(task.evaluate(net, batch).sum)
        task.average.average = {n: p + 0.1 for n, p in net.named_parameters()}
        assert float(task.evaluate(net, batch).sum) != plain


def same(run_dir, alone):
    there = result(run_dir)
    for key in ("params_sha256", "carry_sha256", "metrics"):
        assert there[key] == alone[key], key


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process."""
    from lockstep.launching.api import Session, run

    folder = tmp_path_factory.mktemp("alone")
    config = override(HrmConfig(), [*RUN, "threads=1"])
    run(Hrm(config), config, Session(str(folder / "run"), False, (), False))
    return result(folder / "run")


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys", "faults"),
    [
        ("mpi", 3, (), [(1, 4, "copy")]),
        pytest.param("local", 3, (), [(0, 5, "copied")], marks=pytest.mark.slow),
        pytest.param("torchrun", 4, (), [], marks=pytest.mark.slow),
        pytest.param("local", 2, ("optimizer.sharded=true",), [], marks=pytest.mark.slow),
        pytest.param(
            "local", 3, ("carry.buddy=false",), [(2, 7, "reduce")], marks=pytest.mark.slow
        ),
    ],
)
def test_any_ranks_give_the_bits_of_one_process(
    lockstep, alone, tmp_path, launcher, num_ranks, keys, faults
):
    env = to_env([PlannedFault(*fault) for fault in faults], tmp_path / "faults")
    ended = lockstep(
        "train", "hrm", "-n", num_ranks, "--launcher", launcher, "--run-dir", "run", *RUN, *keys,
        timeout=150, **env,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_run_is_resumed_in_the_middle_of_puzzles(lockstep, alone, tmp_path):
    run = tmp_path / "run"
    assert (
        lockstep("train", "hrm", "-n", 2, "--run-dir", run, *RUN, "stop_at_step=5").returncode == 0
    )
    more = ("-n", 3, "--launcher", "local", "stop_at_step=null")
    ended = lockstep("resume", run, *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run, alone)


def test_a_damaged_dataset_is_one_message(here, tmp_path):
    build("sudoku", tmp_path / "data", Options(4, 30, 10, 0, 0))
    (tmp_path / "data" / "train" / "all__labels.npy").write_bytes(b"no")
    ended = here("train", "hrm", "data_dir=data", *RUN)
    assert ended.returncode == 2
    assert "all__labels.npy" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_bf16_carries_states_of_bf16():
    task = small("precision.dtype=bf16")
    net = task.build_model()
    batch = tuple(t[:12] for t in task.dataset("train").tensors)
    with torch.autocast("cpu", torch.bfloat16):
        loss, carry = task.loss(net, batch, task.carry(net, batch))
    assert carry["slots"]["z_H"].dtype == torch.bfloat16
    assert carry["slots"]["inputs"].dtype == torch.uint8
    assert torch.isfinite(loss.sum)
