"""Mazes: a path through each, generated or read from the public CSV."""
