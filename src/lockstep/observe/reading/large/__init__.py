"""Runs of any size, read and shown in bounded memory."""
