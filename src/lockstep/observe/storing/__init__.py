"""What stores a run: events, curves, results, pictures."""
