"""Starting ranks, watching them to their end, and what each rank does to find and join the others.

In a rank: `rank.process.StopRequest` → `rank.environment.detect` → `rank.process.num_threads` →
`rank.join.open_transport`. In the launcher: `job.commands.mpirun_command` and the like →
`job.run.run_ranks`.
"""
