"""What the subcommands of `lockstep` do; `lockstep.cli` only parses and calls them."""
