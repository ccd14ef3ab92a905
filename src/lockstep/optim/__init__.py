"""Optimizers that torch does not have, or not without a closure."""
