"""Sums of gradients host by host: what ranks of a host add up among themselves does not travel.

The ranks of a host hold a contiguous range of microbatches, if ranks are numbered host by host. So
their nodes can be added up along the canonical tree as far as it allows, and what is left are the
nodes of the host's range: one if it is aligned, at most 2 log2 M. These alone go to other hosts.
The additions are those of the tree, operand by operand, so the bits are, too.
"""
