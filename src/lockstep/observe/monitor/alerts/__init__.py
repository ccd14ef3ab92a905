"""Rules that watch runs, and what is done when one holds."""
