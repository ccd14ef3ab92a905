"""What shows a run to whoever has started it: on a terminal, in a log, in a notebook."""
