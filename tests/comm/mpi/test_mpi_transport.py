"""Every operation of the MPI transport says so when the group is broken."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.conftest import environment

from lockstep.launching.job.commands import mpirun_command, rank_environment

SCRIPT = """
import os, signal, time, torch
from lockstep.comm.mpi.transport import MpiTransport
from lockstep.comm.transport import GroupBroken

transport = MpiTransport()
rank, size = transport.rank, transport.size
uneven = [r + 1 for r in range(size)]
start = sum(uneven[:rank])
sums, out = torch.zeros(sum(uneven)), torch.zeros(sum(uneven))

OPERATIONS = {
    "even": lambda: transport.all_gather(torch.ones(2), torch.zeros(2 * size), [2] * size),
    "uneven": lambda: transport.all_gather(torch.ones(rank + 1), out, uneven),
    "in place": lambda: transport.all_gather(sums[start:][: rank + 1], sums, uneven),
    "all to all": lambda: transport.all_to_all(
        torch.ones(size), [1] * size, list(range(size)), torch.zeros(size), [1] * size
    ),
    "started": lambda: transport.start(
        torch.ones(size), [1] * size, list(range(size)), torch.zeros(size), [1] * size
    ).wait(),
    "broadcast": lambda: transport.broadcast(torch.ones(2), 0),
    "barrier": transport.barrier,
    "json": lambda: transport.gather_json("x" * rank),
}

def attempt(name, what):
    try:
        OPERATIONS[name]()
        said = "went through"
    except GroupBroken:
        said = "failed"
    os.write(1, f"{name} {what}: {said}\\n".encode())

for name in OPERATIONS:
    attempt(name, "in a whole group")
    transport.barrier()
    if rank == 0:
        transport.comm.Revoke()
    time.sleep(0.2)
    if name != "broadcast" or rank:  # its root gives and does not wait
        attempt(name, "given up")
    transport.regroup()
if rank == size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
attempt("uneven", "after a death")
transport.regroup()
transport.agree()
os._exit(0)
"""


@pytest.mark.slow
def test_no_operation_goes_through_in_a_broken_group() -> None:
    command = mpirun_command(3, [sys.executable, "-c", SCRIPT], cores=1)
    done = subprocess.run(
        command.argv, env=rank_environment(1), capture_output=True, text=True, timeout=120
    )
    found = sorted(done.stdout.splitlines())
    names = ("even", "uneven", "in place", "all to all", "started", "broadcast", "barrier",
             "json")  # fmt: skip
    expected = [f"{n} in a whole group: went through" for n in names for _ in range(3)]
    expected += [f"{n} given up: failed" for n in names for _ in range(3 - (n == "broadcast"))]
    expected += ["uneven after a death: failed"] * 2
    assert found == sorted(expected), done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "^han"), ("^ucc", "^ucc,han"), ("^ucc,han", "^ucc,han"), ("han", "^han"),
     ("basic,han,tuned", "basic,tuned")],
)  # fmt: skip
def test_hierarchical_collectives_are_off(given: str, expected: str) -> None:
    base = {"PATH": os.environ["PATH"]} | ({"OMPI_MCA_coll": given} if given else {})
    assert rank_environment(1, base)["OMPI_MCA_coll"] == expected


@pytest.mark.slow
def test_hierarchical_collectives_are_off_in_a_process_of_its_own() -> None:
    script = "import os; from lockstep.comm.mpi import library; print(os.environ['OMPI_MCA_coll'])"
    env = rank_environment(1) | {"OMPI_MCA_coll": "^ucc"}
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["^ucc,han"]


FURTHER = """
from lockstep.comm.mpi.transport import MpiTransport

comms = []
for _ in range(3):
    transport = MpiTransport()
    transport.barrier()
    transport.close()
    comms.append(transport.comm)
print("left:", sum(map(bool, comms)))
"""


def test_a_further_training_frees_the_communicator_of_the_one_before() -> None:
    command = mpirun_command(2, [sys.executable, "-c", FURTHER], cores=1)
    done = subprocess.run(
        command.argv, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["left: 1"] * 2, done.stderr


EARLY = """
import os, signal, time
from lockstep.comm.mpi.transport import MPI, MpiTransport
from lockstep.errors import RankFailure

MPI.COMM_WORLD.Barrier()  # all are out of MPI_Init
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1.0)
try:
    MpiTransport()
except RankFailure as error:
    os.write(1, f"{error.exit_code}: {error}\\n".encode())
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_dies_before_all_have_met_is_told_of() -> None:
    command = mpirun_command(3, [sys.executable, "-c", EARLY], cores=1)
    done = subprocess.run(
        command.argv, env=environment(), capture_output=True, text=True, timeout=120
    )
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all(line.startswith("75: a rank has died before all had met (MPI_ERR_") for line in said)
