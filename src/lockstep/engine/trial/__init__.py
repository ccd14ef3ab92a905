"""Computations before training that find results which would differ between ranks."""
