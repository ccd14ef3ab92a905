"""The recipe `digits` with a deeper perceptron: 0.8 M parameters, most of them in one matrix."""

from __future__ import annotations

from torch import nn

from lockstep.systems.digits.task import Digits

_WIDTH = 848


class Deep(Digits):
    """Handwritten digits, with a perceptron of two hidden layers."""

    def build_model(self) -> nn.Module:
        """Images [N, 1, 8, 8] to logits [N, 10]; 783,562 parameters."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, _WIDTH),
            nn.ReLU(),
            nn.Dropout(self.config.dropout),
            nn.Linear(_WIDTH, _WIDTH),
            nn.ReLU(),
            nn.Dropout(self.config.dropout),
            nn.Linear(_WIDTH, 10),
        )
