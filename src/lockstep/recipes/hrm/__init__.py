"""The hierarchical reasoning model: puzzles in, answers by repeated refinement out."""
