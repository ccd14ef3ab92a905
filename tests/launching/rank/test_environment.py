from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import EnvironError
from lockstep.launching.rank.environment import Environment, detect

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
HAND_MADE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[07-08]-ib,x",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "n[07-08]-ib,x",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
ONE_TASK_STEP = STEP | {
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
LOCAL = {
    "LOCKSTEP_LOCAL_RANK": "1",
    "LOCKSTEP_LOCAL_SIZE": "2",
    "LOCKSTEP_LOCAL_PORT": "29500",
    "LOCKSTEP_LOCAL_SUPERVISOR": "5",
}
OF_AGENT = LOCAL | {
    "LOCKSTEP_LOCAL_RANK": "3",
    "LOCKSTEP_LOCAL_SIZE": "4",
    "LOCKSTEP_LOCAL_RANKS": "2",
    "LOCKSTEP_LOCAL_STORE": "10.0.0.1",
    "LOCKSTEP_LOCAL_ADDRESS": "10.0.0.2",
    "LOCKSTEP_LOCAL_TIMEOUT": "5",
}
JOINS = {"LOCKSTEP_LOCAL_RANK": "6", "LOCKSTEP_LOCAL_PLACE": "0"}
SPAWNED = {
    "LOCKSTEP_MPI_SLOT": "5",
    "LOCKSTEP_MPI_SIZE": "4",
    "LOCKSTEP_MPI_REPLACE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
}
STEP_PORT = 15_000 + (1234 * 31 + 2) % 15_000

IN_TORCHRUN = Environment("torchrun", 5, 8, 1, 4, "node1", 29500)
IN_HAND_MADE = Environment("torchrun", 1, 2, 0, 1, "node1", 29500)
IN_MPI = Environment("mpi", 3, 4, 1, 2)
IN_STEP = Environment("slurm", 4, 5, 0, 1, "n07-ib", STEP_PORT)
ALONE = Environment()
IN_SPAWNED = Environment("mpi", 5, 4, 0, 4, joins=True, replacements=2)
IN_LOCAL = Environment("local", 1, 2, 1, 2, "127.0.0.1", 29500, 5)
IN_AGENT = Environment(
    "local", 3, 4, 1, 2, "10.0.0.1", 29500, 5, address="10.0.0.2", host_timeout_s=5
)


@pytest.mark.parametrize(
    ("env", "place"),
    [
        pytest.param({}, ALONE, id="python"),
        pytest.param(LOCAL, IN_LOCAL, id="local"),
        pytest.param(OF_AGENT, IN_AGENT, id="agent"),
        pytest.param(
            OF_AGENT | JOINS,
            replace(IN_AGENT, rank=6, local_rank=0, joins=True),
            id="joining rank of an agent",
        ),
        pytest.param(SPAWNED, IN_SPAWNED, id="started by ranks of MPI"),
        pytest.param(LOCAL | OPEN_MPI | TORCHRUN, IN_LOCAL, id="local in mpirun in torchrun"),
        pytest.param({"PATH": "/bin", "MASTER_ADDR": "a"}, ALONE, id="MASTER_ADDR alone"),
        pytest.param({"WORLD_SIZE": "1"}, ALONE, id="WORLD_SIZE=1 left in a container"),
        pytest.param({"WORLD_SIZE": "1", "RANK": "0"}, ALONE, id="a hand-made set of one"),
        pytest.param(HAND_MADE | {"WORLD_SIZE": "1", "RANK": "0"}, ALONE, id="full set of one"),
        pytest.param({"LOCAL_RANK": "0"}, ALONE, id="LOCAL_RANK alone"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE, id="PMI without hydra"),
        pytest.param(TORCHRUN, IN_TORCHRUN, id="torchrun"),
        pytest.param(BATCH | TORCHRUN, IN_TORCHRUN, id="torchrun in a batch script"),
        pytest.param(ONE_TASK_STEP | TORCHRUN, IN_TORCHRUN, id="torchrun started by srun"),
        pytest.param(OPEN_MPI | TORCHRUN, IN_TORCHRUN, id="torchrun started by mpirun"),
        pytest.param(
            TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            Environment("torchrun", 0, 1, 0, 1, "node1", 29500),
            id="torchrun with one rank",
        ),
        pytest.param(HAND_MADE, IN_HAND_MADE, id="by hand"),
        pytest.param(
            HAND_MADE | {"LOCAL_RANK": "1"},
            Environment("torchrun", 1, 2, 1, 2, "node1", 29500),
            id="by hand with LOCAL_RANK",
        ),
        pytest.param(ONE_TASK_STEP | HAND_MADE, IN_HAND_MADE, id="by hand in a one-task step"),
        pytest.param(
            STEP | HAND_MADE | {"RANK": "4", "WORLD_SIZE": "5"},
            Environment("torchrun", 4, 5, 0, 1, "node1", 29500),
            id="RANK=$SLURM_PROCID",
        ),
        pytest.param(
            STEP | HAND_MADE | {"RANK": "9", "WORLD_SIZE": "10"},
            Environment("torchrun", 9, 10, 0, 1, "node1", 29500),
            id="two by hand in each task",
        ),
        pytest.param(OPEN_MPI, IN_MPI, id="Open MPI"),
        pytest.param(HYDRA, IN_MPI, id="hydra"),
        pytest.param(STEP | OPEN_MPI, IN_MPI, id="mpirun in an allocation"),
        pytest.param(BATCH | HYDRA, IN_MPI, id="hydra in a batch script"),
        pytest.param(OPEN_MPI | {"WORLD_SIZE": "1", "RANK": "0"}, IN_MPI, id="mpirun, container"),
        pytest.param(OPEN_MPI | {"WORLD_SIZE": "4"}, IN_MPI, id="mpirun, agreeing WORLD_SIZE"),
        pytest.param(OPEN_MPI | {"RANK": "3"}, IN_MPI, id="mpirun, agreeing RANK"),
        pytest.param(
            OPEN_MPI
            | {f"OMPI_COMM_WORLD_{k}": "0" for k in ("RANK", "LOCAL_RANK")}
            | {f"OMPI_COMM_WORLD_{k}": "1" for k in ("SIZE", "LOCAL_SIZE")},
            Environment("mpi"),
            id="mpirun -n 1",
        ),
        pytest.param(STEP | {"PMIX_RANK": "4"}, Environment("mpi", 4, 5, 0, 1), id="pmix"),
        pytest.param(STEP, IN_STEP, id="srun"),
        pytest.param(STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}, IN_STEP, id="srun --mpi=pmi2"),
        pytest.param(STEP | {"WORLD_SIZE": "5"}, IN_STEP, id="srun, agreeing WORLD_SIZE"),
        pytest.param(STEP | {"SLURM_NTASKS": "64"}, IN_STEP, id="the step's tasks, not the job's"),
        pytest.param(
            STEP | {"MASTER_ADDR": "me", "MASTER_PORT": "4444"},
            Environment("slurm", 4, 5, 0, 1, "me", 4444),
            id="srun with a master of the user's",
        ),
        pytest.param(
            STEP | {"SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
            Environment("slurm", 3, 5, 1, 2, "n07-ib", STEP_PORT),
            id="srun, middle node",
        ),
        pytest.param(ONE_TASK_STEP, Environment("slurm"), id="srun --pty"),
        pytest.param(BATCH, ALONE, id="batch script"),
        pytest.param(STEP | {"SLURM_STEP_ID": "4294967291"}, ALONE, id="the batch step"),
        pytest.param(STEP | {"SLURM_STEP_ID": "4294967290"}, ALONE, id="an interactive step"),
    ],
)
def test_finds_its_place(env: dict[str, str], place: Environment) -> None:
    assert detect(env) == place


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


MISSING = [
    *((LOCAL, name) for name in LOCAL),
    (TORCHRUN, "RANK"),
    (TORCHRUN, "WORLD_SIZE"),
    (TORCHRUN, "LOCAL_RANK"),
    (TORCHRUN, "MASTER_ADDR"),
    (TORCHRUN, "MASTER_PORT"),
    (HAND_MADE, "RANK"),
    (HAND_MADE, "WORLD_SIZE"),
    (HAND_MADE, "MASTER_ADDR"),
    (HAND_MADE, "MASTER_PORT"),
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
    (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
    (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    (HYDRA, "PMI_RANK"),
    (HYDRA, "PMI_SIZE"),
    (HYDRA, "MPI_LOCALNRANKS"),
    (STEP, "SLURM_LOCALID"),
    (STEP, "SLURM_STEP_NODELIST"),
    (STEP, "SLURM_JOB_ID"),
]


@pytest.mark.parametrize(("env", "name"), MISSING)
def test_names_what_is_missing(env: dict[str, str], name: str) -> None:
    # Without RANK or WORLD_SIZE, the other of the two is what is seen.
    seen = (
        {"RANK": "WORLD_SIZE", "WORLD_SIZE": "RANK"}[name]
        if env is HAND_MADE and ("MASTER" not in name)
        else name
    )
    with pytest.raises(EnvironError, match=rf"\b{seen}\b.*; .+") as caught:
        detect(without(env, name))
    assert name in str(caught.value)
    with pytest.raises(EnvironError, match=seen):
        detect(env | {name: ""} if seen == name else without(env, name))


NUMBERS = [
    *((LOCAL, name) for name in LOCAL),
    *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
    (TORCHRUN, "LOCAL_WORLD_SIZE"),
    *((HAND_MADE, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
    *((OPEN_MPI, name) for name in OPEN_MPI if name != "PMIX_RANK"),
    *((HYDRA, name) for name in HYDRA),
    *((STEP, name) for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")),
    *((STEP, name) for name in ("SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID")),
    (STEP | {"PMIX_RANK": "4"}, "PMIX_RANK"),
    (STEP | {"MASTER_PORT": "1"}, "MASTER_PORT"),
]


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "٣", "1_0"])
@pytest.mark.parametrize(("env", "name"), NUMBERS)
def test_names_what_is_no_number(env: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(EnvironError, match=f"{name}={value} is not a whole number; .+"):
        detect(env | {name: value})


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (LOCAL | {"LOCKSTEP_LOCAL_RANK": "2"}, "LOCKSTEP_LOCAL_RANK=2"),
        (LOCAL | {"LOCKSTEP_LOCAL_PORT": "0"}, "LOCKSTEP_LOCAL_PORT=0"),
        (OF_AGENT | {"LOCKSTEP_LOCAL_RANKS": "5"}, "LOCKSTEP_LOCAL_RANKS=5"),
        (SPAWNED | {"LOCKSTEP_MPI_SLOT": "3"}, "LOCKSTEP_MPI_SLOT=3"),
        (OPEN_MPI | {"LOCKSTEP_MPI_REPLACE": "-1"}, "LOCKSTEP_MPI_REPLACE=-1"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        (HAND_MADE | {"RANK": "2"}, "RANK=2"),
        (HAND_MADE | {"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2"),
        (HYDRA | {"PMI_RANK": "4"}, "PMI_RANK=4"),
        (STEP | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5"),
        (STEP | {"PMIX_RANK": "5"}, "PMIX_RANK=5"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "5"}, "SLURM_STEP_TASKS_PER_NODE=5"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(xa),1"}, "SLURM_STEP_TASKS_PER_NODE=2"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, r"'n\[1-' is malformed"),
    ],
)
def test_names_what_is_out_of_range(env: dict[str, str], name: str) -> None:
    with pytest.raises(EnvironError, match=name):
        detect(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (OPEN_MPI | HAND_MADE, "RANK=1 of WORLD_SIZE=2 contradicts mpi.* rank 3 of 4"),
        (OPEN_MPI | HAND_MADE | {"WORLD_SIZE": "4"}, "RANK=1 of WORLD_SIZE=4 contradicts mpi"),
        (STEP | HAND_MADE, "RANK=1 .*contradicts slurm.* rank 4 of 5"),
        (OPEN_MPI | {"WORLD_SIZE": "2"}, "WORLD_SIZE=2 contradicts mpi, which says 4"),
        (OPEN_MPI | {"RANK": "1"}, "RANK=1 contradicts mpi, which says 3"),
        (STEP | {"WORLD_SIZE": "2"}, "WORLD_SIZE=2 contradicts slurm, which says 5"),
        (BATCH | {"WORLD_SIZE": "5"}, "WORLD_SIZE=5 is set, RANK is not"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 is set without a number of ranks"),
    ],
)
def test_names_contradictions(env: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironError, match=message):
        detect(env)


def test_tasks_per_node_may_be_missing() -> None:
    assert detect(without(STEP, "SLURM_STEP_TASKS_PER_NODE")).local_world_size == 2


def test_ports_of_steps_differ_and_are_not_ephemeral() -> None:
    ports = {detect(STEP | {"SLURM_STEP_ID": str(step)}).master_port for step in range(100)}
    assert len(ports) == 100
    assert all(port is not None and 1024 < port < 32_768 for port in ports)


def test_a_value_of_any_length_makes_a_short_message() -> None:
    with pytest.raises(EnvironError, match="environment variable RANK=") as caught:
        detect({"RANK": "1" * 10_000, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"})
    assert len(str(caught.value)) < 500
