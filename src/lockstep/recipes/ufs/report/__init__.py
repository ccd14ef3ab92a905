"""What there is to say of a trained emulator: scores, maps, sensitivities."""
