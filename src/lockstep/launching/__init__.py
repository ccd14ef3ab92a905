"""How ranks come to exist: where this process is, how it joins the others, how to start ranks.

In a rank: `rank.signals.StopRequest` → `rank.environment.detect` → `rank.threads.num_threads` →
`rank.join.open_transport`. In the launcher: `job.commands.mpirun_command` and its like →
`job.run.run_ranks`.
"""
