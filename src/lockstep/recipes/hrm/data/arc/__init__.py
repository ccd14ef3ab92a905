"""ARC-AGI: tasks as token sequences, augmentations that can be inverted, and the vote."""
