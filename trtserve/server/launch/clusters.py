"""The kinds of cluster that can start the ranks of a server instead of this machine.

A new one is a module and a line here. The command line declares its options without loading this package, so they are
elsewhere: the options, a line in `OPTIONS` and a flag in `ClusterSpec` (all in `trtserve/specs/cluster.py`), and a
parameter of `trtserve/cli/start.py`. A test fails when one of them is missing.
"""

from typing import Final

from trtserve.server.launch import kubernetes, slurm
from trtserve.server.launch.cluster import Cluster

CLUSTERS: Final[dict[str, Cluster]] = {"slurm": slurm, "kubernetes": kubernetes}
