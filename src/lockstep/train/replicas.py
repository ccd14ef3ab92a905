"""Making sure that what must be the same on all ranks is."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lockstep.comm.transport import Transport
from lockstep.errors import DivergenceError, TaskError
from lockstep.train.buffers import changed_by
from lockstep.train.compute import Compute
from lockstep.train.flat import model_digest, tensor_digest


def check_same(transport: Transport, facts: dict[str, Any]) -> None:
    """Compare JSON-able facts (config, number of samples) of all ranks.

    Raises:
        TaskError: on every rank, naming the first that differs.
    """
    everyone = transport.gather_json(facts)
    for name, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != value:
                raise TaskError(
                    f"{name}: is {value!r} on rank 0 but {theirs.get(name)!r} on rank {rank}; "
                    "every rank must run the same script with the same config and data"
                )


def check_start(transport: Transport, model: nn.Module) -> None:
    """Compare all ranks' freshly built models.

    Raises:
        TaskError: on every rank, naming the first tensor and the ranks that differ.
    """
    found = _first_difference(transport, model.state_dict())
    if found:
        raise TaskError(
            f"build_model: {found} right after it was built; draw all initial values from torch's, "
            "numpy's or Python's global random state (it is seeded alike on all ranks), never from "
            "a rank, the time or the system"
        )


def check_replicas(transport: Transport, model: nn.Module, step: int) -> None:
    """Compare all ranks' parameters and buffers after a step.

    Raises:
        DivergenceError: on every rank, naming the first tensor and the ranks that differ.
    """
    digests = transport.gather_json(model_digest(model))
    if all(d == digests[0] for d in digests):
        return
    found = _first_difference(transport, model.state_dict())
    raise DivergenceError(
        f"step {step}: {found}, though all ranks must hold the "
        "same bits: memory or hardware may be failing, or the task changed parameters outside the "
        "optimizer; the run stops, earlier checkpoints are untouched"
    )


def batch_digest(batch: Any) -> str:
    """SHA-256 of all tensors of a batch: nested lists, tuples and dicts of them."""
    sha = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            sha.update(tensor_digest("", leaf))
    return sha.hexdigest()


def optimizer_facts(optimizer: Optimizer) -> str:
    """The class of an optimizer, its groups' settings and the shapes of their parameters."""
    groups = [
        {key: _plain(value) for key, value in group.items()} for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {json.dumps(groups)}"


def _plain(value: Any) -> Any:
    """A setting as JSON; of what is none only the type, since texts may hold addresses."""
    if isinstance(value, list) and value and isinstance(value[0], nn.Parameter):
        return [list(p.shape) for p in value]
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    known = value is None or isinstance(value, (bool, int, float, str))
    return value if known else type(value).__name__


def gradient_digest(model: nn.Module, compute: Compute, batch: Any) -> str:
    """SHA-256 of the loss and the gradients of a microbatch, by which tasks are told apart.

    No gradient and no changed buffer is left behind.
    """
    sha = hashlib.sha256()
    parameters = dict(model.named_parameters())

    def both_ways() -> None:
        loss = compute.forward(0, 0, batch)
        loss.sum.backward()  # type: ignore[no-untyped-call]
        sha.update(json.dumps(compute.scalars(loss)).encode())

    try:
        changed_by(model, both_ways)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                sha.update(tensor_digest(name, parameter.grad))
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    return sha.hexdigest()


def _first_difference(transport: Transport, tensors: dict[str, Tensor]) -> str:
    """Names the first tensor that is not the same everywhere, and the ranks in the minority."""
    mine = {name: tensor_digest(name, t).hex() for name, t in tensors.items()}
    everyone = transport.gather_json(mine)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    for name in names:
        digests = [theirs.get(name) for theirs in everyone]
        usual, _ = Counter(digests).most_common(1)[0]
        odd = [str(rank) for rank, digest in enumerate(digests) if digest != usual]
        if odd:
            ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(odd)}"
            return f"{name} on {ranks} differs from the other ranks'"
    return ""
