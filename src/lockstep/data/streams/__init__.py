"""Datasets that can only be read in order: passes, positions and microbatches."""
