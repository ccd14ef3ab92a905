"""Sketched networks as a recipe."""
