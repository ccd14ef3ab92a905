"""The engine: one training step from the sampler to the optimizer, and its state."""
