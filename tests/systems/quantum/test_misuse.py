"""Wrong arguments, too much memory, copies and handles: one clear message, and nothing kept."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching.host.test_cores import machine
from tests.systems.quantum.circuits import ring, some_parameters
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum import bound
from lockstep.systems.quantum.circuits.angles import Angle, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate, unitary
from lockstep.systems.quantum.simulation import parts as memory
from lockstep.systems.quantum.simulation.gradients import share, shifted
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities, sample_frequencies
from lockstep.systems.quantum.simulation.parts import memory_bytes
from lockstep.systems.quantum.simulation.statevector import Simulator, statevector
from lockstep.systems.quantum.transformer.amplitudes import context_root, superposition
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

NAN = float("nan")
WORDS = list("abcd")
STATE = torch.ones(4, dtype=torch.complex128) / 2


def simulate(**keys: Any) -> Simulator:
    return Simulator(ring(2, 1), **keys)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gate("rx", 0, angle="a"), "angle must be a number or a `parameter`, not 'a'"),
        (lambda: gate("rx", 0, angle=torch.tensor(0.3)), "must be a number or a `parameter`"),
        (lambda: gate("rx", 0, angle=NAN), "must be a finite number, not nan"),
        (lambda: gate("rx", 0.5, angle=1), "must be an integer, not 0.5"),
        (lambda: gate("h", True), "must be an integer, not True"),
        (lambda: gate("h", "0"), "must be an integer, not '0'"),
        (lambda: gate("h", [0]), r"must be an integer, not \[0\]"),
        (lambda: gate(3, 0), "gate 3: its name must be a string"),
        (lambda: gate("h"), "at least one qubit|needs 1 qubits"),
        (lambda: Gate("h", 0), "must be integers, not 0"),
        (lambda: Gate("rx", (0,), 0.3), "must be an Angle, not 0.3"),
        (lambda: Gate("x", (0,), None, (1,), (2,)), "one bit for each control"),
        (lambda: parameter("a"), "parameter: must be an integer, not 'a'"),
        (lambda: parameter(-1), "parameter -1: must not be negative"),
        (lambda: parameter(0, scale=float("inf")), "scale must be a finite number"),
        (lambda: Angle(offset=None), "offset must be a finite number, not None"),
        (lambda: unitary([[1, 0], [0, 1]], 0), "must be a torch.Tensor, not list"),
        (lambda: unitary(torch.eye(3), 0), r"must be \[2\^k, 2\^k\] for k qubits, not \[3, 3\]"),
        (lambda: unitary(torch.ones(2), 0), r"not \[2\]"),
        (lambda: unitary(torch.eye(2)[:1], 0), r"not \[1, 2\]"),
        (lambda: unitary(torch.full((2, 2), NAN), 0), "not unitary"),
        (lambda: Circuit("2", []), "num_qubits: must be an integer, not '2'"),
        (lambda: Circuit(0, []), "0 qubits: a circuit has from 1 to 62"),
        (lambda: Circuit(10**6, []), "1000000 qubits: a circuit has from 1 to 62"),
        (lambda: Circuit(2, ["h"]), "gate 0: must be a Gate, not str"),
        (lambda: Circuit(2, None), "gate 0: must be a Gate, not NoneType"),
        (lambda: Circuit(2, [], -1), "num_parameters -1: must not be negative"),
        (lambda: Circuit(2, [], 1.5), "num_parameters: must be an integer"),
        (lambda: Simulator(None), "needs a Circuit, not NoneType"),
        (lambda: simulate(dtype=torch.float64), "must be torch.complex64 or torch.complex128"),
        (lambda: simulate(device="nowhere"), "device 'nowhere': there is no such device"),
        (lambda: simulate(max_targets=0), "max_targets 0: must be at least 1"),
        (lambda: simulate().state(), "the circuit needs 6 parameters"),
        (lambda: simulate().state([0.1] * 6), "must be a real tensor .*, not list"),
        (lambda: simulate().state(torch.tensor(0.1)), "must be a real tensor"),
        (lambda: simulate().state(torch.ones(6, dtype=torch.complex64)), "must be a real tensor"),
        (lambda: simulate().state_at(torch.ones(5)), r"angles must be a tensor \[..., 6\]"),
        (lambda: simulate().state(torch.ones(6), torch.ones(3)), r"must be a tensor \[..., 4\]"),
        (
            lambda: simulate().state(torch.ones(3, 6), torch.ones(2, 4)),
            r"parameters \[3\] and initial states \[2\] are no batch",
        ),
        (lambda: bound(ring(2, 1), [0.1] * 6), "must be a real tensor .*, not list"),
        (lambda: probabilities(torch.ones(4)), "must be a complex tensor"),
        (lambda: probabilities(STATE[:3]), "must be a complex tensor"),
        (lambda: probabilities(STATE, [2]), r"qubits \[2\]: must be different ones of 2"),
        (lambda: probabilities(STATE, [0, 0]), "must be different ones of 2"),
        (lambda: PauliSum([("Z", 1)]), r"needs \{string: coefficient\}, not list"),
        (lambda: PauliSum({"Z": "a"}), "must be a finite number, not 'a'"),
        (lambda: PauliSum({"Z": 1j}), "must be a finite number, not 1j"),
        (lambda: PauliSum({1: 1.0}), "must have letters"),
        (lambda: PauliSum({"": 1.0}), "must have letters"),
        (lambda: PauliSum({"ZZ": 1.0}).expectation(torch.ones(4)), "must be a complex tensor"),
        (lambda: PauliSum({"ZZ": 1.0}).sample(STATE, 0, None), "shots=0: must be at least 1"),
        (lambda: sample_frequencies(torch.ones(2), -1), "shots=-1: must be at least 1"),
        (lambda: sample_frequencies([0.5, 0.5], 10), "must be a real tensor, not list"),
        (lambda: shifted(None, torch.ones(6), probabilities), "need a Simulator, not NoneType"),
        (lambda: shifted(simulate(), torch.ones(6), 3), "must be a function of states, not int"),
        (
            lambda: shifted(simulate(), torch.ones(6), probabilities, torch.ones(5).bool()),
            r"only must be a tensor of bools \[6\]",
        ),
        (lambda: shifted(simulate(), torch.ones(6), torch.sum), r"must find \[B, M\] of B = 1"),
        (lambda: share(6, 2, 2), "part 2 of 2: must be from 0 to 2 less one"),
        (lambda: superposition(torch.ones(3, 4), 1), "must have norm 1"),
        (lambda: superposition(torch.eye(4)[:1], 1), "must be at least two"),
        (lambda: superposition(torch.eye(3), 1), "a dimension that is a power of two"),
        (lambda: QuantumTransformer("abc", 4), "must be a sequence of words"),
        (lambda: QuantumTransformer(WORDS, 6), "dim=6: must be a power of two"),
        (lambda: QuantumTransformer(WORDS, 4, 0), "num_layers=0: must be at least 1"),
        (lambda: QuantumTransformer(WORDS, 4, restarts=0), "restarts=0: must be at least 1"),
        (lambda: QuantumTransformer(WORDS, 4, seed=-1), "seed=-1"),
        (lambda: QuantumTransformer(WORDS, 4, dtype=torch.int8), "must be torch.float64 or"),
        (lambda: QuantumTransformer(WORDS, 4).circuit([0, 9]), "word 9: the embeddings have 4"),
        (lambda: QuantumTransformer(WORDS, 4).circuit([0]), "must be at least two"),
        (lambda: QuantumTransformer(WORDS, 4).by_circuits(BATCH, shots=3), "set shift=True"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


BATCH = Sentences(torch.tensor([[0, 1, 2]]), torch.tensor([2]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("make", "need"),
    [
        (lambda: QuantumTransformer(WORDS, 4096).circuit([0, 1]), 5 * 4096**4 * 16),
        (lambda: context_root(torch.ones(1, 2, 4096), torch.tensor([1])), 3 * 4096**4 * 4),
        (lambda: QuantumTransformer(WORDS, 1 << 40), None),
        (lambda: QuantumTransformer(WORDS, 4, 10**12), None),
        (lambda: QuantumTransformer(WORDS, 1 << 20).unitaries(), None),
        (lambda: statevector(Circuit(62, [gate("h", 0)])), (1 << 62) * 16 * 2),
    ],
)
def test_what_does_not_fit_says_how_many_bytes_it_needs(
    make: Callable[[], Any], need: int | None
) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    message = str(error.value)
    assert f"{memory_bytes():,}" in message
    assert need is None or f"{need:,}" in message


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000\n", "a/b/memory.max": "max\n"}, 5000),
        ("0::/host/path\n", {"memory.max": "7000\n"}, 7000),
        (
            "4:memory:/job\n0::/\n",
            {"memory/memory.limit_in_bytes": str(2**63 - 4096),
             "memory/job/memory.limit_in_bytes": "6000\n"},
            6000,
        ),
        ("3:cpu:/job\n", {"cpu/job/memory.limit_in_bytes": "1"}, None),
        ("0::/\n", {"memory.max": "junk"}, None),
    ],
)  # fmt: skip
def test_memory_limits_of_control_groups_count(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    found = memory_bytes(root=machine(tmp_path, groups, **files))
    assert found == (limit or memory_bytes(root=tmp_path / "nothing"))


def test_the_address_spaces_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (12345, 99999))
    assert memory.memory_bytes() == 12345


def used() -> tuple[QuantumTransformer, Tensor]:
    torch.manual_seed(1)
    model = QuantumTransformer(WORDS, 4)
    found = model.by_circuits(BATCH)
    found.sum().backward()
    return model, found.detach()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_that_has_been_used_can_be_copied(copied: Callable[[Any], Any]) -> None:
    model, found = used()
    teacher = copied(model)
    assert torch.equal(teacher.by_circuits(BATCH), found)
    with torch.no_grad():
        teacher.angles.zero_()
    assert torch.equal(model.by_circuits(BATCH), found)
    teacher.load_state_dict(model.state_dict())
    assert torch.equal(teacher.by_circuits(BATCH), found)


def test_a_simulator_that_has_been_used_can_be_copied() -> None:
    simulator, theta = Simulator(ring(4, 2)), some_parameters(24)
    found = simulator.state(theta)
    assert torch.equal(copy.deepcopy(simulator).state(theta), found)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_simulators_keep_no_files_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [Simulator(ring(2, 1)) for _ in range(20)]
    assert len(kept) == 20
    assert len(os.listdir("/proc/self/fd")) == before
