"""Evaluation of splits: batches, means along a canonical tree, and metrics with states."""
