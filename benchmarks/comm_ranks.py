"""A rank of `lockstep comm-profile`, for `comm_profile.py`: rank 0 prints the profile as JSON."""

from __future__ import annotations

import sys

from lockstep.cli.clusters.comm_profile_rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
