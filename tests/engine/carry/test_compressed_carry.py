"""What compression keeps goes with its microbatch, beside the carry of the task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.comm.local_transport import LocalTransport
from lockstep.comm.transport import Transport
from lockstep.config import CompressionConfig, TrainConfig
from lockstep.engine.carry.carries import named_tensors
from lockstep.engine.carry.compressed import CompressedCarries, dealt_carries
from lockstep.engine.carry.tree import Carry
from lockstep.parallel.arena import BLOCK, Segment
from lockstep.parallel.compression.memory import BLOCK as SCALED
from lockstep.parallel.compression.state import LeafState
from lockstep.parallel.layout import Range

NUM = 6
FLAT: Any = SimpleNamespace(
    segments=[Segment(torch.float32, BLOCK)],
    places=[[(0, torch.Size([20, 10])), (208, torch.Size([5]))]],
)
BLOCKS = BLOCK // SCALED
INITIAL = [torch.full([BLOCKS], 9, dtype=torch.int16)]


def carries(
    transport: Transport, name: str = "int8", has_task: bool = False, feeds_back: bool = True
) -> CompressedCarries:
    runtime: Any = SimpleNamespace(transport=transport, device=torch.device("cpu"))
    places: Any = SimpleNamespace(world=transport, is_split=False, step=3)
    about = CompressionConfig(name=name, error_feedback=feeds_back)  # type: ignore[arg-type]
    config = TrainConfig(num_microbatches=NUM, compression=about)
    first = INITIAL if name == "int8" else []
    return CompressedCarries(runtime, config, places, FLAT, first, has_task)


def state(number: int) -> LeafState:
    exponents = torch.arange(BLOCKS).to(torch.int16) * number % 5
    return LeafState([torch.full([BLOCK], float(number))], [exponents])


@pytest.mark.parametrize("has_task", [False, True])
def test_states_move_with_their_microbatches(has_task: bool) -> None:
    """From two ranks to three, of which the last one has nothing to do."""
    before = [Range(0, 2), Range(2, NUM), Range(NUM, NUM)]
    after = [Range(0, 4), Range(4, NUM), Range(NUM, NUM)]

    def call(transport: ThreadTransport) -> tuple[list[int], list[float], list[int], int]:
        made = carries(transport, has_task=has_task)
        for number in range(*before[transport.rank]):
            made.make_leaf(number, state(number))
            if has_task:
                made.make(number, Carry.of({"n": -number}, "test"))
        made.commit()
        assert made.deal_out(after) == []
        found = [number for number in range(NUM) if made.of_leaf(number) is not None]
        states = [made.of_leaf(number) for number in found]
        errors = [float(s.errors[0][0]) for s in states if s is not None]
        if has_task:
            assert [made.held[n].tree["n"] for n in found] == [-n for n in found]
        return found, errors, made.expected[0].tolist(), len(made.held)

    greatest = torch.stack([state(n).exponents[0] for n in range(NUM)]).amax(dim=0).tolist()
    for rank, (found, errors, expected, num_held) in enumerate(on_ranks(3, call)):
        assert found == errors == list(range(*after[rank]))
        assert expected == greatest
        assert num_held == len(after[rank]) * (1 + has_task)


def test_a_state_that_nobody_holds_is_missed_beside_carries_that_are_there() -> None:
    made = carries(LocalTransport(), has_task=True)
    for number in range(NUM):
        made.make(number, Carry.of({"n": number}, "test"))
        if number != 4:
            made.make_leaf(number, state(number))
    made.commit()
    assert made.deal_out([Range(0, NUM)]) == [NUM + 4]


def test_nothing_is_expected_anew_before_a_step_is_applied() -> None:
    made = carries(LocalTransport())
    seen = [torch.full([BLOCKS], 50, dtype=torch.int16)]
    made.expect(seen)
    assert made.expected == INITIAL
    made.settle(float("inf"))
    assert made.expected == INITIAL
    made.settle(1.0)
    assert made.expected == seen


def test_what_keeps_nothing_has_no_carries() -> None:
    places: Any = SimpleNamespace(world=LocalTransport(), is_split=False)
    runtime: Any = SimpleNamespace(transport=LocalTransport(), device=torch.device("cpu"))
    plain = dealt_carries(runtime, TrainConfig(), places, FLAT, [], False)
    assert plain == (None, None)
    about = CompressionConfig(name="topk", error_feedback=False)
    config = TrainConfig(compression=about)
    dealt, compressed = dealt_carries(runtime, config, places, FLAT, [], False)
    assert dealt is None
    assert compressed is not None
    dealt, compressed = dealt_carries(runtime, config, places, FLAT, [], True)
    assert dealt is compressed


def test_only_small_states_are_copied_unless_asked_for() -> None:
    transport: Any = SimpleNamespace(can_regroup=True, size=2, rank=0)
    assert not carries(transport).are_copied
    assert carries(transport, feeds_back=False).are_copied


def saved() -> tuple[CompressedCarries, dict[str, torch.Tensor], dict[str, Any]]:
    made = carries(LocalTransport(), has_task=True)
    for number in range(NUM):
        made.make(number, None)
        made.make_leaf(number, state(number))
    made.commit()
    return made, *named_tensors(made.held)


def test_a_saved_state_is_taken_again() -> None:
    made, tensors, structures = saved()
    made.check(tensors, structures)
    names = list(made.digests())
    assert names[NUM - 1 : NUM + 1] == [
        f"the carry of microbatch {NUM - 1}",
        "what compression keeps of microbatch 0",
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.zeros(BLOCK, dtype=torch.float64), "is torch.float64"),
        (torch.zeros(BLOCK - 1), rf"must be torch.float32 \[{BLOCK}\]"),
        (torch.zeros(2, BLOCK // 2), r"is torch.float32 \[2, "),
        (None, "is no state of compression.name=int8"),
    ],
)
def test_a_state_of_another_run_is_refused(wrong: torch.Tensor | None, said: str) -> None:
    made, tensors, structures = saved()
    if wrong is None:
        structures[str(NUM + 1)] = {"dict": {"error_0": {"tensor": "error_0"}}}
    else:
        tensors[f"{NUM + 1}/error_0"] = wrong
    with pytest.raises(ValueError, match=said):
        made.check(tensors, structures)
