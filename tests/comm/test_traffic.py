"""Transports count what they move, the same over MPI and gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lockstep.comm.calls import Traffic
from lockstep.comm.transport import LocalTransport

SCRIPT = Path(__file__).parent / "launched" / "traffic_counts.py"

EXPECTED = {
    # Calls, bytes sent and bytes received, on rank 0 and on rank 1; elements have 4 bytes.
    "even": ((1, 12, 12), (1, 12, 12)),
    "uneven": ((1, 4, 8), (1, 8, 4)),
    "all_to_all": ((1, 8, 4), (1, 4, 8)),
    "started": ((1, 8, 4), (1, 4, 8)),
    "broadcast": ((1, 0, 20), (1, 20, 0)),
    "message": ((1, 28, 0), (1, 0, 28)),
    "barrier": ((1, 0, 0), (1, 0, 0)),
    "agree": ((1, 0, 0), (1, 0, 0)),
    "subgroup": ((1, 12, 12), (1, 12, 12)),
}


@pytest.mark.parametrize(
    "launcher", ["mpi", "local", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_what_is_moved_is_counted(
    ranks: Callable[..., CompletedProcess[str]], launcher: str
) -> None:
    done = ranks(launcher, 2, SCRIPT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    by_rank = {line["rank"]: line["found"] for line in lines}
    for name, expected in EXPECTED.items():
        assert (name, *map(tuple, (by_rank[0][name], by_rank[1][name]))) == (name, *expected)


def test_one_process_alone_says_nothing() -> None:
    transport = LocalTransport()
    transport.barrier()
    transport.gather_json([1])
    traffic = transport.traffic
    assert (traffic.num_calls, traffic.sent_bytes, traffic.received_bytes) == (0, 0, 0)


def test_calls_add_up() -> None:
    traffic = Traffic()
    traffic.add(1, 2)
    traffic.add(10, 20)
    assert (traffic.num_calls, traffic.sent_bytes, traffic.received_bytes) == (2, 11, 22)
