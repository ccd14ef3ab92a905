"""A training state and snapshots of it: taken, checked, brought back into use."""
