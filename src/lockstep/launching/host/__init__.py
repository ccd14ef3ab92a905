"""Launching on one host: its processes and cores, and the supervisor of its ranks."""
