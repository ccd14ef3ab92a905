"""Which rank computes what, and sums whose order does not depend on that."""
