"""Tests that start ranks have one worker of pytest-xdist (`tests/conftest.py`)."""

from __future__ import annotations

import pytest


def test_groups_are_heeded(request: pytest.FixtureRequest) -> None:
    """Versions of pytest and pytest-xdist that do not fit each other ignore them without a word."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("runs under --dist loadgroup")
    assert request.node.nodeid.endswith("@test_groups.py")
