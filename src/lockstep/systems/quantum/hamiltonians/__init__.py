"""Sums of Pauli strings: algebra, texts, groups that are measured together, lowest energies."""
