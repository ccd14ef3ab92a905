"""`lockstep monitor`: runs watched while they go on."""
