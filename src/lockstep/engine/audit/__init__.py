"""Checks of user code for state that the engine does not manage, and for likely mistakes."""
