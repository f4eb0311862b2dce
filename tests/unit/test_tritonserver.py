"""The command line of tritonserver, its addresses and its shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtserve.server.triton import tritonserver


def test_prefixes_differ_between_servers_of_one_name() -> None:
    first, second = tritonserver.unique_prefix("demo"), tritonserver.unique_prefix("demo")
    assert first != second
    assert first.startswith("trtserve_demo_")


def test_only_the_servers_own_regions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "SHARED_MEMORY", tmp_path)
    for name in ("trtserve_a_1_x", "trtserve_b_2_x", "other"):
        (tmp_path / name).touch()
    tritonserver.sweep_shared_memory("trtserve_a_1_")
    tritonserver.sweep_shared_memory("")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "trtserve_b_2_x"]


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.1", "10.0.0.1")])
def test_address_that_clients_use(host: str, reached: str) -> None:
    assert tritonserver.client_host(host) == reached
