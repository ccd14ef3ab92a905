"""Checkpoints and the run directory: what is saved, how it is written, and how it comes back."""
