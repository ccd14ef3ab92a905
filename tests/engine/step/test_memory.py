"""What a rank keeps, counted before it is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import lockstep as ls
from lockstep.comm.transport import LocalTransport
from lockstep.config import TrainConfig
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.runtime import shared_error
from lockstep.engine.step import memory
from lockstep.engine.step.memory import Kept
from lockstep.errors import ConfigError, EnvironError
from lockstep.nn.cutting import units_of

MIB = 1 << 20


def parts(blocks: int = 4):
    model = ls.nn.Pipeline(*[nn.Linear(512, 512, bias=False) for _ in range(blocks)])
    named = [list(model.named_parameters())]
    return model, FlatTensors(named, "parameter", {}, units_of(model), by_block=True)


def test_counted_bytes_are_those_of_the_design() -> None:
    """4 MiB of parameters in blocks of 1 MiB, 8 microbatches: 3 rows of sums, 2 states of Adam."""
    model, flat = parts()
    adam = optim.Adam(model.parameters())
    config = TrainConfig(num_microbatches=8)
    lean = memory.Needs(config, Kept(flat, adam), can_regroup=False)
    buddy = memory.Needs(config, Kept(flat, adam), can_regroup=True)
    assert lean.parameters == 4 * MIB
    assert lean.of("none", 1) == (1 + 3 + 1 + 2) * 4 * MIB
    assert lean.of("none", 4) == (1 + 1 + 1 + 2) * 4 * MIB
    assert lean.of("optimizer", 4) == (1 + 1 + 1) * 4 * MIB + 2 * MIB
    # With a buddy also copies of the two slices just stepped.
    assert buddy.of("optimizer", 4) == (1 + 1 + 1) * 4 * MIB + 4 * MIB + 2 * MIB
    assert buddy.of("gradients", 4) == 4 * MIB + MIB + 4 * MIB + 4 * MIB + 2 * MIB
    assert lean.of("gradients", 4) == 4 * MIB + MIB + 3 * MIB + 2 * MIB
    assert lean.of("parameters", 4) == MIB + 2 * MIB + 3 * MIB + 2 * MIB
    assert buddy.of("parameters", 4) == 2 * MIB + 2 * MIB + 4 * MIB + 4 * MIB
    sgd = memory.Needs(config, Kept(flat, optim.SGD(model.parameters(), 0.1)), can_regroup=False)
    assert sgd.of("none", 1) == (1 + 3 + 1) * 4 * MIB


def test_a_run_that_cannot_have_its_memory_is_told_what_would_do(monkeypatch) -> None:
    model, flat = parts()
    adam = optim.Adam(model.parameters())
    config = TrainConfig(num_microbatches=8)
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("ulimit -v 9", 8 * MIB)]))
    with pytest.raises(ConfigError) as caught:
        memory.check_memory(config, model, Kept(flat, adam), 1, can_regroup=True)
    message = str(caught.value)
    assert "memory: a rank needs at least 0.03 GiB" in message
    assert "and has 0.01 GiB (ulimit -v 9)" in message
    assert "sharding=parameters optimizer.buddy=false needs 0.01 GiB on each of 3 ranks" in message
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("ulimit -v 9", 24 * MIB)]))
    memory.check_memory(config, model, Kept(flat, adam), 1, can_regroup=True)


def test_tables_that_do_not_fit_are_refused(monkeypatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("ulimit -v 9", 8 * MIB)]))
    memory.check_table_memory({}, 1, False, cpu)
    memory.check_table_memory({"t": 16 * MIB}, 4, True, cpu)
    with pytest.raises(ConfigError) as caught:
        memory.check_table_memory({"t": 12 * MIB, "u": 6 * MIB}, 4, True, cpu)
    message = str(caught.value)
    assert "memory: a rank needs 0.01 GiB for the rows of t, u (world size 4), and has" in message
    assert "(ulimit -v 9); tables.buddy=false needs 0.01 GiB on each of 3 ranks" in message


def test_this_process_has_limits() -> None:
    limits = dict(memory.memory_limits())
    assert limits["the host's memory"] > 0


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_memory_that_cannot_be_had_is_one_message(kind) -> None:
    error = kind("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes\nmore")
    told = shared_error(LocalTransport(), error)
    assert isinstance(told, EnvironError)
    assert "rank 0 is out of memory: DefaultCPUAllocator: can't allocate memory" in str(told)
    assert "\n" not in str(told)


def test_what_compression_cuts_off_is_counted(monkeypatch) -> None:
    """A gradient for each of 8 microbatches, and those that the step makes; one row of sums."""
    model, flat = parts()
    sgd = optim.SGD(model.parameters(), 0.1)
    config = TrainConfig(num_microbatches=8, compression={"name": "int8"})
    needs = memory.Needs(config, Kept(flat, sgd), can_regroup=True)
    assert needs.of("none", 1) == (1 + 1 + 1 + 2 * 8) * 4 * MIB
    assert needs.of("none", 4) == (1 + 1 + 1 + 2 * 2) * 4 * MIB
    copied = TrainConfig(num_microbatches=8, compression={"name": "int8", "buddy": True})
    assert (
        memory.Needs(copied, Kept(flat, sgd), True).of("none", 4) == (1 + 1 + 1 + 4 * 2) * 4 * MIB
    )
    for key in ("carry", "optimizer"):  # the second is of slices
        other = TrainConfig(**copied.model_dump() | {key: {"buddy": False}})
        num_copies = 1 if key == "carry" else 2
        found = memory.Needs(other, Kept(flat, sgd), True).of("none", 4)
        assert found == (1 + 1 + 1 + 4 * num_copies) * 4 * MIB
    lost = TrainConfig(num_microbatches=8, compression={"name": "int8", "error_feedback": False})
    assert memory.Needs(lost, Kept(flat, sgd), True).of("none", 4) == (1 + 1 + 1) * 4 * MIB
    thin = TrainConfig(num_microbatches=8, compression={"name": "lowrank"})
    assert memory.Needs(thin, Kept(flat, sgd), True).of("none", 4) == (1 + 1 + 1 + 2 * 2) * 4 * MIB
    waiting = TrainConfig(
        num_microbatches=8, compression={"name": "lowrank", "error_feedback": False}
    )
    assert memory.Needs(waiting, Kept(flat, sgd), True).of("none", 4) == (1 + 1 + 1 + 2) * 4 * MIB
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("ulimit -v 9", 16 * MIB)]))
    with pytest.raises(ConfigError, match=r"error_feedback=false needs 0\.01 GiB"):
        memory.check_memory(config, model, Kept(flat, sgd), 1, can_regroup=True)


def test_what_workers_keep_is_counted(monkeypatch) -> None:
    """Two moments for each of 8 workers, those that the step makes, and copies of both."""
    model, flat = parts()
    sgd, adam = optim.SGD(model.parameters(), 0.1), optim.Adam(model.parameters())
    keys = {"num_microbatches": 8, "batch_size": 64, "local": {"steps": 4}}
    config, alone_config = TrainConfig(**keys), TrainConfig(**keys, carry={"buddy": False})
    alone = memory.Needs(config, Kept(flat, sgd), True).of("none", 4)
    workers = memory.Needs(config, Kept(flat, sgd, inner=adam), True)
    assert workers.of("none", 4) == alone + (2 + 2 * 2 * 2 * 2) * 4 * MIB
    for uncopied in (
        memory.Needs(config, Kept(flat, sgd, inner=adam), False),
        memory.Needs(alone_config, Kept(flat, sgd, inner=adam), True),
    ):
        assert uncopied.of("none", 4) == alone + (2 + 2 * 2 * 2) * 4 * MIB
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("ulimit -v 9", 16 * MIB)]))
    with pytest.raises(ConfigError, match=r"or have fewer workers \(num_microbatches\)"):
        memory.check_memory(config, model, Kept(flat, sgd, inner=adam), 1, can_regroup=True)


def test_outputs_of_the_whole_batch_are_counted(monkeypatch) -> None:
    """With them no more than the optimizer's state can be in slices."""
    model, flat = parts()
    adam, config = optim.Adam(model.parameters()), TrainConfig(num_microbatches=8)
    alone = memory.Needs(config, Kept(flat, adam), False).of("none", 1)
    assert memory.Needs(config, Kept(flat, adam, gathered=MIB), False).of("none", 1) == alone + MIB
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("here", 16 * MIB)]))
    with pytest.raises(ConfigError, match=r"state and 0\.01 GiB of gathered.*batch_size") as caught:
        memory.check_memory(config, model, Kept(flat, adam, gathered=6 * MIB), 1, can_regroup=True)
    assert "sharding=optimizer optimizer.buddy=false needs 0.02 GiB on each of" in str(caught.value)


@pytest.mark.parametrize(
    ("compression", "num_copies", "num_errors"),
    [
        ({"name": "int8"}, 1, 1),
        ({"name": "int8", "buddy": True}, 2, 2),
        ({"name": "int8", "error_feedback": False}, 2, 0),
        ({"name": "none", "error_feedback": True}, 2, 0),
    ],
)
def test_what_workers_and_compression_keep_is_copied_together(
    compression: dict, num_copies: int, num_errors: int
) -> None:
    model, flat = parts()
    sgd, adam = optim.SGD(model.parameters(), 0.1), optim.Adam(model.parameters())
    keys = {"num_microbatches": 8, "batch_size": 64, "local": {"steps": 4}}
    config = TrainConfig(**keys, compression=compression)
    bare = TrainConfig(**keys, compression=compression | {"error_feedback": False})
    plain = memory.Needs(bare, Kept(flat, sgd), True).of("none", 4)
    found = memory.Needs(config, Kept(flat, sgd, inner=adam), True).of("none", 4)
    assert found == plain + (2 + 2 * 2 * 2 * num_copies + 2 * 2 * num_errors) * 4 * MIB


def refusal(monkeypatch, available: int, **keys) -> str:
    """What a run of 8 microbatches on two ranks with some MiB is told."""
    model, flat = parts()
    sgd, adam = optim.SGD(model.parameters(), 0.1), optim.Adam(model.parameters())
    config = TrainConfig(num_microbatches=8, batch_size=64, **keys)
    inner = adam if config.local.steps > 1 else None
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([("here", available * MIB)]))
    with pytest.raises(ConfigError) as caught:
        memory.check_memory(config, model, Kept(flat, sgd, inner=inner), 2, can_regroup=True)
    return str(caught.value)


def test_only_keys_that_would_do_are_named(monkeypatch) -> None:
    """Without what is cut off 12 MiB suffice, of which 4 are there already."""
    feedback, buddy = "compression.error_feedback=false needs", "carry.buddy=false needs"
    assert feedback in refusal(monkeypatch, 8, compression={"name": "int8"})
    assert feedback not in refusal(monkeypatch, 7, compression={"name": "int8"})
    lost = {"name": "int8", "error_feedback": False}
    assert feedback not in refusal(monkeypatch, 7, compression=lost)
    copied = {"name": "int8", "buddy": True}
    assert buddy in refusal(monkeypatch, 60, compression=copied)
    workers = refusal(monkeypatch, 100, local={"steps": 4})
    assert buddy in workers
    assert feedback not in workers
    assert buddy not in refusal(monkeypatch, 80, local={"steps": 4}, carry={"buddy": False})
