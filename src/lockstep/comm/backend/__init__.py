"""The `mpi4py` backend of `torch.distributed`, a part of its own: the engine does not use it."""
