"""Job scripts for SLURM."""
