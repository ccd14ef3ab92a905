"""Predictions of what training costs on other numbers of ranks, from measurements."""
