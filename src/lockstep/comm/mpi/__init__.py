"""Bytes over MPI: the engine's transport, and new processes for its group."""
