"""Circuits as layers of neural networks."""
