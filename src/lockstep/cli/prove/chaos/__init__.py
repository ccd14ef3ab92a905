"""`lockstep chaos`."""
