"""Trained models: of a run, with its answers after each segment, and of the published code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.config import load, override
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.passes.precision import autocast
from lockstep.engine.snapshot.compatibility import check_fits, load_model
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.model import build_model
from lockstep.errors import ConfigError, DataError
from lockstep.launching.api.originals import fill
from lockstep.launching.foreign_files import ForeignFile
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.process import num_threads
from lockstep.launching.systems import Original
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.data.format import METADATA_FILE, read_dataset
from lockstep.systems.hrm.puzzles import Indices, Puzzles
from lockstep.systems.hrm.reasoning import ReasoningModel, halts
from lockstep.systems.hrm.reports.rules import Kind, Tokens, kind_of
from lockstep.systems.hrm.task import Hrm

MOST_SEGMENTS = 64
"""As for `eval_segments`."""

MOST_TOKENS = 256
"""A token is stored in a byte."""

_SPLITS = ("train", "val")


@dataclass(frozen=True)
class Answers:
    """A model's answers to some puzzles.

    Attributes:
        tokens: uint8 [S, B, cells], after each of S segments.
        q_halt: float32 [S, B], logits of halting after each segment.
        wants: bool [S, B], whether a puzzle would halt rather than go on.
    """

    tokens: npt.NDArray[np.uint8]
    q_halt: npt.NDArray[np.float32]
    wants: npt.NDArray[np.bool_]

    def segments(self, most: int) -> npt.NDArray[np.int64]:
        """The number of segments after which each puzzle halts, at most `most`, int64 [B]."""
        wants = self.wants[:most]
        return np.where(wants.any(axis=0), wants.argmax(axis=0) + 1, len(wants)).astype(np.int64)

    def after(self, segments: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The answers [B, cells] after the given number of segments of each puzzle [B]."""
        return np.asarray(self.tokens[segments - 1, np.arange(len(segments))])


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run in evaluation mode.

    Attributes:
        task: task of the run, with the average of parameters if there is one.
        model: the model, with the parameters of the checkpoint.
        config: config of the run.
        step: number of optimizer steps before the checkpoint.
        kind: kind of the puzzles.
        device: device of the model.
        is_other_data: whether the puzzles differ from those that the run was trained on.
    """

    task: Hrm
    model: ReasoningModel
    config: HrmConfig
    step: int
    kind: Kind
    device: torch.device
    is_other_data: bool

    @property
    def warnings(self) -> list[str]:
        """Warnings that belong to all scores."""
        if not self.is_other_data:
            return []
        return ["warning: the puzzles are not those that the run was trained on"]

    def puzzles(self, split: str) -> tuple[Tokens, Tokens]:
        """Inputs and labels [N, cells] of a split.

        Raises:
            ConfigError: there is no such split.
            DataError: the dataset is damaged or empty.
        """
        if split not in _SPLITS:
            raise ConfigError(f"--split {split}: must be one of {', '.join(_SPLITS)}")
        dataset = self.task.dataset(split)
        assert dataset is not None
        inputs, labels = dataset.tensors[:2]
        if not len(inputs):
            raise DataError(f"--split {split}: has no puzzles")
        return inputs.numpy(), labels.numpy()

    def identifiers(self, split: str) -> Indices | None:
        """The identifiers of a split's puzzles, int64 [N]; None if the model takes none."""
        return self.task.puzzles[split].example_identifiers if self.config.puzzle_ids else None

    def batches(
        self, inputs: Tokens, segments: int, identifiers: Indices | None = None
    ) -> Iterator[tuple[slice, Answers]]:
        """The answers to puzzles [N, cells], by the batches of an evaluation; see `answers`."""
        size = self.config.eval_batch_size
        for first in range(0, len(inputs), size):
            which = slice(first, min(first + size, len(inputs)))
            known = None if identifiers is None else identifiers[which]
            yield which, self.answers(inputs[which], segments, known)

    def answers(self, inputs: Tokens, segments: int, identifiers: Indices | None = None) -> Answers:
        """The model's answers to puzzles, computed as `lockstep eval` does.

        No puzzle halts early: its answer after a segment does not depend on how many follow.

        Args:
            inputs: tokens [B, cells].
            segments: number of segments, at least 1.
            identifiers: of the puzzles, int64 [B]; None for the blank identifier.
        """
        items = (f"eval_segments={segments}", "early_halting=false")
        solver = Hrm(override(self.config, items))
        solver.average = self.task.average
        tokens = torch.from_numpy(np.asarray(inputs, np.int64)).to(self.device)
        with (
            num_threads(self.config.threads, detect(os.environ)),
            torch.no_grad(),
            autocast(self.config.precision, self.device),
        ):
            solved = solver.solve(self.model, tokens, self._identifiers(identifiers, len(tokens)))
        # Numbered 0 of 1, no segment is the last one, at which every puzzle halts.
        number = torch.zeros(len(tokens), dtype=torch.int64, device=self.device)
        wants = [halts(*q, number, 1, False, early=True).cpu().numpy() for q in solved.halting]
        return Answers(
            np.stack([some.argmax(-1).to(torch.uint8).cpu().numpy() for some in solved.logits]),
            np.stack([q_halt.float().cpu().numpy() for q_halt, _ in solved.halting]),
            np.stack(wants),
        )

    def _identifiers(self, identifiers: Indices | None, count: int) -> Tensor | None:
        """The identifiers [B] that the model takes, blank ones where they are unknown."""
        if not self.config.puzzle_ids:
            return None
        if identifiers is None:
            identifiers = np.full(count, self.task.puzzles["val"].blank)
        return torch.from_numpy(identifiers).to(self.device)


def load_trained(run_dir: Path, which: str) -> TrainedModel:
    """The model of a run's checkpoint.

    Args:
        run_dir: run directory.
        which: `best`, `latest`, or a step's number.

    Raises:
        LockstepError: there is no such run or checkpoint, or it is not of this recipe.
    """
    directory = RunDirectory(run_dir)
    target = directory.identity().target
    if target != "hrm":
        raise ConfigError(f"{run_dir}: is a run of {target or 'a script'}, not of hrm")
    snapshot = find_snapshot(directory.checkpoints, which)
    config = load(HrmConfig, run_dir / "config.yaml")
    # A GPU if there is one, even for a run that was trained elsewhere.
    has_gpu = torch.cuda.is_available() and config.device != "cpu"
    task, device = Hrm(config), torch.device("cuda" if has_gpu else "cpu")
    with kept_generators():
        model = cast(ReasoningModel, build_model(task, config, device))
    check_fits(snapshot, model, str(directory.checkpoints))
    load_model(snapshot, model)
    TaskState(task, task.hooks()).restore(snapshot.task, snapshot.meta.get("task", {}))
    if model.sizes.vocabulary > MOST_TOKENS:
        raise ConfigError(
            f"{run_dir}: its puzzles have {model.sizes.vocabulary} tokens; at most {MOST_TOKENS} "
            "can be shown"
        )
    kind = kind_of(model.sizes.vocabulary, model.sizes.length)
    known = snapshot.meta["sampler"].get("task_digest")
    is_other = known is not None and task.data_digest() != known
    return TrainedModel(task, model.eval(), config, snapshot.step, kind, device, is_other)


_NAMES = (
    (r"^(_orig_mod\.|module\.|model\.|inner\.)*", ""),
    (r"^([HL])_init$", r"initial_\1"),
    (r"^embed_tokens\.embedding_weight$", "tokens.weight"),
    (r"^lm_head\.", "answer."),
    (r"^q_head\.", "halting."),
    (r"^([HL])_level\.layers\.", r"\1.blocks."),
    (r"\.self_attn\.qkv_proj\.", ".mixer.qkv."),
    (r"\.self_attn\.o_proj\.", ".mixer.out."),
    (r"\.mlp\.gate_up_proj\.", ".gated.gate_up."),
    (r"\.mlp\.down_proj\.", ".gated.down."),
)
"""Names of the published code's tensors as patterns, and what they are called here."""
_ROWS = "puzzle_emb.weights"
_HEAD_DIM = 64
_CONFIG = "all_config.yaml"


def read_original(file: ForeignFile) -> Original | None:
    """A checkpoint or a dataset of the published code of the hierarchical model.

    Args:
        file: `step_N`, with `all_config.yaml` beside it, a folder of such, or a dataset's folder.

    Raises:
        DataError: it is damaged, or of a version with another network.
    """
    if file.is_folder and (file.path / "train" / METADATA_FILE).is_file():
        return _of_dataset(file.path)
    file = file.newest(r"step_(\d+)") or file
    names = {_renamed(name): name for name in file.tensors}
    if "H.blocks.0.mixer.qkv.weight" not in names:
        return None
    state = {
        ours: file.tensors[name]
        for ours, name in names.items()
        if not ours.startswith("puzzle_emb.local")
    }
    if "embed_pos.embedding_weight" in state:
        raise DataError(f"{file.path}: has learned positions; this recipe's are rotary")
    known = file.beside(_CONFIG)
    settings = _settings(known.keys if known else {}, state, str(file.path))
    rows = state.pop(_ROWS, None)
    vocabulary = len(state.get("tokens.weight", ()))

    def model(task: Hrm) -> ReasoningModel:
        token, first = torch.zeros(1, 1, dtype=torch.uint8), np.arange(2)
        count = 1 if rows is None else len(rows)
        # Its weights do not depend on the length of puzzles, so these need not be there.
        task.puzzles = {"train": Puzzles(token, token, first, first, vocabulary, first[:1], count)}
        made = task.build_model()
        fill(made, state, str(file.path))
        if rows is not None and task.config.puzzle_ids:
            cast(Any, made.puzzles).weight = rows.float()
        return made

    sizes = f"{settings['num_blocks']} blocks of {settings['dim']} each, {vocabulary} tokens"
    source = _CONFIG if known else "not there: as published"
    lines = [f"H and L: {sizes}; {sum(t.numel() for t in state.values()):,} numbers"]
    lines += [f"{len(rows)} rows of puzzles of {rows.shape[1]}"] if rows is not None else []
    lines.append(f"settings ({source}): {', '.join(f'{k}={v}' for k, v in settings.items())}")
    step = re.fullmatch(r"step_(\d+).*", file.path.name)
    return Original(
        "hrm",
        "checkpoint of the hierarchical reasoning model",
        lines,
        settings,
        model=model,
        step=int(step[1]) if step else 0,
        hints=() if "data_dir" in settings else ["its puzzles: import again with data_dir=FOLDER"],
    )


def _renamed(name: str) -> str:
    """What a tensor of the published code is called here."""
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name


def _of_dataset(folder: Path) -> Original:
    lines = []
    for name, split in read_dataset(folder).items():
        about = split.metadata
        examples = sum(len(one.inputs) for one in split.sets.values())
        lines.append(
            f"{name}: {examples:,} examples of {about.seq_len} tokens (of {about.vocab_size}), "
            f"{about.total_groups:,} groups, {about.num_puzzle_identifiers:,} identifiers"
        )
    hints = ["is read as it is:", f"lockstep train hrm data_dir={folder}"]
    return Original("hrm", "puzzles in the published format", lines, hints=hints)


def _settings(config: Mapping[str, Any], state: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """The recipe's keys for a checkpoint, by its `all_config.yaml` or else as published."""
    dim, arch = state["H.blocks.0.mixer.qkv.weight"].shape[1], config.get("arch") or {}
    blocks = [len({n.split(".")[2] for n in state if n.startswith(f"{m}.blocks.")}) for m in "HL"]
    if blocks[0] != blocks[1]:
        raise DataError(
            f"{where}: H has {blocks[0]} blocks and L {blocks[1]}; both must have equal"
        )
    heads = arch.get("num_heads", dim // _HEAD_DIM)
    segments = arch.get("halt_max_steps", 16)
    found: dict[str, Any] = {
        "model": "hierarchical",
        "dim": dim,
        "num_heads": heads,
        "num_blocks": blocks[0],
        "expansion": arch.get("expansion", 4.0),
        "inner_multiple": 256,
        "high_cycles": arch.get("H_cycles", 2),
        "low_cycles": arch.get("L_cycles", 2),
        "max_segments": segments,
        "eval_segments": segments,
        "explore": arch.get("halt_exploration_prob", 0.1),
        "token_loss": (arch.get("loss") or {}).get("loss_type", "stablemax").split("_")[0],
        "precision": {
            "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[
                arch.get("forward_dtype", "bfloat16")
            ]
        },
        "ema": 0.0,
    }
    if _ROWS in state:
        found |= {"puzzle_ids": True, "puzzle_dim": state[_ROWS].shape[1]}
    for theirs, ours in {
        "global_batch_size": "batch_size", "lr": "lr", "puzzle_emb_lr": "puzzle_lr",
        "puzzle_emb_weight_decay": "puzzle_weight_decay", "seed": "seed", "data_path": "data_dir",
    }.items():  # fmt: skip
        if theirs in config:
            found[ours] = config[theirs]
    if "lr_warmup_steps" in config:
        least, steps = config.get("lr_min_ratio", 1.0), config["lr_warmup_steps"]
        found["schedule"] = {"name": "cosine", "warmup_steps": steps, "min_ratio": least}
    if "weight_decay" in config:
        betas = [config.get("beta1", 0.9), config.get("beta2", 0.95)]
        found["optimizer"] = {"weight_decay": config["weight_decay"], "betas": betas}
    return found
