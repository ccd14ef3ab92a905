"""What steps the parameters: a run's optimizer, its learning rates, and its state by name."""
