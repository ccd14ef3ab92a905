"""Noise, measurements in the middle, reset and conditions: density matrices, trajectories."""
