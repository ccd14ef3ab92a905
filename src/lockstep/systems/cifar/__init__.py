"""CIFAR-10 and images of its kind, with a small residual network."""

from lockstep.launching.systems import System

SYSTEM = System(
    "lockstep.systems.cifar.task:Cifar",
    "CIFAR-10 and images of its kind, with a small residual network and augmentation.",
)
