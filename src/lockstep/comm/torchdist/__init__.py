"""Bytes over process groups of torch.distributed: gloo and NCCL."""
