"""Datasets of puzzles: generation, the published format on disk, and its checks."""
