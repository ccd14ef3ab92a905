"""Parameters in flat memory: one tensor for each dtype, its places and its slices."""
