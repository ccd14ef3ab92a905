"""What a trained model makes of puzzles: segment by segment, on a page, and in tables."""
