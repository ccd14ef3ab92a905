"""A run of training: the loop, how far it has come, its microbatches, and its reports."""
