"""One name, one thing: terms of the house in documentation, docstrings, comments and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TERMS = {
    # The run.
    "microbatch": r"micro[- ]batch\w*|mini-?batch\w*",
    "world size": r"world-size|number of workers",
    "rank": r"rank id|worker rank",
    "step": r"training iteration|optimi[sz]er iteration",
    "checkpointer": r"checkpoint keeper|keeper|check-point\w*",
    "run directory": r"run folder|run dir\b|output directory of the run",
    "session": r"training session",
    "loader": r"data-?loader",
    "all-reduce": r"all ?reduce\w*|AllReduce",
    "all-gather": r"all ?gather\w*|AllGather",
    "hyperparameter": r"hyper[- ]parameter\w*",
    "bit-identical": r"bit identical",
    "element-wise": r"elementwise|element wise",
    "dataset": r"data sets?",
    "autocast": r"auto-cast",
    # Words of our own that the field has better ones for.
    "distributed, assigned": r"dealt|deals? out|dealing out",
    "joining rank": r"newcomers?",
    "predicted": r"foretold|foretells?|foretelling",
    "proxy": r"stand-ins?",
    "again": r"anew",
    # Computing.
    "file name": r"filename",
    "subcommand": r"sub-command",
    "timeout": r"time-out",
    "standard output": r"std-out|stdout stream",
    # Names of others, as they write them.
    "PyTorch": r"pytorch|Pytorch|pyTorch",
    "NumPy": r"Numpy",
    "SLURM": r"Slurm",
    "Open MPI": r"OpenMPI|Openmpi|open mpi",
    "TensorBoard": r"Tensorboard|Tensor board",
    "Unix seconds": r"unix seconds|unix time",
    "safetensors": r"safe tensors|Safetensors|SafeTensors",
    # British spelling, but for the field's own words (optimizer, serialize) and names in code.
    "behaviour": r"behavior\w*",
    "colour": r"colors?|colored",
    "normalise": r"normaliz\w*",
    "initialise": r"initializ\w*",
    "synchronise": r"synchroniz\w*",
    "recognise": r"recogniz\w*",
    "parallelise": r"paralleliz\w*",
    "summarise": r"summariz\w*",
    "neighbour": r"neighbor\w*",
    "centre": r"center\w*",
    "labelled": r"labeled|labeling",
    "cancelled": r"canceled|canceling",
    "optimizer": r"optimis\w*",
}
"""A term, and a pattern of the variants that are not used for it."""

FORBIDDEN = {
    term: re.compile(rf"(?<![\w.`/-])(?:{variants})(?![\w`(=])") for term, variants in TERMS.items()
}

_ANY = re.compile("|".join(pattern.pattern for pattern in FORBIDDEN.values()))
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)


def prose(text: str) -> str:
    """Text without code, links and addresses; its lines keep their numbers."""
    return _CODE.sub(lambda match: "\n" * match[0].count("\n"), text)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """What people read of a file: line and text."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, prose(source)
        return
    for node in ast.walk(ast.parse(source)):
        # A string with blanks is a docstring or a message, others are names.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, prose(node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], prose(token.string)


def problems(path: Path) -> Iterator[str]:
    """The forbidden variants in a file."""
    for line, text in texts(path):
        for found in _ANY.finditer(text):
            term = next(t for t, p in FORBIDDEN.items() if p.search(text, found.start()))
            number = line + text.count("\n", 0, found.start())
            yield f"{path.relative_to(ROOT)}:{number}: {found[0]!r}: write {term!r}"


def files() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return [*pages, *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.py")]


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ('"""Splits the mini-batch in two."""', "microbatch"),
        ("x = 1  # the world-size of the group", "world size"),
        ('print(f"{x}: the keeper has failed")', "checkpointer"),
        ('"""The behavior of the colors."""', "behaviour"),
    ],
)
def test_a_variant_is_found_with_its_line(
    tmp_path: Path, text: str, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_terms.ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(f"import os\n{text}\n")
    assert any(
        p.startswith("file.py:2: ") and p.endswith(f"write {term!r}") for p in problems(path)
    )


def test_code_is_not_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_terms.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text("`world-size`\n\n```sh\npip install pytorch\n```\n\nuses Slurm\n")
    assert [*problems(path)] == ["page.md:7: 'Slurm': write 'SLURM'"]
