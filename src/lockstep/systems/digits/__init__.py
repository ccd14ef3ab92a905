"""Handwritten digits: two small networks and real data."""

from lockstep.launching.systems import System

SYSTEM = System(
    "lockstep.systems.digits.task:Digits",
    "Handwritten digits (scikit-learn's or MNIST), with a perceptron or a small CNN.",
)
