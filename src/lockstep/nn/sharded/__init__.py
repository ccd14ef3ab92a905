"""Tensor parallelism: layers whose features are cut into shards, which several ranks may hold."""
