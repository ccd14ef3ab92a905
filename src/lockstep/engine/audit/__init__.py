"""Looking for what the engine does not know of: state in user code, and likely mistakes."""
