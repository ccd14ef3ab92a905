"""Small synthetic files, and a cache that no other test sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.systems.ufs.synthetic import write_synthetic

NUM_LATITUDES, NUM_LONGITUDES, NUM_TIMES = 36, 48, 3


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with history files and CF pairs; not to be changed."""
    folder = tmp_path_factory.mktemp("files")
    write_synthetic(folder, NUM_LATITUDES, NUM_LONGITUDES, NUM_TIMES)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rows are kept; for the processes that a test starts too."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
