"""Gradients of microbatches made smaller before they travel, and what that cuts off.

Each leaf of the sum is compressed by itself, as a pure function of the leaf, of what was cut off
of this microbatch's leaves before (its error feedback), and of numbers that all ranks have agreed
on. What comes of it is added up in an order that does not depend on ranks. So the sum has the same
bits on any number of them, as without compression.
"""
