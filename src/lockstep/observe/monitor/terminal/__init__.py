"""Runs on a terminal: a list of them, and a screen for each."""
