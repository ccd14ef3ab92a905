"""What is simulated of thousands of ranks is what real ranks do, and grows no faster than log2."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from math import log2
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.simulated import Case, Part, Step, most, simulated
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lockstep.comm import ahead
from lockstep.comm.call_records import parse_calls
from lockstep.comm.torchdist import process_group_transport
from lockstep.comm.torchdist.process_group_transport import GroupTransport
from lockstep.comm.transport import Transport
from lockstep.parallel import reduction
from lockstep.parallel.layout import split

CPU = torch.device("cpu")
TIME = timedelta(seconds=60)
LOOPBACK = "127.0.0.1"


class CountedGroup:
    """A process group whose messages are counted."""

    def __init__(self, group: Any, messages: Counter[str]) -> None:
        self._group, self._messages = group, messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self._messages["sent"] += 1
        return self._group.send(tensors, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class GlooThread(GroupTransport):
    """A rank in a thread; its messages are those of gloo."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__("gloo", None)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIME
        self.messages: Counter[str] = Counter()
        self.group = CountedGroup(dist.ProcessGroupGloo(store, rank, size, options), self.messages)
        self.rank, self.size = rank, size
        self.call_group = self.call_ring.start(rank, size)

    def barrier(self) -> None:
        raise AssertionError("no step has one")

    def close(self) -> None:
        self.group = None


def calls_of(transport: Transport) -> list[tuple[str, int, int]]:
    """What is recorded of a rank's calls: kind, bytes given and bytes taken."""
    calls = parse_calls(transport.call_ring.copy()).calls
    assert all(call.ended_ns for call in calls)
    return [(call.kind, call.given, call.taken) for call in calls]


def run_really(case: Case) -> list[tuple[Step, GlooThread]]:
    """A step of all ranks, each in a thread."""
    store, found, errors = HashStore(), {}, []

    def body(rank: int) -> None:
        try:
            world = GlooThread(store, rank, case.ranks)
            inside = None
            if case.per_host > 1:
                ranges = split(case.ranks, -(-case.ranks // case.per_host))
                number, own = next((n, r) for n, r in enumerate(ranges) if rank in range(*r))
                prefixed = dist.PrefixStore(f"host {number}", store)
                inside = GlooThread(prefixed, rank - own.first, len(own))
            step = Step(case, world, world.messages, inside, CPU)
            step.run()
            found[rank] = step, world
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(case.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(case.ranks)]


@pytest.fixture
def as_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few ranks do what many do, with gradients that would travel whole."""
    for module in (ahead, process_group_transport):
        monkeypatch.setattr(module, "FEW_RANKS", 1)
    monkeypatch.setattr(reduction, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("as_among_many")
@pytest.mark.parametrize("ranks", [2, 3, 5, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients", "parameters"])
def test_real_ranks_make_the_calls_of_simulated_ones(ranks: int, sharding: str) -> None:
    case = Case(ranks, 1, 40_000, 12, sharding, bucket_bytes=50_000, blocks=2)
    check(case)


@pytest.mark.usefixtures("as_among_many")
@pytest.mark.parametrize(("ranks", "per_host"), [(4, 2), (7, 2), (8, 3)])
@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_real_hosts_make_the_calls_of_simulated_ones(
    ranks: int, per_host: int, sharding: str
) -> None:
    check(Case(ranks, per_host, 40_000, 12, sharding, bucket_bytes=50_000))


def check(case: Case) -> None:
    for rank, (step, world) in enumerate(run_really(case)):
        alone = simulated(case, rank)
        assert list(alone.parts) == list(step.parts)
        for name, part in step.parts.items():
            there = alone.parts[name]
            assert part.messages.total() == there.messages.total(), (rank, name)
            assert (part.sent_bytes, part.received_bytes) == (
                there.sent_bytes,
                there.received_bytes,
            )
        assert calls_of(world) == calls_of(alone.world)


def growing(part: Part) -> int:
    """Messages that may grow with log2 of the number of ranks only."""
    return sum(n for kind, n in part.messages.items() if kind != "all-to-all")


@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients", "parameters"])
def test_messages_of_thousands_of_ranks_grow_with_log2(sharding: str) -> None:
    for ranks in (64, 4096):
        case = Case(ranks, 1, 1_000_000, ranks, sharding)
        for name, part in most(case).items():
            # Two halves where parts go round the end, twice where gradients are gathered too.
            assert growing(part) <= 4 * log2(ranks), (ranks, name)


def test_hosts_have_all_to_alls_among_themselves_only() -> None:
    for hosts in (4, 32, 256):
        found = most(Case(8 * hosts, 8, 1_000_000, 8 * hosts))["gradients"]
        assert growing(found) <= 4 * log2(8 * hosts)
        # To a rank or two of each other host, and back.
        assert found.messages["all-to-all"] <= 4 * hosts
