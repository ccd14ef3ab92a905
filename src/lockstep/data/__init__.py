"""Data in: which samples make up a microbatch, how they are fetched, and file formats."""
