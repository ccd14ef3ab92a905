"""Subcommands that prove the promises: verify and chaos."""
