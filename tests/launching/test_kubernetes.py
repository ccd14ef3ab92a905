"""Manifests for Kubernetes, and the place of a pod among the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import target

from lockstep.errors import EnvironError
from lockstep.launching.rank.environment import detect

VERSIONS = ("1.29", "1.31", "1.33", kubernetes_validate.latest_version())
IMAGE = ("--image", "registry/lockstep:1")


def written(folder: Path, name: str) -> dict[str, Any]:
    """The objects of a file by kind, each of which any version takes."""
    objects = list(yaml.safe_load_all((folder / name).read_text()))
    for version in VERSIONS:
        for one in objects:
            kubernetes_validate.validate(one, version, strict=True)
    return {one["kind"]: one for one in objects}


def test_a_recipe_is_an_indexed_job_and_a_headless_service(here: Any, tmp_path: Path) -> None:
    made = here(
        "kubernetes", "digits", "-n", "8", *IMAGE, "--claim", "runs", "--memory", "4Gi",
        "--gpus", "1", "--namespace", "science", "--grace", "90", "steps=20",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "kubectl apply -f digits.yaml" in made.stdout
    objects = written(tmp_path, "digits.yaml")
    assert [*objects] == ["Service", "Job"]
    service, job = objects["Service"]["spec"], objects["Job"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 8, 8)
    pod = job["template"]["spec"]
    assert service["selector"] == job["template"]["metadata"]["labels"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 90)
    (rank,) = pod["containers"]
    assert rank["command"] == [
        "lockstep", "train", "digits", "--run-dir", "/runs/digits", "--resume", "steps=20",
        "start_timeout_s=600",
    ]  # fmt: skip
    env = {one["name"]: one["value"] for one in rank["env"]}
    assert "XDG_CACHE_HOME" not in env  # caches of the image are found
    # Pods of an Indexed Job are called NAME-INDEX, in the domain of the Service.
    assert env["MASTER_ADDR"] == f"digits-0.{pod['subdomain']}"
    assert rank["resources"]["limits"] == {"cpu": "1", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    detected = detect({**env, "JOB_COMPLETION_INDEX": "3"})
    assert (detected.rank, detected.world_size, detected.local_rank) == (3, 8, 0)
    assert (detected.master_addr, detected.master_port) == ("digits-0.digits", 29_500)


def test_a_run_directory_in_object_storage_needs_no_volume(here: Any, tmp_path: Path) -> None:
    made = here(
        "kubernetes", "digits", *IMAGE, "--run-dir", "s3://bucket/run", "--secret", "keys"
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "no --claim" not in made.stdout
    pod = written(tmp_path, "digits.yaml")["Job"]["spec"]["template"]["spec"]
    (rank,) = pod["containers"]
    assert rank["command"][3:5] == ["--run-dir", "s3://bucket/run"]
    assert rank["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["volumes"] == [{"name": "runs", "emptyDir": {}}]


def test_a_file_travels_in_a_config_map(here: Any, tmp_path: Path) -> None:
    made = here("kubernetes", target(), *IMAGE, "--name", "mine", "steps=2", "start_timeout_s=90")
    assert made.returncode == 0, made.stderr
    assert "tasks.py travels with it" in made.stdout
    assert "no --claim and no --run-dir: checkpoints are on each pod's own disk" in made.stdout
    objects = written(tmp_path, "mine.yaml")
    assert objects["ConfigMap"]["data"] == {
        "tasks.py": Path(target().partition(":")[0]).read_text()
    }
    (rank,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    assert rank["command"][2] == "/lockstep/tasks.py:Everything"
    assert rank["command"][-1] == "start_timeout_s=90"
    again = here("kubernetes", target(), *IMAGE, "--name", "mine")
    assert again.returncode == 0, again.stderr
    (tmp_path / "mine.yaml").write_text("kind: Pod")
    kept = here("kubernetes", target(), *IMAGE, "--name", "mine")
    assert kept.returncode == 2
    assert "is there already, and was not written by this command" in kept.stderr
    assert (tmp_path / "mine.yaml").read_text() == "kind: Pod"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["digits"], "--image '': must be an image"),
        (["digits", *IMAGE, "--name", "My_Run"], "--name 'My_Run': must be at most 52 lower-case"),
        (["digits", *IMAGE, "--namespace", "a b"], "--namespace 'a b': must be lower-case"),
        (["digits", *IMAGE, "--claim", "../x"], "--claim '../x': must be lower-case"),
        (["digits", *IMAGE, "--run-dir", "runs/a"], "--run-dir runs/a: must be a URL"),
        (["digits", *IMAGE, "--memory", "4 GB"], "--memory '4 GB': must be a quantity"),
        (["digits", *IMAGE, "--grace", "3"], "--grace 3: must be at least 10 seconds"),
        (["digits", *IMAGE, "stepz=3"], "stepz"),
        (["nothing", *IMAGE], "nothing"),
        (["script.py", *IMAGE], "script.py: is a script; name its Task, script.py:NAME"),
    ],
)
def test_what_cannot_be_is_one_message(
    here: Any, tmp_path: Path, argv: list[str], said: str
) -> None:
    (tmp_path / "script.py").write_text("import lockstep\n")
    ended = here("kubernetes", *argv)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert not list(tmp_path.glob("*.yaml"))


def test_a_pod_knows_its_rank_by_its_index() -> None:
    alone = {"JOB_COMPLETION_INDEX": "3"}
    assert detect(alone).world_size == 1  # a Job of independent runs
    assert detect({**alone, "WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "0"}).world_size == 1
    there = {"WORLD_SIZE": "4", "MASTER_ADDR": "a-0.a", "MASTER_PORT": "29500"}
    assert detect({**alone, **there}).rank == 3
    assert detect({**alone, **there, "RANK": "1"}).rank == 1  # set by hand
    for index, said in (("4", "must be less than WORLD_SIZE=4"), ("x", "is not a whole number")):
        with pytest.raises(EnvironError, match=f"JOB_COMPLETION_INDEX={index} {said}"):
            detect({**there, "JOB_COMPLETION_INDEX": index})
