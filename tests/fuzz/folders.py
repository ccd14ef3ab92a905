"""Folders of which one file is damaged: puzzles, and rows of tables in a checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch

import lockstep as ls
from lockstep.comm.transport import LocalTransport
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.share import meet
from lockstep.engine.tables.files import cuts, described, file_name, read_fields, scattered_tables
from lockstep.engine.tables.table import DistributedTable, Part
from lockstep.optim import RowAdam
from lockstep.parallel.layout import RowLayout
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_dataset, read_identifiers
from lockstep.systems.hrm.data.sources import Options
from tests.fuzz.base import Made, Make
from tests.fuzz.checkpoints import sign


def puzzles(name: str) -> Make:
    """A file of a dataset of puzzles: refused, or what is read fits together."""

    def make(folder: Path, _: Path) -> Made:
        made = folder / "made"
        build("sudoku", made, Options(train=3, test=2, augment=1))

        def call(data: bytes) -> None:
            (made / name).write_bytes(data)
            splits = read_dataset(made)
            known = len(read_identifiers(made))
            for split in splits.values():
                for part in split.sets.values():
                    assert part.inputs.shape == part.labels.shape
                    assert part.inputs.shape[1] == split.metadata.seq_len
                    assert int(part.inputs.max(initial=0)) < split.metadata.vocab_size
                    assert part.puzzle_indices[-1] == len(part.inputs)
                    assert int(part.puzzle_identifiers.max(initial=0)) < max(known, 1)

        return [(made / name).read_bytes()], call

    return make


def table(folder: Path, _: Path) -> Made:
    """Rows of a table whose file is changed and signed again: refused, or of the right shapes."""
    rows = ls.nn.SparseEmbedding(40, 3, RowAdam(), std=1.0)
    distributed = DistributedTable("rows", rows, 1)
    distributed.parts = [Part.start(rows, RowLayout(40, 1), 0, torch.device("cpu"))]
    name = file_name(0, 0)

    def write(data: bytes | None) -> Path:
        shutil.rmtree(folder / "step_00000001", ignore_errors=True)
        alone = LocalTransport()
        files = scattered_tables(alone, [distributed])
        share = meet(alone, lambda: checkpoint.begin(folder, 1), files, most_bytes=0)
        assert share is not None
        share.write(share.gathered(alone, torch.device("cpu"))[0])
        snapshot = Snapshot(1, {}, {}, {"tables": described({"rows": rows})})
        there, _ = checkpoint.write(folder, snapshot, share=share)
        if data is not None:
            sign_file(there, name, data)
        return there

    def call(data: bytes) -> None:
        there = write(data)
        checkpoint.read(there)
        fields = read_fields(
            rows, there / name, cuts(rows)[0], checkpoint.read_manifest(there)["files"]
        )
        assert {n: tuple(f.shape) for n, f in fields.items()} == {
            "weight": (40, 3), "mean": (40, 3), "square": (40, 1), "steps": (40, 1)
        }  # fmt: skip

    return [(write(None) / name).read_bytes()], call


def sign_file(folder: Path, name: str, data: bytes) -> None:
    """Put other content in the place of a checkpoint's file, with a manifest that says so."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / "manifest.json").write_bytes(sign(json.dumps(manifest).encode()))
