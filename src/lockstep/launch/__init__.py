"""How ranks come to exist: where this process is, how it joins the others, how to start ranks.

Seen from a rank: `environment.detect` → `threads.set_threads` → `signals.StopRequest` →
`join.open_transport`. Seen from the launcher: `ranks.mpirun_command` and its like →
`supervise.run_ranks`.
"""
