"""Stages inside NVIDIA's container: real commands of ours through the strict doubles of docker and the tools in it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.double_engines import write_checkpoint, write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from tests.support.servers import free_spec
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.artifacts import Checkpoint, Model, ModelRepository
from trtserve.cli import run
from trtserve.errors import MachineError, RepositoryError, ServerDiedError, ServerStartError
from trtserve.server.plan import plan_server
from trtserve.server.shutdown import stop_server
from trtserve.server.start import start_server
from trtserve.server.state import recorded_server
from trtserve.server.status import server_state
from trtserve.server.supervision import serve_foreground
from trtserve.specs import BuildSpec, ConvertSpec, ServerSpec
from trtserve.store import Store

TAG, VERSION = "25.12", "1.1.0"


@pytest.fixture
def host(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    """A machine with docker and GPUs but without TensorRT-LLM; mpirun and python3 are the image's."""
    doubles.configure(container=TAG, gpus=2)
    monkeypatch.setenv("PATH", f"{doubles.bin}{os.pathsep}{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return doubles


def repository_of(tmp_path: Path, *, tp: int = 2, container: str = TAG) -> ModelRepository:
    engine = write_engine_folder(tmp_path / "elsewhere" / "engine", tp=tp, container=container)
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(engine), container=container)
    return ModelRepository(path=tmp_path / "repository")


def spec(**changes: object) -> ServerSpec:
    return replace(free_spec("boxed"), container=TAG, oversubscribe=True, **changes)  # type: ignore[arg-type]


def left(doubles: Doubles) -> list[str]:
    """Processes of the double of tritonserver that are still there."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [" ".join(line) for line in lines if any(str(doubles.bin) in word for word in line)]


def test_a_server_in_a_container(host: Doubles, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    server = start_server(plan_server(repository_of(tmp_path), spec(gpus=(0, 1)), store=store))
    assert server_state(server) == ("ready", "")
    (call,) = [call for call in host.calls("docker") if call.arguments[0] == "run"]
    assert call.arguments[call.arguments.index("--name") + 1] == server.instances[0].container
    assert f"{tmp_path / 'elsewhere' / 'engine'}:{tmp_path / 'elsewhere' / 'engine'}:ro" in call.arguments
    assert "CUDA_VISIBLE_DEVICES=0,1" in call.arguments
    ranks = host.calls("tritonserver")
    assert sorted(call.rank for call in ranks) == [0, 1]
    assert all(call.cwd == tmp_path / "repository" for call in ranks)
    stop_server("boxed", store=store)
    # Requests in flight are answered: mpirun, which docker's own signal reaches, kills its ranks instead.
    assert "Waiting for in-flight requests to complete." in server.instances[0].log.read_text()
    asked, removed = [call.arguments for call in host.calls("docker")][-2:]
    assert asked[:4] == ("exec", server.instances[0].container, "bash", "-c")
    assert removed == ("rm", "--force", server.instances[0].container)
    assert not left(host)


def test_a_killed_client_leaves_no_container(host: Doubles, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    server = start_server(plan_server(repository_of(tmp_path, tp=1), spec(), store=store))
    os.kill(server.instances[0].process.pid, signal.SIGKILL)
    wait_until(lambda: not server.alive())
    assert left(host)
    stop_server("boxed", store=store)
    wait_until(lambda: not left(host))


def test_ctrl_c_or_a_dead_rank_ends_the_container(host: Doubles, tmp_path: Path) -> None:
    store, repository = Store(tmp_path / "home"), repository_of(tmp_path)
    main = threading.main_thread().ident or 0
    serve_foreground(
        plan_server(repository, spec(), store=store), on_ready=lambda _: signal.pthread_kill(main, signal.SIGINT)
    )
    assert recorded_server("boxed", store) is None
    host.configure(container=TAG, gpus=2, die_rank=1, die_when="asked")
    with pytest.raises(ServerDiedError, match=r"(?s)[Rr]ank 1 .* which ends all ranks.*out of memory"):
        serve_foreground(plan_server(repository, spec(), store=store), on_ready=lambda _: host.let_rank_die())
    assert not left(host)


def test_the_engine_is_compared_with_the_container(host: Doubles, tmp_path: Path) -> None:
    repository = repository_of(tmp_path, container="25.04")
    with pytest.raises(RepositoryError, match=VERSION):
        start_server(plan_server(repository, spec(), store=Store(tmp_path / "home")))
    assert not [call for call in host.calls("docker") if call.arguments[0] == "run"]


def test_docker_without_gpus_and_an_unknown_image(host: Doubles, tmp_path: Path) -> None:
    repository = repository_of(tmp_path, tp=1)
    with pytest.raises(MachineError, match="cannot pull the image"):
        start_server(plan_server(repository, replace(spec(), container="no_such_image", trtllm_version=VERSION)))
    host.configure(container=TAG, gpus=1, images="mine")
    with pytest.raises(ServerStartError):
        start_server(plan_server(repository, replace(spec(), container="mine", extra_arguments=("--no-such-flag",))))


def test_a_container_decides_the_runtime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    assert run(["import", str(model), "--container", TAG, "--tp-size", "2", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert f"Runtime: tensorrt_llm (the container {TAG} has it)" in printed.err
    assert "openvino" not in printed.err
    assert "trtllm-build" in printed.out


def test_an_engine_is_built_in_a_container(host: Doubles, tmp_path: Path) -> None:
    checkpoint = Checkpoint(path=write_checkpoint(tmp_path / "checkpoint", tp=2))
    engine = build_engine(checkpoint, BuildSpec(container=TAG, max_batch_size=4), out=tmp_path / "engine")
    assert (engine.path / "rank1.engine").exists()
    assert engine.manifest is not None
    assert engine.manifest.tools["tensorrt_llm"] == VERSION
    (call,) = [call for call in host.calls("docker") if call.arguments[0] == "run"]
    assert f"{checkpoint.path}:{checkpoint.path}:ro" in call.arguments
    host.configure(container=TAG, gpus=0)
    assert run(["build", str(checkpoint.path), "--container", TAG, "--dry-run", "--out", str(tmp_path / "other")]) == 0


@pytest.mark.parametrize(("tag", "release"), [("25.12", "1.1"), ("25.03", "0.18")])
def test_nvidias_converter_in_a_container(tag: str, release: str, host: Doubles, tmp_path: Path) -> None:
    host.configure(container=tag, gpus=1)
    host.examples(release)
    model = Model(path=write_tiny_model(tmp_path / "model", "llama", dtype="bfloat16"))
    wanted = ConvertSpec(converter="upstream", tp_size=2, container=tag)
    made = convert_model(model, wanted, out=tmp_path / "checkpoint")
    assert made.manifest is not None
    assert (made.path / "rank1.safetensors").exists()
    assert "docker run" in made.manifest.facts["command"]


def test_containers_before_0_17_need_the_examples(
    host: Doubles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", "llama", dtype="bfloat16")
    line = ["convert", str(model), "--converter", "upstream", "--container", "24.11", "--out", str(tmp_path / "made")]
    assert run(line) == 3
    assert "git clone --depth 1 --branch v0.15.0" in capsys.readouterr().err
    host.configure(container="24.11", gpus=1)
    assert run([*line, "--trtllm-examples", str(host.examples("0.15"))]) == 0
