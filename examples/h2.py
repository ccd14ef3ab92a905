"""The ground state of the hydrogen molecule, each group of its Hamiltonian's terms a sample.

H2 in the basis STO-3G at 0.7414 Å, four spin orbitals after Jordan and Wigner. The coefficients are
those of Seeley, Richard and Love (J. Chem. Phys. 137, 224109 (2012)), to more digits by PennyLane's
`qchem`, with the repulsion of the nuclei. The lowest energy is -1.137270 hartree.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import (
    Circuit,
    PauliOperator,
    Simulator,
    commuting_groups,
    gate,
    lowest_energies,
    parameter,
    pauli_rotation,
    shifted,
)

H2 = """
    -0.0988639781020717 []
    + 0.1711977493030588 [Z0] + 0.1711977493030588 [Z1]
    - 0.2227859259568686 [Z2] - 0.2227859259568686 [Z3]
    + 0.1686221919361610 [Z0 Z1] + 0.1205448219439657 [Z0 Z2] + 0.1658670238529451 [Z0 Z3]
    + 0.1658670238529451 [Z1 Z2] + 0.1205448219439657 [Z1 Z3] + 0.1743484410601783 [Z2 Z3]
    + 0.0453222019089793 [Y0 X1 X2 Y3] + 0.0453222019089793 [X0 Y1 Y2 X3]
    - 0.0453222019089793 [X0 X1 Y2 Y3] - 0.0453222019089793 [Y0 Y1 X2 X3]
"""


class HydrogenConfig(ls.TrainConfig):
    commuting: str = "qubitwise"
    """How the terms are grouped: `qubitwise` or `fully`."""
    shots: int = 0
    """Measurements of each group in each evaluation; 0 for exact expectation values."""

    batch_size: int = 5
    num_microbatches: int = 5
    epochs: int = 60
    lr: float = 0.1
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(name="adam")
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=20)


def coupled_cluster() -> Circuit:
    """Two electrons in orbitals 0 and 1, which one angle excites together to 2 and 3.

    One of the strings of the double excitation of unitary coupled cluster does, up to the sign.
    """
    return Circuit(4, [gate("x", 0), gate("x", 1), *pauli_rotation("XXXY", parameter(0))])


class Ansatz(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.angles = nn.Parameter(0.01 * torch.randn(count, dtype=torch.float64))


class Hydrogen(ls.Task):
    Config = HydrogenConfig
    config: HydrogenConfig

    def __init__(self, config: HydrogenConfig | None = None) -> None:
        super().__init__(config)
        self.simulator = Simulator(coupled_cluster())
        self.hamiltonian = PauliOperator.parse(H2)
        self.groups = commuting_groups(self.hamiltonian, self.config.commuting)

    def build_model(self) -> Ansatz:
        return Ansatz(self.simulator.circuit.num_parameters)

    def dataset(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.arange(len(self.groups))) if split == "train" else None

    def loss(self, model: Ansatz, batch: tuple[Tensor]) -> ls.Loss:
        constant = self.hamiltonian.terms["IIII"].real / len(self.groups)
        total = torch.zeros((), dtype=torch.float64)
        for number in batch[0].tolist():
            energy = shifted(self.simulator, model.angles, partial(self.measure, number=number))
            total = total + energy.sum() + constant
        return ls.Loss(total, len(batch[0]) / len(self.groups))

    def measure(self, states: Tensor, number: int) -> Tensor:
        """The energy [B, 1] of a group of terms in states [B, 16]."""
        group = self.groups[number]
        if not self.config.shots:
            return group.probabilities(states) @ group.values[:, None]
        outcomes = group.sample(
            states, self.config.shots
        )  # by torch's generator: a microbatch's own
        return group.values[outcomes].mean(-1, keepdim=True)


if __name__ == "__main__":
    print(f"lowest energy: {lowest_energies(PauliOperator.parse(H2)).item():.6f} hartree")
    ls.main(Hydrogen())
