"""Checkpoints and the run directory: what is saved, how it is written, how it is restored."""
