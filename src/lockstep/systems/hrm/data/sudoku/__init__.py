"""Sudoku of 4x4, 6x6 and 9x9 cells: rules, solver, symmetries, puzzles and the public CSV."""
