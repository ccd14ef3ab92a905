"""Synthetic data with a known law."""
