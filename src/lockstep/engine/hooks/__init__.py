"""What runs beside training: at its start, after steps, evaluations and checkpoints, at its end."""
