"""What run directories tell: a reader in a process of its own, which costs the ranks nothing.

The run directory is the only channel. All that is read here may be half-written, damaged, of
another version, or copied from another machine: what can be read is, and what cannot is named.
"""
