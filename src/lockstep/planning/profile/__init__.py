"""Profiles of communication: what was measured, lines through it, and the file it is kept in."""
