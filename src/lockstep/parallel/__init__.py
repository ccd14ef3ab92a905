"""Who computes what, and sums whose order does not depend on who computed what."""
