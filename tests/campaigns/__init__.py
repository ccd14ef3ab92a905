"""Campaigns against the command from outside: kills at random moments, poisoned surroundings.

Everything that a run meets is a function of (seed, number of the run), so what has gone wrong is
done again with `--seed SEED --only NUMBER`. Nothing of a run is told that it is part of a campaign:
it is started as a user starts it, and struck by the numbers of its processes.
"""
