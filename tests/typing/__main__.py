"""Checks with mypy and pyright that callers' code has no errors of types: `make types`.

Callers' code is what examples/ and the pages of the documentation hold, what `lockstep init`
writes, and `caller.py` and `mistakes.py` in this folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.cli.start.init import init
from tests.pages import PAGES, blocks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def write_pages(folder: Path) -> None:
    """Write the files that readers of all pages type to one folder; their names must differ."""
    init(folder / "spirals.py")
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            is_example = (ROOT / "examples" / block.title).is_file()  # in the README
            if block.language != "python" or is_example:
                continue
            stem = page.removesuffix(".md").strip("./").replace("/", "_").replace("-", "_")
            file = folder / (block.title or f"{stem}_{number}.py")
            if file.exists():
                raise SystemExit(f"docs/{page}: {file.name}: another page has a file of this name")
            file.write_text(block.code, encoding="utf-8")


def mypy(*paths: Path) -> int:
    """The exit code of mypy, set up as a strict caller's."""
    command = [sys.executable, "-m", "mypy", "--config-file", HERE / "mypy.ini", *paths]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def pyright(folder: Path, *paths: Path) -> int:
    """The exit code of pyright (basedpyright brings its own node) in pyright's standard mode."""
    settings = {"typeCheckingMode": "standard", "include": [str(path) for path in paths]}
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(settings), encoding="utf-8")
    command = ["basedpyright", "--project", config, "--pythonpath", sys.executable]
    executable = Path(sys.executable).with_name(command[0])
    return subprocess.run([executable, *command[1:]], cwd=ROOT, check=False).returncode


def main() -> int:
    """Check all of them; 0 if there are no errors."""
    examples = sorted((ROOT / "examples").glob("*.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pages(folder)
        written = sorted(folder.glob("*.py"))
        found = mypy(HERE / "caller.py", HERE / "mistakes.py", *examples, *written)
        return pyright(folder, HERE / "caller.py", *examples, *written) or found


if __name__ == "__main__":
    sys.exit(main())
