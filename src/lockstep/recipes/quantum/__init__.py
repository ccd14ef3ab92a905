"""The quantum transformer as a recipe."""
