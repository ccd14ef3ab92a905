"""Everything is computed on the device of the parameters.

Where there is no GPU, the device `meta` stands in for one: its tensors have shapes and dtypes only,
and an operation on one of them and a tensor of the CPU is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.systems.quantum.analysis import (
    entangling_capability,
    expressibility,
    gradient_samples,
    meyer_wallach,
    pauli_z,
    random_axes,
    ring,
)
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate, unitary
from lockstep.systems.quantum.simulation.gradients import shifted
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities
from lockstep.systems.quantum.simulation.statevector import Simulator, statevector
from lockstep.systems.quantum.transformer.amplitudes import (
    context_root,
    fubini_study,
    log_likelihoods,
    loss,
    of_sentences,
)
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

DTYPES = [torch.complex64, torch.complex128]
CIRCUIT = Circuit(
    3,
    [
        *ring(3, 2).gates,
        gate("crx", 0, 1, angle=parameter(0)),
        unitary(torch.eye(4), 0, 1).controlled(2),
    ],
)
HAMILTONIAN = PauliSum({"ZZI": 1.0, "XYI": 0.5})
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def angles(device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(5, CIRCUIT.num_parameters, dtype=torch.float64, generator=generator)
    return values.to(device, dtype.to_real()).requires_grad_()


def by_adjoint(simulator: Simulator, own: Tensor) -> Tensor:
    energy = HAMILTONIAN.expectation(simulator.state(own)).sum()
    return torch.autograd.grad(energy, own, create_graph=True)[0]


def by_second(simulator: Simulator, own: Tensor) -> Tensor:
    return torch.autograd.grad(by_adjoint(simulator, own).square().sum(), own)[0]


def by_shift(simulator: Simulator, own: Tensor) -> Tensor:
    measured = shifted(simulator, own, probabilities)
    return torch.autograd.grad(measured.square().sum(), own)[0]


def some_probabilities(simulator: Simulator, own: Tensor) -> Tensor:
    return probabilities(simulator.state(own), [0, 2])


def entanglement(simulator: Simulator, own: Tensor) -> Tensor:
    return meyer_wallach(simulator.state(own))


def whole_state(simulator: Simulator, own: Tensor) -> Tensor:
    return statevector(CIRCUIT, own, simulator.dtype)


WORK = [by_adjoint, by_second, by_shift, some_probabilities, entanglement, whole_state]
Work = Callable[[Simulator, Tensor], Tensor]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", WORK)
def test_a_circuit_makes_no_tensor_on_another_device(work: Work, dtype: torch.dtype) -> None:
    found = work(Simulator(CIRCUIT, dtype, "meta"), angles("meta", dtype))
    assert found.is_meta
    expected = work(Simulator(CIRCUIT, dtype), angles("cpu", dtype))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", WORK)
def test_a_circuit_on_a_gpu_is_that_on_the_cpu(work: Work, dtype: torch.dtype) -> None:
    found = work(Simulator(CIRCUIT, dtype, "cuda"), angles("cuda", dtype))
    assert found.is_cuda
    expected = work(Simulator(CIRCUIT, dtype), angles("cpu", dtype))
    assert found.dtype == expected.dtype
    bound = 1e-12 if dtype == torch.complex128 else 1e-4
    assert (found.cpu() - expected).abs().max() < bound


def transformer(trainable: bool, dtype: torch.dtype = torch.float64) -> QuantumTransformer:
    torch.manual_seed(0)
    return QuantumTransformer(list("abcde"), 4, 1, trainable=trainable, dtype=dtype)


def sentences(device: str) -> Sentences:
    rows = torch.tensor([[0, 1, 2, 3], [4, 2, 0, 0]])
    return Sentences(*(t.to(device) for t in (rows, torch.tensor([3, 1]), torch.tensor([0, 1]))))


def fidelity(model: QuantumTransformer, batch: Sentences) -> Tensor:
    return loss(model(batch))


def likelihood(model: QuantumTransformer, batch: Sentences) -> Tensor:
    return log_likelihoods(of_sentences(model.next_words(batch), batch.words))


def ranked(model: QuantumTransformer, batch: Sentences) -> Tensor:
    return model.rank_next([0, 1], batch.words[0])


def metric(model: QuantumTransformer, batch: Sentences) -> Tensor:
    root = torch.ones(3, 4, 4, dtype=model.angles.dtype, device=model.angles.device)
    return fubini_study(model.angles[0].detach(), 2, root)


FORMS = [fidelity, likelihood, ranked, metric]
Form = Callable[[QuantumTransformer, Sentences], Tensor]


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_transformer_makes_no_tensor_on_another_device(form: Form, trainable: bool) -> None:
    model = transformer(trainable)
    form(model, sentences("cpu"))  # what it keeps from one device must not be used on another
    found = form(model.to("meta"), sentences("meta"))
    assert found.is_meta
    if found.requires_grad:
        found.sum().backward()
        assert all(p.grad.is_meta for p in model.parameters())


def parts(model: QuantumTransformer, batch: Sentences) -> Tensor:
    return torch.stack([model.by_transitions(batch, 2), model.by_restarts(batch, 1)])


def circuits(model: QuantumTransformer, batch: Sentences) -> Tensor:
    with torch.no_grad():
        return model.by_circuits(batch)


def corpus_metric(model: QuantumTransformer, batch: Sentences) -> Tensor:
    root = context_root(model.encode(batch.words).detach(), batch.transitions)
    return fubini_study(model.angles[0].detach(), 2, root)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("form", [*FORMS, parts, circuits, corpus_metric])
def test_the_transformer_on_a_gpu_is_that_on_the_cpu(
    form: Form, trainable: bool, dtype: torch.dtype
) -> None:
    model = transformer(trainable, dtype)
    whole = Sentences(*sentences("cpu")[:2], torch.zeros(2, dtype=torch.int64))
    expected = form(model, whole).detach()
    found = form(model.to("cuda"), Sentences(*(t.cuda() for t in whole)))
    assert found.is_cuda
    assert (found.detach().cpu() - expected).abs().max() < (1e-10 if dtype.itemsize == 8 else 1e-3)


@needs_gpu
def test_ansaetze_are_judged_on_a_gpu_as_on_the_cpu() -> None:
    circuit = random_axes(3, 2, seed=1)
    for judge in (expressibility, entangling_capability):
        assert judge(circuit, 100, device="cuda") == pytest.approx(judge(circuit, 100), abs=1e-9)
    found = gradient_samples(circuit, pauli_z(3, "local"), 20, device="cuda")
    assert (found.cpu() - gradient_samples(circuit, pauli_z(3, "local"), 20)).abs().max() < 1e-12
