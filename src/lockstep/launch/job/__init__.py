"""What happens in the launcher: the commands that start ranks, and watching them to their end."""
