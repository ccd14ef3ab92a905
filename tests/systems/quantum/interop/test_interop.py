"""Circuits of others are read as they are meant, or refused with one clear message."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.systems.quantum.circuits import random_circuit, random_unitary, some_parameters

from lockstep.errors import ConfigError
from lockstep.quantum import (
    bound,
    drawing,
    from_qasm,
    from_qiskit,
    to_qasm,
    to_qiskit,
)
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate, unitary
from lockstep.systems.quantum.interop.qasm import FORMATS, from_csv
from lockstep.systems.quantum.simulation.statevector import statevector
from lockstep.systems.quantum.transformer.model import QuantumTransformer

qiskit = pytest.importorskip("qiskit")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Qiskit about itself

from qiskit.circuit import (  # noqa: E402
    AnnotatedOperation,
    ControlModifier,
    Gate,
    InverseModifier,
    Parameter,
    ParameterVector,
    PowerModifier,
    QuantumCircuit,
)
from qiskit.circuit import library as lib  # noqa: E402
from qiskit.quantum_info import Statevector, random_clifford  # noqa: E402


def same(source: QuantumCircuit, *values: float) -> None:
    """Qiskit and this simulator find the same state, its phase included."""
    read = from_qiskit(source.copy())
    bound_source = source.assign_parameters(list(values)) if values else source
    expected = torch.from_numpy(Statevector(bound_source).data.copy())
    found = statevector(read, torch.tensor(values, dtype=torch.float64) if values else None)
    assert (found - expected).abs().max() < 1e-12


def defined(name: str, num_qubits: int, *body: tuple[Any, ...], phase: float = 0.0) -> Gate:
    """A gate of the user's, with any name."""
    circuit = QuantumCircuit(num_qubits, global_phase=phase)
    for operation, *qubits in body:
        circuit.append(operation, qubits)
    made = circuit.to_gate()
    made.name = name
    return made


START = [(lib.HGate(), 0), (lib.RYGate(0.7), 1), (lib.RXGate(1.1), 2), (lib.CXGate(), 0, 1)]
ANNOTATED = [
    [ControlModifier(1)],
    [ControlModifier(2, 1)],
    [InverseModifier(), ControlModifier(1, 0)],
    [ControlModifier(1), InverseModifier(), ControlModifier(1, 0)],
    [PowerModifier(3), ControlModifier(1)],
    [PowerModifier(-2)],
    [PowerModifier(0.5), ControlModifier(1)],
    [],
]


@pytest.mark.parametrize(
    ("operation", "qubits"),
    [
        (lib.CUGate(0.1, 0.2, 0.3, 0.4), (0, 1)),
        (lib.CUGate(0.1, 0.2, 0.3, 0.4, ctrl_state=0), (2, 0)),
        (lib.CUGate(0.1, 0.2, 0.3, 0.4).control(1, ctrl_state=0), (2, 0, 1)),
        (lib.CUGate(0.1, 0.2, 0.3, 0.4).control(1, annotated=True), (2, 0, 1)),
        (defined("h", 1, (lib.TGate(), 0), (lib.RXGate(0.3), 0)), (0,)),
        (defined("barrier", 1, (lib.XGate(), 0)), (0,)),
        (defined("measure", 1, (lib.XGate(), 0)), (0,)),
        (defined("delay", 1, (lib.YGate(), 0)), (0,)),
        (defined("unitary", 2, (lib.CXGate(), 0, 1)), (1, 0)),
        (defined("u", 1, (lib.XGate(), 0)), (1,)),
        (defined("rx", 1, (lib.YGate(), 0), phase=0.3).control(1, annotated=True), (1, 0)),
        (defined("nothing", 2), (1, 0)),
        (defined("nothing", 2, phase=0.4).control(1), (1, 0, 2)),
        (lib.GlobalPhaseGate(0.3), ()),
        (lib.GlobalPhaseGate(0.3).control(1, ctrl_state=0), (1,)),
        (lib.GlobalPhaseGate(0.3).control(3, ctrl_state=3), (1, 2, 0)),
        (QuantumCircuit(global_phase=0.4).to_gate(), ()),
        (QuantumCircuit(global_phase=0.4).to_gate().control(2), (2, 1)),
        (lib.PermutationGate([2, 0, 1]), (0, 1, 2)),
        (lib.PermutationGate([1, 2, 0]), (2, 0, 1)),
        (lib.LinearFunction([[1, 1], [0, 1]]), (0, 2)),
        (random_clifford(2, seed=1), (0, 2)),
        (lib.DiagonalGate([1, 1j, 1, -1]), (1, 2)),
        (lib.UCRYGate([0.1, 0.2]), (1, 2)),
        (lib.PauliGate("XYZ"), (0, 1, 2)),
        (lib.QFTGate(3), (2, 0, 1)),
        (lib.IGate().control(1), (0, 1)),
        (lib.C3SXGate(), (0, 1, 2, 3)),
        (lib.RC3XGate(), (0, 1, 2, 3)),
        (lib.U2Gate(0.1, 0.2), (0,)),
        *[(AnnotatedOperation(lib.CUGate(0.1, 0.2, 0.3, 0.4), m), None) for m in ANNOTATED],
        *[(AnnotatedOperation(defined("h", 1, (lib.SGate(), 0), phase=0.2), m), None)
          for m in ANNOTATED],
    ],
)  # fmt: skip
def test_instructions_are_what_they_do_not_what_they_are_called(
    operation: Any, qubits: tuple[int, ...] | None
) -> None:
    circuit = QuantumCircuit(4, global_phase=0.2)
    for known, *places in START:
        circuit.append(known, places)
    circuit.append(operation, range(operation.num_qubits) if qubits is None else qubits)
    circuit.append(lib.CRXGate(0.3), [1, 2])
    same(circuit)


def test_phases_may_have_parameters() -> None:
    a, b = Parameter("a"), Parameter("b")
    circuit = QuantumCircuit(2, global_phase=2 * a - b + 0.3)
    circuit.h([0, 1])
    circuit.append(defined("x", 1, (lib.RXGate(a), 0)), [1])
    circuit.append(lib.CUGate(a, b, 0.5 * a, -b + 1), [0, 1])
    inner = QuantumCircuit(1, global_phase=b)
    inner.s(0)
    circuit.append(inner.to_gate().control(1), [1, 0])
    same(circuit, 0.7, -1.1)


def test_measurements_inside_of_instructions_are_seen() -> None:
    inner = QuantumCircuit(2, 1)
    inner.cx(0, 1)
    inner.measure(1, 0)
    circuit = QuantumCircuit(2, 1)
    circuit.append(inner.to_instruction(), [0, 1], [0])
    assert [g.name for g in from_qiskit(circuit).gates] == ["x"]
    circuit.h(0)  # another qubit
    assert len(from_qiskit(circuit).gates) == 2
    circuit.append(defined("mine", 1, (lib.HGate(), 0)), [1])
    with pytest.raises(ConfigError, match=r"in the middle: qubit 1 is measured and .* used by h"):
        from_qiskit(circuit)
    inner.x(1)
    circuit = QuantumCircuit(2, 1)
    circuit.append(inner.to_instruction(), [0, 1], [0])
    with pytest.raises(ConfigError, match=r"in the middle: qubit 1 is measured and .* used by x"):
        from_qiskit(circuit)


@pytest.mark.parametrize("header", ["OPENQASM 2.0;\nqreg q[1];\n", "OPENQASM 3;\nqubit[1] q;\n"])
def test_definitions_that_double_at_each_level_are_refused(
    header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.systems.quantum.interop.qiskit_reader._MOST_INSTRUCTIONS", 5000)
    version, register = header.splitlines()
    levels = [f"gate l{i} a {{ l{i - 1} a; l{i - 1} a; }}" for i in range(1, 41)]
    text = "\n".join([version, "gate l0 a { }", *levels, register, "l40 q[0];"])
    with pytest.raises(ConfigError, match=r"more than [\d,]+ instructions when all definitions"):
        from_qasm(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "h q[0]", r"must be a qiskit.QuantumCircuit, not str"),
        (lambda: QuantumCircuit(0), r"0 qubits: a circuit has from 1 to 62"),
        (lambda: QuantumCircuit(100), r"100 qubits: a circuit has from 1 to 62"),
    ],
)
def test_what_is_no_circuit_of_ours_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_qiskit(make())


def test_a_gate_without_definition_is_refused_whatever_its_name() -> None:
    for name in ("h", "cx", "mine", "barrier"):
        circuit = QuantumCircuit(1)
        circuit.append(Gate(name, 1, []), [0])
        with pytest.raises(ConfigError, match=f"gate {name}: not supported, and not defined by"):
            from_qiskit(circuit)


def test_many_parameters_keep_their_order_through_openqasm_3() -> None:
    gates = [gate("ry", i % 3, angle=parameter(i, 0.5 + i, 0.1 * i)) for i in range(25) if i != 7]
    gates += [gate("crx", 0, 1, angle=parameter(11)), gate("h", 2)]
    circuit = Circuit(3, gates, 26)
    again = from_qasm(to_qasm(circuit, 3))
    assert again.num_parameters == 26
    parameters = some_parameters(26)
    assert (statevector(again, parameters) - statevector(circuit, parameters)).abs().max() < 1e-12


def test_openqasm_of_qiskits_own_with_many_parameters_is_numbered_as_declared() -> None:
    from qiskit import qasm3

    p = ParameterVector("p", 12)
    circuit = QuantumCircuit(1)
    for each in p:
        circuit.rx(each, 0)
        circuit.rz(0.3, 0)
    values = some_parameters(12)
    found = statevector(from_qasm(qasm3.dumps(circuit)), values)
    expected = Statevector(circuit.assign_parameters(values.tolist())).data
    assert np.abs(found.numpy() - expected).max() < 1e-12


def test_gates_of_openqasm_3_take_their_arguments_in_order() -> None:
    text = """OPENQASM 3.0;
    include "stdgates.inc";
    gate h2(b, unused, a) q { rx(a) q; rz(2 * b) q; gphase(a); }
    input float p10; input angle p2;
    qubit[2] q;
    h q;
    h2(0.3, 7, p2) q[0];
    negctrl @ inv @ h2(p10, p2, 0.4) q[0], q[1];
    ctrl @ gphase(0.3) q[1];
    gphase(0.1);
    pow(2) @ inv @ t q[0];
    """
    found = statevector(from_qasm(text), torch.tensor([0.6, 0.8], dtype=torch.float64))
    circuit = QuantumCircuit(2, global_phase=0.1 + 0.8)
    circuit.h([0, 1])
    circuit.rx(0.8, 0)
    circuit.rz(0.6, 0)
    inner = QuantumCircuit(1, global_phase=0.4)
    inner.rx(0.4, 0)
    inner.rz(1.2, 0)
    circuit.append(inner.to_gate().inverse().control(1, ctrl_state=0), [0, 1])
    circuit.p(0.3, 1)
    circuit.sdg(0)
    assert np.abs(found.numpy() - Statevector(circuit).data).max() < 1e-12


@pytest.mark.parametrize(
    "header", ["OPENQASM 2.0;\n{}qreg q[1];\n", "OPENQASM 3;\n{}qubit[1] q;\n"]
)
@pytest.mark.parametrize("name", ["h", "x", "unitary", "u", "p", "cu", "sx", "frob"])
def test_gates_defined_in_a_text_are_taken_by_their_definition(header: str, name: str) -> None:
    body = f"gate {name} a {{ U(0.3, 0.2, 0.1) a; U(0.5, 0, 0) a; }} // not Qiskit's\n"
    found = statevector(from_qasm(header.format(body) + f"{name} q[0];\n"))
    circuit = QuantumCircuit(1)
    circuit.u(0.3, 0.2, 0.1, 0)
    circuit.u(0.5, 0, 0, 0)
    assert np.abs(found.numpy() - Statevector(circuit).data).max() < 1e-12


@pytest.mark.parametrize("version", [2, 3])
def test_any_circuit_there_and_back(version: int) -> None:
    for seed in range(12):
        there_and_back(random_circuit(random.Random(seed), 4, 12), version)


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 3])
def test_many_circuits_there_and_back(version: int) -> None:
    for seed in range(1000, 1250):
        there_and_back(random_circuit(random.Random(seed), 5, 15), version)


def there_and_back(circuit: Circuit, version: int) -> None:
    parameters = some_parameters(circuit.num_parameters)
    if version == 2:
        circuit, parameters = bound(circuit, parameters), torch.empty(0, dtype=torch.float64)
    expected = statevector(circuit, parameters)
    again = from_qasm(to_qasm(circuit, version))
    assert again.num_parameters == circuit.num_parameters
    assert (statevector(again, parameters) - expected).abs().max() < 1e-11


@pytest.mark.parametrize("version", [2, 3])
def test_the_transformers_circuit_there_and_back(version: int) -> None:
    torch.manual_seed(1)
    transformer = QuantumTransformer(["a", "b", "c"], 2)
    there_and_back(transformer.circuit([2, 0, 1]), version)


def test_the_drawing_of_40_words_is_quick_and_takes_nothing_apart() -> None:
    import time

    transformer = QuantumTransformer([f"w{i}" for i in range(40)], 4)
    start = time.process_time()
    drawn = drawing(transformer.circuit(list(range(40))), fold=100)
    assert time.process_time() - start < 2
    made = to_qiskit(transformer.circuit(list(range(40))))
    assert len(made.data) == len(transformer.circuit(list(range(40))).gates)
    assert "Unitary" in drawn
    assert "Rz(θ[47])" in drawn


DEEP = "(" * 5000 + "1" + ")" * 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"OPENQASM 2.0;", "must be a string, not bytes"),
        (None, "must be a string, not NoneType"),
        ("", r"0 qubits"),
        ("OPENQASM 2.0;\nqreg q[1000000];", r"\[1000000\] is more than 10,000 bits"),
        ("OPENQASM 2.0;\nqreg q[63];", "63 qubits; at most 62"),
        ("OPENQASM 2.0;\nqreg q[10000000000000000000000];", "more than 10,000 bits"),
        ("OPENQASM 2.0;\nqreg q[40];qreg r[40];", "80 qubits; at most 62"),
        ("OPENQASM 2.0;\nqreg q[2];\nU(0,0,0) q[99999999999999999999];", "more than 10,000"),
        ("OPENQASM 2.0;\nqreg q[1];\nU(1e999,0,0) q[0];", "OpenQASM|must be a finite number"),
        ("OPENQASM 3;\nqubit[2] q; frob", "line 2:16 no viable alternative at input 'frob'"),
        ("OPENQASM 3;\nqubit[63] q;", "63 qubits; at most 62"),
        ("OPENQASM 3;\nqubit[500 * 500] q;", "250000 qubits: a circuit has from 1 to 62"),
        ('OPENQASM 3;\ninclude "stdgates.inc";\nqubit q; rx(1/0) q;', "division .*by zero"),
        ('OPENQASM 3;\ninclude "qelib1.inc";\nqubit q;', "non-stdgates imports"),
        ("OPENQASM 3;\nqubit q; U(" + DEEP + ",0,0) q;", "more than 50 brackets in one another"),
        ("OPENQASM 3;\nqubit q; for int i in [0:9] { U(0,0,0) q; }", "for_loop: not supported"),
        ("OPENQASM 3;\nqubit q; bit c; c = measure q; U(0,0,0) q;", "measurement in the middle"),
    ],
)  # fmt: skip
def test_bad_openqasm_is_one_message(text: Any, message: str, capfd: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_qasm(text)
    assert len(str(error.value)) < 1000
    assert capfd.readouterr() == ("", "")


def test_a_panic_of_qiskit_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: Any, **__: Any) -> None:
        raise panic("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("qiskit.qasm2.loads", fail)
    with pytest.raises(ConfigError, match=r"OpenQASM: called `Result::unwrap\(\)`"):
        from_qasm("OPENQASM 2.0;")


def test_other_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match="OpenQASM 4: must be 2 or 3"):
        to_qasm(Circuit(1, [unitary(random_unitary(1, 0), 0)]), 4)


SEEDS = [
    'OPENQASM 2.0;\ninclude "qelib1.inc";\ngate g(a, b) x, y { rx(a*2) x; cu(a,b,-b,pi/3) x, y; }\n'
    "qreg q[3];\ncreg c[3];\nh q;\ng(0.3, 1.5e-3) q[0], q[2];\nbarrier q;\nmeasure q -> c;\n",
    'OPENQASM 3.0;\ninclude "stdgates.inc";\ngate g(a, b) x, y { rx(a*2) x; cx x, y; gphase(b); }\n'
    "input float[64] t;\nqubit[3] q;\nbit[3] c;\nh q;\n"
    "ctrl @ inv @ g(t, 1.5e-3) q[0], q[2], q[1];\n"
    "pow(0.5) @ x q[0];\nc = measure q;\n",
]


def check_damaged(seed: int) -> None:
    source = random.Random(seed)
    text = list(source.choice(SEEDS))
    for _ in range(source.randint(1, 4)):
        first = source.randrange(len(text))
        last = first + source.choice([0, 1, 1, 5])
        text[first:last] = source.choice(
            ["", ";", "9", "-", "(", "]", "é", "\0", "gate ", "q[1]", "/"]
        )
    try:
        found = from_qasm("".join(text))
    except ConfigError:
        return
    assert isinstance(found, Circuit)


def test_damaged_openqasm_is_read_or_refused() -> None:
    for seed in range(100):
        check_damaged(seed)


@pytest.mark.slow
def test_much_damaged_openqasm() -> None:
    for seed in range(1000, 6000):
        check_damaged(seed)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_a_circuit_is_read_back_from_a_file_of_any_format(format: str, seed: int) -> None:
    circuit = random_circuit(random.Random(seed), 3, 12)
    circuit = bound(circuit, some_parameters(circuit.num_parameters))
    read = FORMATS[format].read(FORMATS[format].write(circuit))
    state, again = statevector(circuit), statevector(read)
    phase = (state.conj() @ again).abs()  # OpenQASM 2 and Qiskit may lose the phase of the whole
    assert float(phase) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a circuit as CSV"),
        ("# two qubits\ngate,qubits,controls,control_state,angle\n", "not a circuit as CSV"),
        ("# 1 qubits\ngate,qubits,controls,control_state,angle\nh,5,,,\n", "qubit 5"),
        ("# 1 qubits\ngate,qubits\nh,0\n", "not a circuit as CSV"),
        ("# 1 qubits\ngate,qubits,controls,control_state,angle\nrx,0,,,nan\n", "finite"),
    ],
)
def test_damaged_tables_of_gates_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_csv(text)
