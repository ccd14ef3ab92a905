"""All targets of the fuzz test: everything that reads what comes from outside."""

from __future__ import annotations

import json

from lockstep.data.images import read_idx
from lockstep.systems.quantum.language import read_sentences
from tests.fuzz import folders, readers
from tests.fuzz.base import Target, one_file
from tests.fuzz.checkpoints import CONFIG, checkpoint_file, manifest_mutator, signed
from tests.fuzz.mutate import (
    json_mutator,
    lines_mutator,
    mutate_bytes,
    text_mutator,
)

WORDS = text_mutator("lr", "steps", "seed", "optimizer.name", "betas", "[0.9, 0.99]", "1e-3", "sgd")


TARGETS = {
    target.name: target
    for target in (
        Target("manifest", 60, checkpoint_file("manifest.json"), json_mutator),
        Target("signed manifest", 100, signed("manifest.json"), manifest_mutator),
        Target("model", 30, checkpoint_file("model.safetensors"), mutate_bytes),
        Target("signed model", 30, signed("model.safetensors"), mutate_bytes),
        Target("signed table", 30, folders.table, mutate_bytes),
        Target("puzzles", 30, folders.puzzles("train/dataset.json"), json_mutator),
        Target("puzzles' tokens", 30, folders.puzzles("train/all__inputs.npy"), mutate_bytes),
        Target("puzzles' ends", 30, folders.puzzles("train/all__puzzle_indices.npy"), mutate_bytes),
        Target("identifiers", 20, folders.puzzles("identifiers.json"), json_mutator),
        Target("signed optimizer", 30, signed("optimizer.safetensors"), mutate_bytes),
        Target(
            "run.json",
            60,
            one_file("run.json", readers.identity_of, json.dumps(readers.IDENTITY).encode()),
            json_mutator,
        ),
        Target(
            "config.yaml",
            60,
            one_file(
                "config.yaml",
                readers.config_file,
                CONFIG.to_yaml().encode(),
                b"lr: 0.1\noptimizer: {name: sgd}\n",
            ),
            WORDS,
        ),
        Target(
            "key=value",
            60,
            lambda *_: (
                [b"lr=0.5\x02optimizer.betas=[0.9, 0.99]", b"optimizer={name: sgd}\x02steps=3"],
                readers.overrides,
            ),
            WORDS,
        ),
        Target(
            "events.jsonl",
            60,
            one_file("events.jsonl", readers.events, readers.event_rows()),
            lines_mutator,
        ),
        Target(
            "shown events",
            60,
            one_file("events.jsonl", readers.shown, readers.event_rows()),
            lines_mutator,
        ),
        Target(
            "metrics.csv",
            60,
            one_file("metrics.csv", readers.metrics, readers.CSV),
            text_mutator("step", "split", "train", "loss"),
        ),
        Target(
            "result.json",
            60,
            one_file("result.json", readers.result, json.dumps(readers.RESULT).encode()),
            json_mutator,
        ),
        Target(
            "hint",
            20,
            one_file("best", readers.hint, b"step_00000003\n"),
            text_mutator("step_", "00000003"),
        ),
        Target(
            "hang report",
            20,
            one_file("hang_of_slot_0.json", readers.hang, b'{"reason": "did nothing"}'),
            json_mutator,
        ),
        Target("calls", 30, one_file("slot_0.calls", readers.calls, *readers.CALLS), mutate_bytes),
        Target(
            "faults log",
            20,
            one_file("chaos.faults", readers.struck, readers.STRUCK),
            lines_mutator,
        ),
        Target(
            "job file",
            20,
            one_file("job.yaml", readers.job, b"nodes: 2\ntime: '1:00:00'\nreplace: 1\n"),
            WORDS,
        ),
        Target("IDX", 40, one_file("x-idx", read_idx, *readers.idx_samples()), mutate_bytes),
        Target("IDX labels", 20, readers.labelled, mutate_bytes),
        Target("CIFAR", 20, readers.cifar_batch, mutate_bytes),
        Target(
            "sentences",
            20,
            one_file("corpus.txt", read_sentences, "The cat flies\nthe dög barks\n".encode()),
            text_mutator(),
        ),
        Target(
            "node list",
            40,
            lambda *_: ([b"rack[1-2]node[01-03,07],login", b"a,b-1"], readers.nodes),
            text_mutator("[", "]", "-", ",", "[1-99999999]", "a[1]"),
        ),
        Target(
            "LOCKSTEP_SESSION",
            40,
            lambda *_: ([readers.SESSION_TEXT.encode()], readers.session_variable),
            json_mutator,
        ),
        Target(
            "LOCKSTEP_FAULTS",
            40,
            lambda *_: ([readers.FAULTS_TEXT.encode()], readers.faults_variable),
            json_mutator,
        ),
        Target(
            "environment",
            60,
            lambda *_: ([e.encode() for e in readers.ENVIRONMENTS], readers.environment),
            text_mutator("RANK", "SIZE", "2(x2)", "n[1-2]", "4294967290"),
        ),
        Target("NetCDF", 30, readers.netcdf, mutate_bytes),
        Target("band", 20, readers.band, mutate_bytes),
        Target(
            "OpenQASM",
            30,
            lambda *_: ([readers.QASM_2.encode(), readers.QASM_3.encode()], readers.qasm),
            text_mutator("q", "qreg", "[1000000]", "gate", "if", "U", "barrier", "inv @", "for"),
        ),
    )
}
