"""Datasets of puzzles: their format on disk, and how they are made. Knows nothing of ranks."""
