"""One training step: its microbatches, its sums, and how it is applied."""
