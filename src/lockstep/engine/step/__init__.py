"""One training step: its microbatches, the optimizer on flat parameters, and what it needs."""
