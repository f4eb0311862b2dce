"""Finding tritonserver, its command line, and what its log says."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtserve.errors import MissingDependencyError
from trtserve.store import Store
from trtserve.triton import server, server_log

ADDRESS = server.Address(host="127.0.0.1", http_port=1, grpc_port=2, metrics_port=3)
LOG = r"""
W1120 12:14:51.292258 7022 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory pool will not be available: CUDA driver version is insufficient for CUDA runtime version"
E1120 12:14:51.292462 7022 server.cc:241] "CudaDriverHelper has not been initialized."
I1120 12:14:51.293426 7022 model_lifecycle.cc:472] "loading: bad:1"
I1120 12:14:51.293460 7022 model_lifecycle.cc:472] "loading: ident:1"
I1120 12:14:51.368941 7022 model_lifecycle.cc:839] "successfully loaded 'ident'"
E1120 12:14:51.634461 7022 model_lifecycle.cc:642] "failed to load 'bad' version 1: Internal: ValueError: \"x\" is odd\n\nAt:\n  /r/bad/1/model.py(3): initialize\n"
+-------+---------+
| Model | Version |
+-------+---------+
Error: Failed to initialize NVML
error: creating server: Internal - failed to load all models
"""  # noqa: E501 - as Triton writes it
POLL = """
[libprotobuf ERROR /x/text_format.cc:337] Error parsing text-format inference.ModelConfig: 6:27: Expected integer, got: $
E1120 12:14:55.994432 7101 model_repository_manager.cc:1460] "Poll failed for model directory 'ident': failed to read text proto from /r/ident/config.pbtxt"
"""  # noqa: E501 - as Triton writes it
SOCKET = """
E1120 12:17:16.145471 9428 main.cc:245] "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use "
"""  # noqa: E501 - as Triton writes it


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
    triton = server.find_triton(frozenset({"python", "tensorrtllm"}))
    assert triton.executable == system_triton / "bin" / "tritonserver"
    assert server.prepare_backends(triton, Store(tmp_path / "home")) == system_triton / "backends"


def test_a_missing_backend_is_named(system_triton: Path) -> None:
    with pytest.raises(MissingDependencyError, match=f"{system_triton}.* has no backend onnxruntime"):
        server.find_triton(frozenset({"python", "onnxruntime"}))


def test_without_any_triton_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(server, "_SYSTEM_ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError) as caught:
        server.find_triton()
    assert caught.value.hint is not None
    assert "pip install 'trtserve[cpu]'" in caught.value.hint


def test_the_wheel_gets_a_linked_stub_of_this_python(tmp_path: Path) -> None:
    triton = server.find_triton()
    folder = server.prepare_backends(triton, Store(tmp_path))
    stub = folder / "python" / "triton_python_backend_stub"
    assert stub.is_symlink()
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(stub.readlink())
    assert {entry.name for entry in (folder / "python").iterdir()} >= {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
    }
    assert server.prepare_backends(triton, Store(tmp_path)) == folder


def test_threads_prepare_the_same_backends(tmp_path: Path) -> None:
    triton = server.find_triton()
    together = threading.Barrier(8)

    def prepare(store: Store) -> Path:
        together.wait(timeout=10)
        return server.prepare_backends(triton, store)

    with ThreadPoolExecutor(8) as pool:
        for attempt in range(20):
            store = Store(tmp_path / str(attempt))
            (folder,) = set(pool.map(prepare, [store] * 8))
            assert [entry.name for entry in (folder / "python").iterdir() if entry.name.startswith(".")] == []


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/somewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/cuda")
    triton = server.Triton(executable=Path("/t/bin/tritonserver"), backends=Path("/t/backends"))
    command = server.server_command(
        triton, tmp_path, ADDRESS, backends=triton.backends, shm_prefix="p_", extra_arguments=("--log-verbose=1",)
    )
    assert command.argv == (
        "/t/bin/tritonserver",
        f"--model-repository={tmp_path}",
        "--backend-directory=/t/backends",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--http-port=1",
        "--grpc-port=2",
        "--metrics-port=3",
        "--exit-timeout-secs=3",
        "--disable-auto-complete-config",
        "--backend-config=python,shm-region-prefix-name=p_",
        "--log-verbose=1",
    )
    assert command.cwd == tmp_path
    assert command.env["PATH"] == f"{sys.prefix}/bin:/somewhere"
    assert command.env["LD_LIBRARY_PATH"].endswith(":/cuda")


def test_prefixes_differ_between_servers_of_one_name() -> None:
    first, second = server.unique_prefix("demo"), server.unique_prefix("demo")
    assert first != second
    assert first.startswith("trtserve_demo_")


def test_only_own_regions_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SHARED_MEMORY", tmp_path)
    for name in ("trtserve_a_1_x", "trtserve_b_2_x", "other"):
        (tmp_path / name).touch()
    server.sweep_shared_memory("trtserve_a_1_")
    server.sweep_shared_memory("")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "trtserve_b_2_x"]


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.1", "10.0.0.1")])
def test_address_for_clients(host: str, reached: str) -> None:
    assert server.client_host(host) == reached


def test_failing_model_with_its_lines() -> None:
    (failure,) = server_log.failures(LOG)
    assert failure.model == "bad"
    assert failure.message == 'ValueError: "x" is odd'


def test_broken_configuration_carries_the_parser_message() -> None:
    (failure,) = server_log.failures(POLL)
    assert failure.model == "ident"
    assert "6:27: Expected integer, got: $" in failure.message


def test_taken_socket() -> None:
    assert "127.0.0.1:18101' already in use" in str(server_log.failures(SOCKET)[0])


def test_refused_flag_is_found_before_the_usage_text() -> None:
    text = "/opt/bin/tritonserver: unrecognized option '--nope=1'\nUsage: tritonserver [options]\n  --help\n"
    assert [str(failure) for failure in server_log.failures(text)] == ["unrecognized option '--nope=1'"]


def test_other_error_lines_without_noise() -> None:
    text = LOG.replace("failed to load '", "something else '")
    assert [failure.message.split(":")[0] for failure in server_log.failures(text)] == [
        "something else 'bad' version 1",
        "error",
    ]


def test_noise_and_tables_are_no_reasons() -> None:
    lines = server_log.significant(LOG)
    assert not any("CUDA" in line or "NVML" in line or line.startswith(("+", "|")) for line in lines)


def test_models_that_are_still_loading() -> None:
    assert server_log.still_loading(LOG) == ["bad"]


def test_stub_without_program_is_fatal() -> None:
    line = "I1120 12:17:17.1 95 pb_stub.cc:1]  Failed to preinitialize Python stub: Python model file not found in 'x'"
    assert str(server_log.fatal(line)) == "Python model file not found in 'x'"
    assert server_log.fatal(LOG) is None


def test_follow_reads_what_is_added_and_starts_over_with_a_new_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    contents = ["one\ntwo\n", "new\n"]

    def pause() -> None:
        log.write_text(contents.pop(0))

    assert list(server_log.follow(log, position=4, ended=lambda: not contents, pause=pause)) == ["two\n", "new\n"]


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert server_log.tail(log, 3) == []
    log.write_text("a\nb\nc\n")
    assert server_log.tail(log, 2) == ["b", "c"]
    assert server_log.tail(log, 0) == []
