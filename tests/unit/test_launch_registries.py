"""A launch mode or a kind of cluster that is only half registered fails here."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

from trtserve.cli.start import start
from trtserve.server import launch
from trtserve.server.launch import CLUSTERS, cluster
from trtserve.server.launch.modes import MODES, LaunchMode
from trtserve.specs.cluster import OPTIONS, ClusterSpec

FOLDER = Path(launch.__file__).parent


def test_every_mode_is_registered() -> None:
    assert [type(mode) for mode in MODES.values()] == LaunchMode.__subclasses__()


def test_every_cluster_has_a_module_options_a_flag_and_a_parameter_of_start() -> None:
    planning = {path.stem for path in FOLDER.glob("*.py") if "\ndef plan_job(" in path.read_text(encoding="utf-8")}
    flags = {field.name for field in fields(ClusterSpec) if field.default is False}
    parameters = inspect.signature(start).parameters
    assert set(CLUSTERS) == planning == set(OPTIONS) == flags
    assert [name for name in parameters if name in OPTIONS] == list(OPTIONS)
    for each in CLUSTERS.values():
        assert not _missing(each, cluster.Cluster)


def _missing(module: object, protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_") and not hasattr(module, name)]
