"""Loaded by every interpreter that tests start: has a forked process do its work."""

import os
import sys

sys.path.remove(os.path.dirname(__file__))
if os.environ.get("LOCKSTEP_TEST_WARM"):
    _tests = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    _folder = os.path.join(os.path.dirname(_tests), "src", "lockstep", "launching", "warm")
    sys.path.insert(0, _folder)
    import proxy

    sys.path.remove(_folder)
    _what = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    if _what in ("-m", "-c") or _what.endswith(".py"):
        proxy.hand_over(os.environ["LOCKSTEP_TEST_WARM"], sys.orig_argv)
