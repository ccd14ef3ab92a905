"""`lockstep kubernetes`: write the manifests of a training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from lockstep.cli.clusters.slurm import config_of, write_script
from lockstep.config.files import read_text
from lockstep.errors import LaunchError
from lockstep.launching.kubernetes import CODE, Pods, check, manifests
from lockstep.launching.targets import absolute, is_script

FIRST_COMMENT = "# Written by `lockstep kubernetes`"
_START_S = 600.0
"""How long ranks wait for each other: nodes may have to be added, and images to be fetched."""


def kubernetes(target: str, overrides: Sequence[str], pods: Pods, output: Path | None) -> None:
    """Write the manifests that train a target on Kubernetes.

    Args:
        target: recipe, or `file.py:Task`; the file travels in a ConfigMap if it is here, else it
            is a path in the image.
        overrides: `key=value` items for the config.
        pods: what pods are made of; a name that is empty is made of the target.
        output: path of the file to write; by default named after the training.

    Raises:
        LockstepError: something given does not work, and nothing was written.
    """
    path, _, task = target.partition(":")
    is_file, is_here = ".py" in target, Path(path).is_file()
    words = list(overrides)
    if not any(word.startswith("start_timeout_s=") for word in words):
        words.append(f"start_timeout_s={_START_S:g}")
    target_in_pod = target
    if not is_file or is_here:
        where = absolute(target)
        if is_script(where):
            raise LaunchError(
                f"{target}: is a script; name its Task, {target}:NAME, which the pods train"
            )
        config_of(where, words, None)  # refuses keys and values here rather than in eight pods
    if is_here:
        pods = replace(pods, file=(Path(path).name, read_text(Path(path))))
        target_in_pod = f"{CODE}/{Path(path).name}:{task}"
    if not pods.name:
        plain = re.sub(r"[^a-z0-9]+", "-", (task or Path(path).stem).lower()).strip("-")
        pods = replace(pods, name=plain or "training")
    check(pods)
    _write(output or Path(f"{pods.name}.yaml"), pods, manifests(pods, target_in_pod, words))


def _write(path: Path, pods: Pods, objects: Sequence[object]) -> None:
    text = yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
    begin = f"{FIRST_COMMENT}: kubectl apply -f {path.name}\n"
    write_script(path, begin + text, FIRST_COMMENT)
    print(f"wrote {path}: kubectl apply -f {path}", flush=True)
    if pods.file is not None:
        print(f"{pods.file[0]} travels with it, in a ConfigMap", flush=True)
    if pods.claim is None:
        print(
            "no --claim: checkpoints are on each pod's own disk and are lost with it; name a "
            "PersistentVolumeClaim (ReadWriteMany on several nodes) to go on after a loss",
            flush=True,
        )
