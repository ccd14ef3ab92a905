"""Subcommands that look at runs: monitor, runs, report, diagnose."""
