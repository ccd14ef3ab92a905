"""What `python -m tests.house`, a part of `make lint`, counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    text = '"""A module.\n\nTwo lines."""\n\nX = (  # why\n    1,\n)\n"""An X."""\n# alone\n'
    (tmp_path / "module.py").write_text(text)
    assert house.modules() == [house.Module(Path("module.py"), 3, 2)]
