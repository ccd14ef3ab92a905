"""`lockstep comm-profile`: what communication costs here, by operation and size."""
