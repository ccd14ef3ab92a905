"""Writing files in MNIST's IDX format."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

from torch import Tensor

from lockstep.data.images import TYPES


def write_idx(path: Path, tensor: Tensor) -> None:
    """Write a tensor as an IDX file; gzipped, with reproducible bytes, if `path` ends in `.gz`."""
    code, stored = next((c, s) for c, (dtype, s) in TYPES.items() if dtype == tensor.dtype)
    header = struct.pack(f">HBB{tensor.dim()}I", 0, code, tensor.dim(), *tensor.shape)
    content = header + tensor.detach().cpu().numpy().astype(stored).tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
