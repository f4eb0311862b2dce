"""The double of tritonserver, alone and through the real mpirun, against the reference and a real server's texts."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.doubles import tritonserver
from tests.doubles.ranks import SHARED_MEMORY
from tests.doubles.triton_options import UsageError, parse
from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from trtserve.ports import free_ports

MPIRUN = str(Path(sys.executable).parent / "mpirun")
HOST = "127.0.0.1"


class Launch:
    """A repository with one engine, and launches of it as the upstream script composes them."""

    def __init__(self, folder: Path, doubles: Doubles, *, tp: int = 2, pp: int = 1) -> None:
        self.folder = folder
        self.doubles = doubles
        self.ports = free_ports(HOST, 3)
        self.prefix = f"double{secrets.token_hex(4)}_"
        write_engine_folder(folder / "engine", tp=tp, pp=pp)
        self.repository = write_core_model(folder / "repository", "tensorrt_llm", "engine")

    def group(self, rank: int, *, prefix: str | None = None) -> list[str]:
        """Arguments of one rank: launch.md, section 2, releases 0.8 – 0.18."""
        http, grpc, metrics = self.ports
        explicit = ["--model-control-mode=explicit", "--load-model=tensorrt_llm"] if rank else []
        return [
            f"--model-repository={self.repository}",
            *explicit,
            f"--grpc-port={grpc}",
            f"--http-port={http}",
            f"--metrics-port={metrics}",
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={prefix or f'{self.prefix}{rank}_'}",
        ]

    def command(self, ranks: int) -> list[str]:
        """The composed command with its last colon."""
        words = [MPIRUN, "--allow-run-as-root", "--oversubscribe"]
        for rank in range(ranks):
            words += ["-n", "1", "tritonserver", *self.group(rank), ":"]
        return words

    def start(self, ranks: int, **settings: object) -> subprocess.Popen[str]:
        """Start the launch with its output on one pipe."""
        return subprocess.Popen(
            self.command(ranks),
            cwd=self.folder,
            env=self.doubles.environment(**settings),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def alone(self, *arguments: str, **settings: object) -> int:
        """Run one rank in this process, which must fail to start."""
        self.doubles.configure(**settings)
        return tritonserver.main(list(arguments) or self.group(0), self.doubles.folder)

    def get(self, path: str, *, port: int = 0) -> tuple[int, bytes]:
        """Status and body of a GET."""
        with urllib.request.urlopen(f"http://{HOST}:{self.ports[port]}{path}", timeout=5) as answer:
            return int(answer.status), answer.read()

    def is_ready(self) -> bool:
        """Whether the server answers that it is ready."""
        try:
            return self.get("/v2/health/ready")[0] == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def wait_ready(self, process: subprocess.Popen[str]) -> None:
        """Until the server is ready, or the launch has ended."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if self.is_ready():
                return
            time.sleep(0.05)
        raise AssertionError(process.communicate(timeout=120)[0])

    def regions(self) -> list[str]:
        """What this launch has in shared memory."""
        return sorted(path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(self.prefix))

    def sweep(self) -> None:
        """Remove what killed ranks left."""
        for name in self.regions():
            (SHARED_MEMORY / name).unlink()


@pytest.fixture
def launch(tmp_path: Path, doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.chdir(tmp_path)
    return Launch(tmp_path, doubles)


def test_reference_command_becomes_ready_and_ends_with_0(launch: Launch) -> None:
    process = launch.start(2)
    launch.wait_ready(process)
    try:
        assert len(launch.regions()) == 2
        assert launch.get("/v2/models/tensorrt_llm/ready")[0] == 200
        assert b"nv_inference_request_success" in launch.get("/metrics", port=2)[1]
        config = json.loads(launch.get("/v2/models/tensorrt_llm/config")[1])
        assert config["parameters"]["gpt_model_path"] == {"string_value": "engine"}
    finally:
        leader = next(call for call in launch.doubles.calls("tritonserver") if call.rank == 0)
        os.kill(leader.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    for line in ("GRPCInferenceService", "HTTPService", "Metrics Service"):
        assert f"Started {line} at" in output
    assert "Terminating worker process" in output
    assert launch.regions() == []


@pytest.mark.parametrize("die_rank", [0, 1])
def test_a_dying_rank_ends_the_launch(launch: Launch, die_rank: int) -> None:
    process = launch.start(2, die_rank=die_rank, die_when="start", die_signal=9, hang_rank=1 - die_rank)
    output = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert "CUDA runtime error" in output
    launch.sweep()  # a killed rank leaves its region, sometimes both do


def test_world_size_must_be_that_of_the_engine(launch: Launch) -> None:
    process = launch.start(1)
    output = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert "MPI worldSize is expected to be equal to tp*pp when participantIds are not specified" in output


def test_an_engine_of_other_versions_or_devices(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    write_engine_folder(launch.folder / "one")
    write_core_model(launch.folder / "r1", "tensorrt_llm", "one")
    launch.repository = launch.folder / "r1"
    for settings, text in (
        ({"container": "25.12"}, "Version tag does not match"),
        ({"container": "25.05"}, "engine of TensorRT-LLM 0.18.2 in 0.19.0"),
        ({"sm": 80}, "expecting compute 8.0 got compute 9.0"),
        ({"gpus": 0}, "cudaSetDevice(0): invalid device ordinal (0 GPUs on this node)"),
    ):
        assert launch.alone(**settings) == 1
        assert text in capsys.readouterr().err
    assert launch.regions() == []


def test_paths_are_relative_to_the_working_directory(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(launch.repository)
    assert launch.alone() == 1
    assert "Decoder (GPT) model path at engine does not exist." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"gpt_model_type": "${batching_strategy}"}, "Invalid gpt_model_type"),
        ({"kv_cache_free_gpu_mem_fraction": "1.5"}, "out of its range"),
        ({"enable_chunked_context": "yes"}, "Cannot convert yes"),
        ({"max_beam_width": "four"}, "is not int"),
        ({"decoding_mode": "greedy"}, "decoding_mode"),
        ({"gpu_device_ids": "0"}, "deviceIds (1) * numNodes (1) must be equal to tp*pp*cp = 2"),
        ({"max_num_sequences": "8"}, "was dropped"),
    ],
)
def test_parameters(
    launch: Launch,
    parameters: dict[str, str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    write_core_model(launch.folder / "other", "tensorrt_llm", "engine", **parameters)
    launch.repository = launch.folder / "other"
    assert launch.alone() == 1
    assert text in capsys.readouterr().err


def test_a_placeholder_outside_quotes_is_no_protobuf(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    path = launch.repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text(encoding="utf-8").replace("max_batch_size: 4", "max_batch_size: ${n}"), "utf-8")
    assert launch.alone() == 1
    error = capsys.readouterr().err
    assert "Couldn't parse integer: $" in error
    assert "failed to load all models" in error


def test_ranks_need_prefixes_of_their_own(launch: Launch) -> None:
    command = launch.command(2)
    same = [word.replace(f"{launch.prefix}1_", f"{launch.prefix}0_") for word in command]
    done = subprocess.run(same, cwd=launch.folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "Unable to initialize shared memory key" in done.stderr
    launch.sweep()


def test_orchestrator_spawns_and_checks(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTLLM_ORCHESTRATOR", "1")
    write_core_model(launch.folder / "two", "a", "engine", gpu_device_ids="0,1")
    write_core_model(launch.folder / "two", "b", "engine", gpu_device_ids="1,2")
    launch.repository = launch.folder / "two"
    assert launch.alone() == 1
    assert "GPU 1 is used by" in capsys.readouterr().err
    monkeypatch.setenv("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "0")
    assert launch.alone() == 1
    assert "participant IDs is missing" in capsys.readouterr().err


def test_prestarted_participants(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("TRTLLM_ORCHESTRATOR", "1"), ("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "0")):
        monkeypatch.setenv(name, text)
    for ids, text in (
        ("0,1", "Rank 0 is the orchestrator"),
        ("1,3", "beyond the MPI world"),
        ("1", "is expected to be tp*pp"),
    ):
        folder = launch.folder / ids
        write_core_model(folder, "tensorrt_llm", "engine", participant_ids=ids, gpu_device_ids="0,1")
        launch.repository = folder
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
        assert launch.alone() == 1
        assert text in capsys.readouterr().err


def test_signals_while_loading_kill(launch: Launch) -> None:
    write_engine_folder(launch.folder / "single")
    write_core_model(launch.folder / "r1", "tensorrt_llm", "single")
    launch.repository = launch.folder / "r1"
    process = subprocess.Popen(
        ["tritonserver", *launch.group(0)], cwd=launch.folder, env=launch.doubles.environment(load_seconds=600)
    )
    deadline = time.monotonic() + 120
    while not launch.regions() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == -signal.SIGTERM  # the handlers are set after the models were loaded
    assert len(launch.regions()) == 1
    launch.sweep()


# Texts of a real tritonserver 2.51.0.
_TEXTS = [
    (("--foo",), "unrecognized option '--foo'"),
    (("--http-port=abc",), 'Bad option: "--http-port".\nInvalid option value. Got abc'),
    (("--http-port",), "option '--http-port' requires an argument"),
    (("--enable-peer-access=maybe",), "invalid value for bool option: maybe"),
    (("--cuda-memory-pool-byte-size=0",), "argument requires format <first>:<second>. Found: 0"),
    (("--cuda-memory-pool-byte-size=0:x",), "Invalid option value. Got x"),
    (("--backend-config=python",), "option format is '<backend name>,<setting>=<value>'. Got python"),
    (("--model-control-mode=foo",), "invalid argument for --model-control-mode"),
    (("--disable-auto-complete-config=1",), "doesn't allow an argument"),
    (("stray",), "Unexpected argument: stray"),
    (("--load-model=a",), "requires setting '--model-control-mode=explicit' as well"),
]


@pytest.mark.parametrize(("arguments", "text"), _TEXTS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_command_line(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--model-repository=r", *arguments], "24.10")
    assert text in str(caught.value)


def test_flags_by_container() -> None:
    for flag, first in (("--http-max-input-size=5", "25.06"), ("--allow-client-shm=true", "26.05")):
        parse(["--model-repository=r", flag], first)
        with pytest.raises(UsageError, match="unrecognized option"):
            parse(["--model-repository=r", flag], "25.04")
    # Ports may stand twice with the same values, as the script of 0.19 writes them.
    assert parse(["--http-port=1", "--model-repository=r", "--http-port=1"], "25.05").integer("http-port", 0) == 1
    with pytest.raises(UsageError, match="twice"):
        parse(["--http-port=1", "--model-repository=r", "--http-port=3"], "25.05")


@pytest.mark.parametrize(
    ("container", "old", "new", "text"),
    [
        ("25.04", 'name: "input_ids"', 'name: "input_tokens"', "'input_tokens' is not of this release"),
        ("25.04", "TYPE_INT32 dims: [ -1, -1 ]", "TYPE_INT64 dims: [ -1, -1 ]", "has TYPE_INT64 instead of TYPE_INT32"),
        ("25.04", "reshape: { shape: [ ] } } ]\noutput", "} ]\noutput", "'request_output_len' has no reshape"),
        ("25.04", "allow_ragged_batch: true", "", "'input_ids' has not ragged"),
        (
            "24.08",
            'key: "gpt_model_path"',
            'key: "cuda_graph_mode" value { string_value: "1" } }\nparameters { key: "gpt_model_path"',
            "before 0.15",
        ),
        ("25.06", 'name: "output_ids"', 'name: "min_length"', "output 'min_length' is not of this release"),
    ],
)
def test_tensors_of_the_core_model(
    launch: Launch, container: str, old: str, new: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = launch.repository / "tensorrt_llm" / "config.pbtxt"
    changed = path.read_text(encoding="utf-8").replace(old, new)
    path.write_text(changed, encoding="utf-8")
    assert launch.alone(container=container) == 1
    assert text in capsys.readouterr().err


_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
input [ { name: "lengths" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "out" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "tensorrt_llm" model_version: -1
  input_map { key: "input_ids" value: "ids" }
  input_map { key: "input_lengths" value: "lengths" }
  input_map { key: "request_output_len" value: "lengths" }
  output_map { key: "output_ids" value: "out" }
} ] }
"""


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('model_name: "tensorrt_llm"', 'model_name: "core"', "not available or ambiguous: core"),
        ('key: "output_ids"', 'key: "outputs"', "mapped to non-existing tensor outputs"),
        ('"out" data_type: TYPE_INT32', '"out" data_type: TYPE_FP32', "inconsistent data type"),
        ('input_map { key: "input_lengths" value: "lengths" }', "", "needs its input input_lengths"),
    ],
)
def test_ensembles(launch: Launch, old: str, new: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (launch.repository / "ensemble" / "1").mkdir(parents=True)
    (launch.repository / "ensemble" / "config.pbtxt").write_text(_ENSEMBLE.replace(old, new), encoding="utf-8")
    assert launch.alone() == 1
    assert text in capsys.readouterr().err
