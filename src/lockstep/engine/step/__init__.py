"""One training step: the optimizer on flat parameters, and what it needs."""
