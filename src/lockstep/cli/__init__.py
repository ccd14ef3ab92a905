"""The `lockstep` command: a function for each subcommand, which imports what it needs."""
