"""The forward and backward passes of microbatches: loss, gradients, buffers, phases, stages."""
