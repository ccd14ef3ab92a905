"""Subcommands that start something: train, evaluate, export, sweep, and what to begin with."""
