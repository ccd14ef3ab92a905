"""The energy of a split state and its gradient on some ranks; rank 0 prints their SHA-256.

With an argument, this rank is killed in its third exchange.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
from tests.systems.quantum.circuits import ring, some_parameters

from lockstep.comm.transport import Transport
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.quantum import Simulator, expectation, retried

CIRCUIT = ring(8, 3)
TERMS = {"ZIIIIIIZ": 0.5, "XXIIIIII": 0.3, "IIIIYIIY": -0.2}
attempts: list[int] = []


def work(transport: Transport) -> bytes:
    attempts.append(transport.size)
    simulator = Simulator(CIRCUIT, max_targets=3, transport=transport, parts=4)
    at = some_parameters(2, CIRCUIT.num_parameters).requires_grad_()
    energy = expectation(simulator, simulator.state(at), TERMS)
    (slope,) = torch.autograd.grad(energy.sum(), at)
    return hashlib.sha256(energy.detach().numpy().tobytes() + slope.numpy().tobytes()).digest()


def dying(transport: Transport) -> None:
    """Have this process be killed in its third exchange."""
    inner, calls = transport.all_to_all, []

    def all_to_all(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        inner(*arguments)

    transport.all_to_all = all_to_all  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    open_one = open_transport(detect(os.environ), torch.device("cpu"), 60)
    if len(sys.argv) > 1 and open_one.rank == int(sys.argv[1]):
        dying(open_one)
    found = retried(open_one, work)
    if open_one.rank == 0:
        print(found.hex(), *attempts)
    open_one.close()
