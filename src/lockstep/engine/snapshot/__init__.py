"""Snapshots of the training state: captured, checked and restored."""
