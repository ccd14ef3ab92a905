"""What compression keeps goes with its microbatch, beside the carry of the task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.comm.transport import LocalTransport, Transport
from lockstep.config import CompressionConfig, TrainConfig
from lockstep.engine.carry import Carry
from lockstep.engine.carry.distributed_carries import CompressedCarries, distributed_carries
from lockstep.parallel.compression.reduction import BLOCK as SCALED
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import Range

NUM = 6
FLAT: Any = SimpleNamespace(
    segments=[Segment(torch.float32, BLOCK)],
    specs=[[(0, torch.Size([20, 10])), (208, torch.Size([5]))]],
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


def errors(number: int) -> list[torch.Tensor]:
    return [torch.full([BLOCK], float(number))]


def agreed(value: int) -> list[torch.Tensor]:
    return [torch.full([BLOCKS], value, dtype=torch.int16)]


@pytest.mark.parametrize("has_task", [False, True])
def test_states_move_with_their_microbatches(has_task: bool) -> None:
    """From two ranks to three, of which the last one has nothing to do and is new."""
    before = [Range(0, 2), Range(2, NUM), Range(NUM, NUM)]
    after = [Range(0, 4), Range(4, NUM), Range(NUM, NUM)]

    def call(transport: ThreadTransport) -> tuple[list[int], list[float], list[int], int]:
        made = carries(transport, has_task=has_task)
        for number in range(*before[transport.rank]):
            made.make_leaf(number, errors(number))
            if has_task:
                made.make(number, Carry.of({"n": -number}, "test"))
        if transport.rank < 2:
            made.agree(agreed(70))
        made.commit()
        assert made.redistribute(after) == []
        found = [number for number in range(NUM) if made.of_leaf(number)]
        values = [float(made.of_leaf(number)[0][0]) for number in found]
        if has_task:
            assert [made.committed[n].tree["n"] for n in found] == [-n for n in found]
        return found, values, made.agreed[0].tolist(), len(made.committed)

    for rank, (found, values, there, num_held) in enumerate(on_ranks(3, call)):
        assert found == values == list(range(*after[rank]))
        assert there == [70] * BLOCKS
        assert num_held == len(after[rank]) * (1 + has_task) + 1


def test_a_state_that_nobody_holds_is_missed_beside_carries_that_are_there() -> None:
    made = carries(LocalTransport(), has_task=True)
    for number in range(NUM):
        made.make(number, Carry.of({"n": number}, "test"))
        if number != 4:
            made.make_leaf(number, errors(number))
    made.agree(agreed(70))
    made.commit()
    assert made.redistribute([Range(0, NUM)]) == [NUM + 4]


def test_nothing_is_agreed_on_before_a_step_is_applied() -> None:
    made = carries(LocalTransport())
    made.begin()
    made.agree(agreed(50))
    assert made.agreed == INITIAL
    made.settle(float("inf"))
    assert made.agreed == INITIAL
    made.settle(1.0)
    assert made.agreed[0].tolist() == [50] * BLOCKS


def test_a_rank_that_follows_a_step_without_its_sums_gets_what_all_agreed_on() -> None:
    """Rank 1 has computed its leaves, but not heard of the sums that rank 0 has applied."""

    def call(transport: ThreadTransport) -> list[int]:
        made = carries(transport)
        ranges = [Range(0, 3), Range(3, NUM)]
        for step in (1, 2):
            made.begin()
            for number in range(*ranges[transport.rank]):
                made.make_leaf(number, errors(number))
            if step == 1 or transport.rank == 0:
                made.agree(agreed(step))
            made.settle(1.0)
        assert made.redistribute(ranges) == []
        return made.agreed[0].tolist()

    assert on_ranks(2, call) == [[2] * BLOCKS] * 2


def test_what_keeps_nothing_has_no_carries() -> None:
    places: Any = SimpleNamespace(world=LocalTransport(), is_split=False)
    runtime: Any = SimpleNamespace(transport=LocalTransport(), device=torch.device("cpu"))
    plain = distributed_carries(runtime, TrainConfig(), places, FLAT, [], False)
    assert plain == (None, None)
    about = CompressionConfig(name="topk", error_feedback=False)
    config = TrainConfig(compression=about)
    distributed, compressed = distributed_carries(runtime, config, places, FLAT, [], False)
    assert distributed is None
    assert compressed is not None
    distributed, compressed = distributed_carries(runtime, config, places, FLAT, [], True)
    assert distributed is compressed


def test_only_small_states_are_copied_by_default() -> None:
    transport: Any = SimpleNamespace(can_regroup=True, size=2, rank=0)
    assert not carries(transport).are_copied
    assert carries(transport, feeds_back=False).are_copied


def saved() -> tuple[CompressedCarries, dict[str, torch.Tensor], dict[str, Any]]:
    made = carries(LocalTransport(), has_task=True)
    for number in range(NUM):
        made.make(number, None)
        made.make_leaf(number, errors(number))
    made.agree(agreed(70))
    made.commit()
    tensors, structures = made.scattered()
    return made, {n: t.own().view(t.kind.shape) for n, t in tensors.items()}, structures


def test_a_saved_state_is_taken_again() -> None:
    made, tensors, structures = saved()
    made.check(tensors, structures)
    names = list(made.digests())
    assert names[NUM - 1 : NUM + 1] == [
        f"the carry of microbatch {NUM - 1}",
        "what compression keeps of microbatch 0",
    ]
    assert names[-1] == "what compression has agreed on"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.zeros(BLOCK, dtype=torch.float64), "is torch.float64"),
        (torch.zeros(BLOCK - 1), rf"must be torch.float32 \[{BLOCK}\]"),
        (torch.zeros(2, BLOCK // 2), r"is torch.float32 \[2, "),
        (None, "is not a state of compression.name=int8"),
    ],
)
def test_a_state_of_another_run_is_refused(wrong: torch.Tensor | None, said: str) -> None:
    made, tensors, structures = saved()
    if wrong is None:
        structures[str(NUM + 1)] = {"dict": {"error_1": {"tensor": "error_1"}}}
    else:
        tensors[f"{NUM + 1}/error_0"] = wrong
    with pytest.raises(ValueError, match=said):
        made.check(tensors, structures)
