"""The quantum transformer."""
