"""`lockstep plan`: measure a task for a while, and predict it elsewhere."""
