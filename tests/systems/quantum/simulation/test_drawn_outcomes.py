"""Outcomes of measurements, of which there may be more than torch draws from."""

import gc

import pytest
import torch

from lockstep.systems.quantum.simulation import evolution, measure
from lockstep.systems.quantum.simulation.measure import draw, sample_frequencies


def test_many_outcomes_are_drawn_by_their_probabilities(monkeypatch):
    monkeypatch.setattr(measure, "_MOST_CATEGORIES", 4)
    likely = torch.tensor([[0.0, 0.5, 0.0, 0.2, 0.3, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(1)
    drawn = draw(likely, 20_000, generator)
    again = draw(likely, 20_000, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)
    counts = torch.stack([row.bincount(minlength=6) for row in drawn]) / 20_000
    assert torch.allclose(counts, likely, atol=0.02)
    assert not counts[likely == 0].any()


@pytest.mark.slow
def test_a_register_of_25_qubits_can_be_sampled():
    likely = torch.zeros(1 << 25)
    likely[[3, (1 << 25) - 1]] = torch.tensor([0.25, 0.75])
    found = sample_frequencies(likely, 1000, torch.Generator().manual_seed(2))
    assert found.nonzero().flatten().tolist() == [3, (1 << 25) - 1]
    assert float(found[3]) == pytest.approx(0.25, abs=0.05)


def test_states_whose_making_was_refused_go_without_a_word(recwarn):
    with pytest.raises(TypeError):
        evolution.Kept()
    gc.collect()
    assert not recwarn.list
