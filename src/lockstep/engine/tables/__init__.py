"""Tables whose rows are distributed over ranks: fetched by microbatches, stepped, copied, kept."""
