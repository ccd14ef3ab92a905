"""`lockstep sweep`: a grid of configs, a run of each."""
