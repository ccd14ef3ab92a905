"""Circuits: gates, and the plan by which a simulator applies them."""
