"""Loaded by every interpreter that tests start: has a forked process do its work."""

import os
import sys

sys.path.remove(os.path.dirname(__file__))
if os.environ.get("LOCKSTEP_TEST_WARM"):
    _folder = os.path.dirname(os.path.dirname(__file__))
    sys.path.insert(0, _folder)
    import client

    sys.path.remove(_folder)
    client.hand_over(os.environ["LOCKSTEP_TEST_WARM"], sys.orig_argv)
