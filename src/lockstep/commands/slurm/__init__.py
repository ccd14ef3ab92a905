"""`lockstep slurm`: a job script that trains, stops in time, and goes on after a requeue."""
