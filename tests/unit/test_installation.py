"""Finding tritonserver and its Python stub, paths that the stub cannot read, its addresses and shared memory."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtserve.errors import MissingDependencyError, RepositoryError
from trtserve.host.machine import install_command
from trtserve.server.doctor.stub import check_store
from trtserve.server.triton import installation, tritonserver
from trtserve.server.triton.installation import require_stub_path
from trtserve.store import Store


@pytest.fixture
def system_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tritonserver on PATH, and no wheel."""
    root = tmp_path / "triton"
    for folder in ("bin", "backends/python", "backends/tensorrtllm"):
        (root / folder).mkdir(parents=True)
    (root / "bin" / "tritonserver").write_text("#!/bin/sh\n")
    (root / "bin" / "tritonserver").chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return root


def test_a_system_triton_keeps_its_own_backends(system_triton: Path, tmp_path: Path) -> None:
    triton = installation.find_triton(frozenset({"python", "tensorrtllm"}))
    assert triton.executable == system_triton / "bin" / "tritonserver"
    assert installation.prepare_backends(triton, Store(tmp_path / "home")) == system_triton / "backends"


def test_a_missing_backend_is_named(system_triton: Path) -> None:
    with pytest.raises(MissingDependencyError, match=f"{system_triton}.* has no backend onnxruntime"):
        installation.find_triton(frozenset({"python", "onnxruntime"}))


def test_without_any_triton_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(installation, "_SYSTEM_ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError) as caught:
        installation.find_triton()
    assert caught.value.hint is not None
    assert install_command("cpu") in caught.value.hint


def test_the_wheel_gets_a_linked_stub_of_this_python(tmp_path: Path) -> None:
    triton = installation.find_triton()
    folder = installation.prepare_backends(triton, Store(tmp_path))
    stub = folder / "python" / "triton_python_backend_stub"
    assert stub.is_symlink()
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(stub.readlink())
    assert {entry.name for entry in (folder / "python").iterdir()} >= {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
    }
    assert installation.prepare_backends(triton, Store(tmp_path)) == folder


def test_threads_prepare_the_same_backends(tmp_path: Path) -> None:
    triton = installation.find_triton()
    together = threading.Barrier(8)

    def prepare(store: Store) -> Path:
        together.wait(timeout=60)
        return installation.prepare_backends(triton, store)

    with ThreadPoolExecutor(8) as pool:
        for attempt in range(20):
            store = Store(tmp_path / str(attempt))
            (folder,) = set(pool.map(prepare, [store] * 8))
            assert [entry.name for entry in (folder / "python").iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["a b", "hö", "it's", "$HOME", "a;b", "(1)", "a&b", "a*"])
def test_paths_that_the_stub_cannot_read_are_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "repository"
    with pytest.raises(RepositoryError, match="cannot start models from") as caught:
        require_stub_path(folder)
    assert "TRTSERVE_HOME" in str(caught.value.hint)
    finding = check_store(Store(tmp_path / name))
    assert finding.state == "failed"
    assert "TRTSERVE_HOME" in finding.fix


@pytest.mark.parametrize(
    "path", ["/home/me/.cache/trtserve/repositories/demo-58052adeecad", "/a+b/c,d/e:f@g=h%i_j-k.l"]
)
def test_usual_paths_are_accepted(path: str) -> None:
    require_stub_path(Path(path))


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
