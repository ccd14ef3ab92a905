"""Tables whose rows are dealt out to ranks: lent to microbatches, stepped, copied, kept."""
