"""Tables of which each step needs a few rows."""
