"""What is kept of ranks' calls when one is lost: the files, and what they tell."""
