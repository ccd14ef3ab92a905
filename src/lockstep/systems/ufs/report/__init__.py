"""The report about a trained emulator: scores, maps, sensitivities."""
