"""Properties of ansätze over random angles: gradients, expressibility and entanglement."""
