"""CIFAR-10 and images of its kind, with a small residual network."""
