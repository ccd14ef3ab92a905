"""Reading run directories, in processes of their own that cost the ranks nothing.

The run directory is the only channel. All that is read here may be half-written, damaged, of
another version, or copied from another machine: what can be read is, and what cannot is named.
"""
