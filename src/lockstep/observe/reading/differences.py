"""Where runs differ: in their configs, curves and checkpoints; as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from lockstep.engine.checkpoint.listing import SUFFIX, files_with, folders, step_of
from lockstep.errors import CheckpointError
from lockstep.observe import text
from lockstep.observe.reading.history import History
from lockstep.observe.reading.listing import Summary
from lockstep.observe.step_costs import Measured

if TYPE_CHECKING:
    from torch import Tensor


def config_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys whose values differ between configs, with these values."""
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


_ORDER = tuple(f"{n}{SUFFIX}" for n in ("model", "buffers", "task", "carry", "optimizer"))
"""Files of a checkpoint in the order in which they are compared, before tables."""
_OF_SPEED = ("samples_per_s", "compute_efficiency")
"""Curves that differ between any two runs."""


@dataclass(frozen=True)
class CurveParting:
    """The first step at which two curves differ.

    Attributes:
        name: name of the curve.
        step: the step.
        values: the values of both curves.
        last_equal: the last step before it at which all curves agree; None if there is none.
    """

    name: str
    step: int
    values: tuple[float, float]
    last_equal: int | None


@dataclass(frozen=True)
class TensorParting:
    """The first tensor that differs in the first pair of checkpoints that do.

    Attributes:
        step: step of both checkpoints.
        file: file of the checkpoint with the tensor.
        name: name of the tensor.
        count: number of its elements that differ; 0 if shape or dtype do.
        size: number of its elements.
        place: index of the first element that differs.
        values: both values there, or both dtypes and shapes if these differ.
        others: number of other tensors of that step that differ.
        last_equal: step of the last pair of checkpoints before that are equal; None if there is
            none.
    """

    step: int
    file: str
    name: str
    count: int
    size: int
    place: tuple[int, ...]
    values: tuple[str, str]
    others: int
    last_equal: int | None


@dataclass(frozen=True)
class Partings:
    """Where two runs part.

    Attributes:
        curves: where their curves part; None if they do not.
        num_steps: number of steps whose values were compared.
        tensors: where their checkpoints part; None if they do not.
        num_checkpoints: number of pairs of checkpoints that were compared.
    """

    curves: CurveParting | None
    num_steps: int
    tensors: TensorParting | None
    num_checkpoints: int


def partings(histories: tuple[History, History], runs: tuple[Path, Path]) -> Partings:
    """Where two runs part.

    Args:
        histories: events of both runs.
        runs: their run directories.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    one, other = (run / "checkpoints" for run in runs)
    return Partings(*part_of_curves(*histories), *part_of_tensors(one, other))


def part_of_curves(one: History, other: History) -> tuple[CurveParting | None, int]:
    """The first step at which a curve of both runs differs.

    Speed is not compared, nor are means over different steps, such as those that a run reports when
    it is stopped. Values are compared to the bit; NaN equals NaN.

    Returns:
        Where they part, None if they do not; and the number of steps that were compared.
    """
    names = [n for n in one.curves if n in other.curves and n not in _OF_SPEED]
    partings: list[tuple[int, str, tuple[float, float]]] = []
    common: set[int] = set()
    for name in names:
        ours, theirs = one.curves[name], other.curves[name]
        for step, value, origin in zip(ours.steps, ours.values, ours.origins, strict=True):
            there = theirs.at(step, origin)
            if there is None:
                continue
            common.add(step)
            if repr(value) != repr(there):
                partings.append((step, name, (value, there)))
                break
    if not partings:
        return None, len(common)
    # A step's loss comes before its gradient.
    step, name, values = min(partings, key=lambda one: (one[0], not one[1].endswith("/loss")))
    before = [known for known in common if known < step]
    return CurveParting(name, step, values, max(before, default=None)), len(common)


def part_of_tensors(one: Path, other: Path) -> tuple[TensorParting | None, int]:
    """The first tensor that differs in the checkpoints of two runs.

    Args:
        one: checkpoints folder of a run.
        other: checkpoints folder of another run.

    Returns:
        The tensor, None if all are equal; and the number of pairs of checkpoints compared.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    names_of_other = {folder.name for folder in folders(other)}
    last_equal: int | None = None
    common = [folder for folder in reversed(folders(one)) if folder.name in names_of_other]
    for number, folder in enumerate(common):
        found = _part_of_step(folder, other / folder.name, last_equal)
        if found is not None:
            return found, number + 1
        last_equal = step_of(folder)
    return None, len(common)


def _part_of_step(one: Path, other: Path, last_equal: int | None) -> TensorParting | None:
    # PyTorch is imported in a second, and the monitor and most reports compare no tensors.
    from lockstep.engine.checkpoint.format import TABLE, read_manifest
    from lockstep.engine.passes.buffers import same_bits

    pair = [read_manifest(folder)["files"] for folder in (one, other)]
    first: TensorParting | None = None
    others = 0
    for file in _ORDER + tuple(sorted(n for n in pair[0] | pair[1] if n.startswith(TABLE))):
        here, there = (files_with(file, known) for known in pair)
        if [pair[0][n] for n in here] == [pair[1][n] for n in there]:
            continue
        for name, tensors in _pairs([one / n for n in here], [other / n for n in there]):
            mine, theirs = tensors
            if mine is not None and theirs is not None and same_bits(mine, theirs):
                continue
            if first is None:
                first = _described(step_of(one), file, name, tensors, last_equal)
            else:
                others += 1
    return replace(first, others=others) if first is not None else None


def _pairs(
    one: Sequence[Path], other: Sequence[Path]
) -> Iterator[tuple[str, tuple[Tensor | None, Tensor | None]]]:
    """The tensors of some files of two checkpoints by name; None where they have none.

    One at a time, since both models may not fit into memory.
    """
    opened: list[dict[str, Any]] = []
    for paths in (one, other):
        by_name: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from None
            by_name |= dict.fromkeys(file.keys(), file)
        opened.append(by_name)
    for name in dict.fromkeys([*opened[0], *opened[1]]):
        mine, theirs = (there[name].get_tensor(name) if name in there else None for there in opened)
        yield name, (mine, theirs)


def _described(
    step: int,
    file: str,
    name: str,
    pair: tuple[Tensor | None, Tensor | None],
    last_equal: int | None,
) -> TensorParting:
    import torch

    one, other = pair
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        kinds = tuple("none" if t is None else f"{t.dtype} {list(t.shape)}" for t in pair)
        return TensorParting(step, file, name, 0, 0, (), (kinds[0], kinds[1]), 0, last_equal)
    width = one.element_size()
    bits = [t.contiguous().reshape(-1).view(torch.uint8).view(-1, width) for t in (one, other)]
    where = (bits[0] != bits[1]).any(1).nonzero()[:, 0]
    first = int(where[0])
    place = tuple(int(i) for i in torch.unravel_index(where[0], one.shape)) if one.dim() else ()
    values = (repr(one.reshape(-1)[first].item()), repr(other.reshape(-1)[first].item()))
    return TensorParting(step, file, name, len(where), one.numel(), place, values, 0, last_equal)


def letter(number: int) -> str:
    """The name of a run in a comparison: A, B and so on."""
    return chr(ord("A") + number) if number < 26 else f"run {number + 1}"


def cost_of_run(summary: Summary, history: History) -> Measured:
    """What the steps of a run cost, by its result or else by its events so far."""
    return summary.cost or history.cost


def costs_of_runs(costs: Sequence[Measured]) -> Iterator[list[str]]:
    """Rows of a comparison: names, and for each run the cost of its steps and the prediction.

    A run of which nothing is known has ""; if all are so, there are no rows.
    """
    measured = [text.brief(cost.measured.step_s) if cost.measured else "" for cost in costs]
    predicted = [
        f"{text.brief(cost.predicted.step_s)} ({cost.by})" if cost.predicted else ""
        for cost in costs
    ]
    if any(measured):
        yield ["time of a step", *measured]
        yield ["predicted", *predicted]


def lines_of_partings(pair: str, found: Partings) -> Iterator[str]:
    """Where two runs part, as text.

    Args:
        pair: names of the runs.
        found: where they part.
    """
    curves, tensors = found.curves, found.tensors
    if curves is None:
        steps = text.count(found.num_steps, "step")
        yield f"{pair}: no curve differs in the {steps} at which both have values of the same steps"
    else:
        one, other = curves.values
        known = "" if curves.last_equal is None else f"; equal up to step {curves.last_equal:,}"
        yield f"{pair} part at step {curves.step:,}: {curves.name} {one!r}, {other!r}{known}"
    if tensors is None:
        pairs = text.count(found.num_checkpoints, "checkpoint")
        yield f"{pair}: none of the {pairs} that both have differs"
        return
    known = "" if tensors.last_equal is None else f"; equal in that of step {tensors.last_equal:,}"
    yield f"{pair} differ in the checkpoint of step {tensors.step:,}{known}"
    values = f"{tensors.values[0]}, {tensors.values[1]}"
    if tensors.count:
        place = f"[{', '.join(map(str, tensors.place))}]"
        yield (
            f"  first tensor {tensors.name} ({tensors.file}): {tensors.count:,} of "
            f"{text.count(tensors.size, 'element')}, the first at {place}: {values}"
        )
    else:
        yield f"  first tensor {tensors.name} ({tensors.file}): {values}"
    if tensors.others:
        yield f"  and {text.count(tensors.others, 'other tensor')}"
