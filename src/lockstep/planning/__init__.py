"""What training will cost elsewhere: from measurements to predictions. It starts no ranks."""
