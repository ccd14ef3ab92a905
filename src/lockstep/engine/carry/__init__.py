"""The carry: state that belongs to a microbatch, and goes on with it from step to step."""
