"""Starting ranks from a program: for the command's subcommands, and for `lockstep.launch`."""
