"""The example `ising.py`: shifted evaluations of one circuit, distributed in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.launching.targets import configured, make_task

EXAMPLE = str(Path(__file__).parents[4] / "examples" / "ising.py")


def test_parts_add_up_to_the_energy_and_its_gradient() -> None:
    task = make_task(*configured(EXAMPLE, ["num_qubits=4", "parts=5"]))
    torch.manual_seed(1)
    model = task.build_model()
    parts = task.dataset("train")
    energy = 0.0
    for part in range(len(parts)):
        loss = task.loss(model, [parts[part][0][None]])
        assert loss.weight == 1 / 5
        energy += loss.sum.detach()
        loss.sum.backward()
    angles = model.angles.detach().requires_grad_()
    exact = task.hamiltonian.expectation(task.simulator.state(angles))
    exact.backward()
    assert (energy - exact).abs() < 1e-12
    assert (model.angles.grad - angles.grad).abs().max() < 1e-12


@pytest.mark.slow
def test_it_is_equal_on_other_numbers_of_ranks(lockstep) -> None:
    keys = ("num_qubits=4", "num_layers=2", "steps=6")
    done = lockstep("verify", EXAMPLE, "--ranks", "1,2", "--launchers", "python,mpi", *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 4 runs, one SHA-256" in done.stdout
