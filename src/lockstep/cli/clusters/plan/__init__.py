"""`lockstep plan`: measures a task for a while, and predicts it on other numbers of ranks."""
