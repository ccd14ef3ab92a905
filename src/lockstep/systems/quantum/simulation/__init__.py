"""States, measurements and derivatives of circuits."""
