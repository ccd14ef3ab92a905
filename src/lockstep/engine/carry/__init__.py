"""The carry: state of a microbatch that is passed on from step to step."""
