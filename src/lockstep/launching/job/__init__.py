"""The launcher's side: the commands that start ranks, and watching ranks to their end."""
