"""What is computed before training, to find what would come out otherwise on other ranks."""
