"""`start --cpus` and `--numa`: which processors a server may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtserve.errors import MachineError, UsageError
from trtserve.host import machine
from trtserve.host.machine import parse_cpus, pin
from trtserve.specs import ServerSpec


def test_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpus("0-3,8, 10-10") == {0, 1, 2, 3, 8, 10}


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1,,2", "-1", "99999", "0-99999999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="processor"):
        ServerSpec(cpus=text)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the NUMA nodes whose memory was chosen; node 1 has the first processor of this process."""
    first = min(os.sched_getaffinity(0))
    for node, cpus in ((0, "4000-4001"), (1, f"{first}")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(machine, "NODES", tmp_path)
    bound: list[int] = []
    monkeypatch.setattr(machine, "_bind_memory", bound.append)
    return bound


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _process, cpus: calls.append(set(cpus)))
    return calls


def test_a_node_means_its_processors_and_memory(nodes: list[int], affinity: list[set[int]]) -> None:
    pin((), 1)
    assert (nodes, affinity) == ([1], [{min(os.sched_getaffinity(0))}])


def test_what_the_machine_lacks_is_named(nodes: list[int], affinity: list[set[int]]) -> None:
    with pytest.raises(MachineError, match="no NUMA node 7"):
        pin((), 7)
    with pytest.raises(MachineError, match="cannot be used"):
        pin({4000}, None)
    with pytest.raises(MachineError, match="of both --cpus and --numa"):
        pin({min(os.sched_getaffinity(0))}, 0)
    assert (nodes, affinity) == ([], [])


def test_a_container_has_options_of_its_own() -> None:
    with pytest.raises(UsageError, match="not those of a container") as caught:
        ServerSpec(cpus="0", container="25.12")
    assert "--cpuset-cpus" in str(caught.value.hint)
