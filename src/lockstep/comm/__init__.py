"""Transports: what carries bytes between ranks.

Importing this package stays free of MPI. Importing `lockstep.comm.backend` calls
`MPI_Init`, so a run of one plain process should not.
"""
