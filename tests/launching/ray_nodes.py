"""A Ray cluster on this host, in a process of its own: nodes come and go as it is told."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

from tests.conftest import environment

ROOT = Path(__file__).parents[2]


class Nodes:
    """The nodes of a cluster; the first is its head.

    Args:
        num_nodes: how many there are at first, with a CPU each.
    """

    def __init__(self, num_nodes):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, env=environment(cold=True), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.address = json.loads(self._process.stdout.readline())
        for _ in range(num_nodes - 1):
            self.do("add")

    def do(self, what):
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.communicate(timeout=60)


def _serve():
    warnings.simplefilter("ignore")
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    print(json.dumps(cluster.address), flush=True)
    nodes = []
    for line in sys.stdin:
        found = None
        if line == "add\n":
            nodes.append(cluster.add_node(num_cpus=1))
        elif line == "remove\n":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:  # what others have left behind
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            groups = [group["state"] for group in placement_group_table().values()]
            free, there = (
                r.get("CPU", 0) for r in (ray.available_resources(), ray.cluster_resources())
            )
            found = {
                "groups": groups.count("CREATED") + groups.count("PENDING"),
                "busy": there - free,
            }
            ray.shutdown()
        print(json.dumps(found), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _serve()
