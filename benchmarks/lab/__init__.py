"""A laboratory of shaped networks: network namespaces of one machine as hosts.

`Lab` makes them, `start_ranks` starts ranks in them; `python -m benchmarks.lab --help` does both.
"""

from __future__ import annotations

from .network import Lab
from .ranks import Outcome, start_ranks
from .shape import NAMED, Shape, parse_shape

__all__ = ["NAMED", "Lab", "Outcome", "Shape", "parse_shape", "start_ranks"]
