"""Distributed training that gives the same answer on any number of processes."""
