"""`lockstep kubernetes`: an Indexed Job whose pods are the ranks, and the Service they meet by.

A pod that ends is started again by the Job, until its index has failed too often. A rank that is
lost ends the others, and all go on from the newest checkpoint. No operator is needed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from lockstep.cli.clusters.slurm import config_of, write_script
from lockstep.config.files import read_text
from lockstep.errors import LaunchError, LockstepError, RankFailure
from lockstep.launching.remote_directory import url_of
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
    _check(pods)
    _write(output or Path(f"{pods.name}.yaml"), pods, _manifests(pods, target_in_pod, words))


def _write(path: Path, pods: Pods, objects: Sequence[object]) -> None:
    text = yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
    begin = f"{FIRST_COMMENT}: kubectl apply -f {path.name}\n"
    write_script(path, begin + text, FIRST_COMMENT)
    print(f"wrote {path}: kubectl apply -f {path}", flush=True)
    if pods.file is not None:
        print(f"{pods.file[0]} travels with it, in a ConfigMap", flush=True)
    if pods.claim is None and pods.url is None:
        print(
            "no --claim and no --run-dir: checkpoints are on each pod's own disk and are lost with "
            "it; name a PersistentVolumeClaim (ReadWriteMany on several nodes), or a URL, to go on "
            "after a loss",
            flush=True,
        )


_PORT = 29_500
"""The port that ranks meet at, in the pod of rank 0."""
RUNS, CODE = "/runs", "/lockstep"
"""Where the volume with run directories is, and where files are that travel with the manifest."""
_LABEL = "lockstep.train"
"""Label of all that belongs to a training, whose value is its name."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_LETTERS = 52
"""Of a name: an index and a hyphen are added, and labels have 63 letters at most."""
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_MOST_FILE = 900_000
"""Bytes of a file that fits into a ConfigMap, which may have 1 MiB."""
_STOPPED = (128 + signal.SIGHUP, 128 + signal.SIGTERM)
"""Exit codes of ranks that were asked to stop, and go on later."""
_GRACE_S = 10
"""Seconds that are left for writing the checkpoint of the step that is under way."""


@dataclass(frozen=True)
class Pods:
    """What each pod is made of, and where.

    Attributes:
        name: name of the training; a DNS label.
        image: container image that has Lockstep in it.
        ranks: number of pods, each with one rank.
        namespace: where they run; None for the one that `kubectl` is set to.
        cpus: cores of a pod.
        memory: memory of a pod, such as "4Gi"; None asks for none.
        gpus: GPUs of a pod.
        claim: name of a PersistentVolumeClaim that all pods can write to; None for none, and then
            checkpoints are lost with the pods.
        restarts: how often each rank may fail.
        grace_s: seconds from SIGTERM to SIGKILL.
        url: run directory in object storage, such as "s3://bucket/run"; None for one on the volume.
        secret: name of a Secret that becomes environment variables, such as keys for the storage.
        file: name and text of a file that travels in a ConfigMap; None if the image has all.
    """

    name: str
    image: str
    ranks: int
    namespace: str | None = None
    cpus: int = 1
    memory: str | None = None
    gpus: int = 0
    claim: str | None = None
    restarts: int = 10
    grace_s: int = 60
    url: str | None = None
    secret: str | None = None
    file: tuple[str, str] | None = None


def _check(pods: Pods) -> None:
    """Refuse what the API server would not take, or what cannot train.

    Raises:
        LaunchError: naming the option.
    """
    if not _NAME.fullmatch(pods.name) or len(pods.name) > _MOST_LETTERS:
        raise LaunchError(
            f"--name {pods.name!r}: must be at most {_MOST_LETTERS} lower-case letters, digits and "
            "hyphens, and begin with a letter"
        )
    if pods.url is not None and (url_of(pods.url) is None or pods.claim is not None):
        raise LaunchError(
            f"--run-dir {pods.url}: must be a URL, such as s3://bucket/run, and comes without "
            "--claim; run directories on a volume are /runs/NAME"
        )
    names = {"--namespace": pods.namespace, "--claim": pods.claim, "--secret": pods.secret}
    for option, value in names.items():
        if value is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", value):
            raise LaunchError(
                f"{option} {value!r}: must be lower-case letters, digits, hyphens and dots"
            )
    if not pods.image.strip() or re.search(r"\s", pods.image):
        raise LaunchError(f"--image {pods.image!r}: must be an image, such as registry/lockstep:1")
    if pods.memory is not None and not _QUANTITY.fullmatch(pods.memory):
        raise LaunchError(f"--memory {pods.memory!r}: must be a quantity, such as 4Gi or 500M")
    if pods.grace_s < _GRACE_S:
        raise LaunchError(
            f"--grace {pods.grace_s}: must be at least {_GRACE_S} seconds, in which the step that "
            "is under way ends and its checkpoint is written"
        )
    if pods.file is not None and len(pods.file[1].encode()) > _MOST_FILE:
        raise LaunchError(
            f"{pods.file[0]}: has {len(pods.file[1].encode()):,} bytes, and a ConfigMap holds "
            f"{_MOST_FILE:,}; put it into the image, and give its path there"
        )


def _manifests(pods: Pods, target: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """All objects of a training, in the order in which they are to be created.

    Args:
        pods: what pods are made of; checked.
        target: what to train: a recipe, or a path in the container, `file.py:Task`.
        overrides: `key=value` items for the config.
    """
    files = [] if pods.file is None else [_config_map(pods, *pods.file)]
    return [*files, _service(pods), _job(pods, target, overrides)]


def _about(pods: Pods) -> dict[str, Any]:
    labels = {_LABEL: pods.name}
    about: dict[str, Any] = {"name": pods.name, "labels": labels}
    return about if pods.namespace is None else about | {"namespace": pods.namespace}


def _config_map(pods: Pods, name: str, text: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _about(pods), "data": {name: text}}


def _service(pods: Pods) -> dict[str, Any]:
    """Gives each pod a host name, also before it is ready: ranks meet before they train."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: pods.name},
        "ports": [{"name": "ranks", "port": _PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _about(pods), "spec": spec}


def _job(pods: Pods, target: str, overrides: Sequence[str]) -> dict[str, Any]:
    rules = [
        # What is wrong with the input stays wrong.
        {
            "action": "FailJob",
            "onExitCodes": {"operator": "In", "values": [LockstepError.exit_code]},
        },
        # The rank that was lost counts, not those that it has ended, nor ranks that were stopped.
        {
            "action": "Ignore",
            "onExitCodes": {"operator": "In", "values": [RankFailure.exit_code, *_STOPPED]},
        },
        # A node that is drained or lost, or a pod that is preempted, is nobody's failure.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": pods.ranks,
        "parallelism": pods.ranks,
        "backoffLimitPerIndex": pods.restarts,
        "maxFailedIndexes": 0,  # a rank that is given up leaves the others waiting for it
        "podReplacementPolicy": "Failed",  # two of one index would both call themselves that rank
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": {_LABEL: pods.name}},
            "spec": _pod(pods, target, overrides),
        },
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _about(pods), "spec": spec}


def _pod(pods: Pods, target: str, overrides: Sequence[str]) -> dict[str, Any]:
    run_dir = pods.url or str(PurePosixPath(RUNS) / pods.name)
    command = ["lockstep", "train", target, "--run-dir", run_dir, "--resume", *overrides]
    storage: dict[str, Any] = {"emptyDir": {}}
    if pods.claim is not None:
        storage = {"persistentVolumeClaim": {"claimName": pods.claim}}
    volumes = [{"name": "runs"} | storage]
    mounts = [{"name": "runs", "mountPath": RUNS}]
    if pods.file is not None:
        volumes.append({"name": "code", "configMap": {"name": pods.name}})
        mounts.append({"name": "code", "mountPath": CODE})
    needs = {"cpu": str(pods.cpus)}
    if pods.memory is not None:
        needs["memory"] = pods.memory
    if pods.gpus:
        needs["nvidia.com/gpu"] = str(pods.gpus)
    container: dict[str, Any] = {
        "name": "rank",
        "image": pods.image,
        "command": command,
        "env": [
            {"name": "WORLD_SIZE", "value": str(pods.ranks)},
            {"name": "MASTER_ADDR", "value": f"{pods.name}-0.{pods.name}"},
            {"name": "MASTER_PORT", "value": str(_PORT)},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"name": "ranks", "containerPort": _PORT}],
        "resources": {"requests": needs, "limits": dict(needs)},
        "volumeMounts": mounts,
    }
    if pods.url is not None:  # its copy
        container["env"].append({"name": "XDG_CACHE_HOME", "value": f"{RUNS}/.cache"})
    if pods.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": pods.secret}}]
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace_s,
        "containers": [container],
        "volumes": volumes,
    }
