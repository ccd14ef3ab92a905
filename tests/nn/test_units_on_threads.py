"""Models that are no Pipeline in slices and stages: the bits of one rank, and how much is whole.

Ranks are threads, so nothing here draws random numbers.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from tests.nn.unit_models import (
    Around,
    AsItIs,
    Bare,
    Decoder,
    Functional,
    InUnits,
    Long,
    Moody,
    Normed,
    Remembering,
    Turned,
    Twin,
    Words,
)
from tests.stepping import advance
from tests.thread_transport import ThreadTransport, on_ranks
from torch import nn

from lockstep.config import MeshConfig, TrainConfig
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.capture import whole_digest
from lockstep.engine.step.workspace import Workspace
from lockstep.errors import LockstepError
from lockstep.parallel.fold import BLOCK

STEPS = 3


pytestmark = pytest.mark.usefixtures("generators_of_threads")


def begun(
    task: type[Words], kind: type[nn.Module], transport: ThreadTransport, **keys: Any
) -> Parts:
    mesh = MeshConfig(pp=keys.pop("pp", 1), interleave=keys.pop("interleave", 1))
    about = {"batch_size": 16, "num_microbatches": 5, "epochs": 2, "clip_norm": 0.4} | keys
    config = TrainConfig(mesh=mesh, **about)
    cpu = torch.device("cpu")
    runtime = Runtime(transport, cpu, transport.rank, "python", 0, lambda _: None, lambda: None)
    made = type(task.__name__, (task,), {"kind": kind})
    return assemble(made(), config, runtime)


def trained(task: type[Words], kind: type[nn.Module], size: int, **keys: Any) -> str:
    def body(transport: ThreadTransport) -> str:
        parts = begun(task, kind, transport, **keys)
        mesh = parts.placement.mesh
        own = mesh.of_ranks(mesh.of_each_replica)[transport.rank]
        advance(parts, 0, STEPS, own)
        return whole_digest(parts.train_step)

    [digest] = set(on_ranks(size, body))
    return digest


@cache
def alone(task: type[Words], kind: type[nn.Module], clip_norm: float | None = 0.4) -> str:
    return trained(task, kind, 1, clip_norm=clip_norm)


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        (2, {"pp": 2}),
        (4, {"pp": 2, "sharding": "parameters"}),
        (4, {"sharding": "parameters"}),
        (3, {"sharding": "gradients"}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 4}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "interleave": 2}, marks=pytest.mark.slow),
    ],
)
def test_stages_and_slices_give_the_bits_of_one_rank(size: int, keys: dict[str, Any]) -> None:
    assert trained(Words, Decoder, size, **keys) == alone(Words, Decoder)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        (Decoder, "parameters"),
        (Functional, "parameters"),
        pytest.param(Functional, "gradients", marks=pytest.mark.slow),
        (Turned, "parameters"),
        (Moody, "gradients"),
        pytest.param(Twin, "gradients", marks=pytest.mark.slow),
    ],
)
def test_units_give_the_bits_of_one_rank(kind: type[nn.Module], sharding: str) -> None:
    assert trained(InUnits, kind, 3, sharding=sharding) == alone(InUnits, kind)


@pytest.mark.parametrize("kind", [Turned, Normed])
def test_stages_of_blocks_in_another_order_and_with_buffers(kind: type[nn.Module]) -> None:
    assert trained(Words, kind, 2, pp=2, sharding="parameters") == alone(Words, kind)


@pytest.mark.parametrize("kind", [Decoder, Twin])
def test_units_that_are_found_give_the_bits_of_the_model_as_it_is(kind: type[nn.Module]) -> None:
    keys: dict[str, Any] = {"sharding": "parameters", "clip_norm": None}
    assert trained(AsItIs, kind, 2, **keys) == alone(AsItIs, kind, None)


def test_stages_train_what_the_plain_model_does() -> None:
    """One gradient for each use of a weight changes the order of sums only if there are three."""
    assert alone(Words, Decoder, None) == alone(AsItIs, Decoder, None)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_rank_has_a_slice_and_at_most_two_units(
    monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    most: dict[int, int] = {}
    monkeypatch.setattr(ThreadTransport, "runs_ahead", lambda transport, num_bytes: runs_ahead)

    def note(flat: FlatTensors) -> None:
        there = sum(memory.untyped_storage().nbytes() for memory in flat.flats)
        most[id(flat)] = max(there, most.get(id(flat), 0))

    waited = Counter[int]()
    gather = Workspace.gather

    def gathered(workspace: Workspace, segment: int) -> None:
        waited[id(workspace)] += 1
        gather(workspace, segment)

    monkeypatch.setattr(Workspace, "gather", gathered)
    usual = FlatTensors.open

    def opened(flat: FlatTensors, segment: int) -> None:
        usual(flat, segment)
        note(flat)

    monkeypatch.setattr(FlatTensors, "open", opened)

    def body(transport: ThreadTransport) -> tuple[int, int, int, int, int]:
        parts = begun(InUnits, Long, transport, sharding="parameters", num_microbatches=4)
        step, flat = parts.train_step, parts.train_step.flat
        most.pop(id(flat), None)
        del waited[id(step.workspace)]
        mesh = parts.placement.mesh
        own = mesh.of_ranks(mesh.of_each_replica)[transport.rank]
        advance(parts, 0, 1, own)
        slices = sum(s.parameters.nbytes for s in step.workspace.every_slice)
        sizes = sorted(s.numel * s.dtype.itemsize for s in flat.segments)
        return most[id(flat)], slices, sum(sizes), sizes[-1], waited[id(step.workspace)]

    for whole, slices, every, largest, num_waited in on_ranks(4, body):
        # Of a pass's blocks the first one only, which backward is there already.
        assert num_waited == 1 if runs_ahead else num_waited > len(Long().blocks)
        assert whole <= 2 * largest
        assert slices + whole <= every / 4 + 2 * largest + len(Long().blocks) * BLOCK * 4
        assert whole < every / 3


@pytest.mark.parametrize(
    ("task", "kind", "keys", "words"),
    [
        (Words, Around, {"pp": 2}, "Task.loss: loss differs when blocks are computed by stages"),
        (Words, Functional, {"pp": 2}, "differs when blocks are computed by stages"),
        (Words, Remembering, {"pp": 2}, "differs when blocks are computed by stages"),
        (Words, Decoder, {"pp": 5}, "the Decoder can be cut into 4; set mesh.pp to at most 4"),
        (InUnits, Decoder, {"pp": 2}, "mesh.pp=2: the model is a Decoder, which is one block"),
        (InUnits, Twin, {"sharding": "parameters"}, "calls it 2 times; it must be called once"),
        (InUnits, Moody, {"sharding": "parameters"}, "in the order of the first microbatch"),
        (AsItIs, Decoder, {"sharding": "parameters"}, "clip_norm=0.4 needs a norm that is added"),
        (AsItIs, Bare, {"sharding": "parameters"}, "name its units in build_model"),
        (
            Words,
            Decoder,
            {"activation_checkpointing": ("blocks",)},
            "activation_checkpointing='blocks': blocks has several units or blocks in it",
        ),
    ],
)
def test_what_cannot_be_parted_is_refused(
    task: type[Words], kind: type[nn.Module], keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(LockstepError) as refused:
        trained(task, kind, 1, **keys)
    assert words in str(refused.value)
