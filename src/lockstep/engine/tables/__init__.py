"""Tables whose rows are distributed over ranks: fetched, stepped, copied and saved."""
