"""doctor on a machine with GPUs: NVIDIA's container by the doubles, what it lacks, and what nvidia-smi prints."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from tests.support.doubles import Doubles
from trtserve.cli import run
from trtserve.errors import MachineError
from trtserve.executor import runtimes
from trtserve.host.gpus import Driver, find_gpus
from trtserve.server.doctor import examination, nvidia


def test_nvidia_smi_reports_gpus(doubles: Doubles) -> None:
    doubles.configure(gpus=2, container="25.12", driver="580.95.05", gpu_name="NVIDIA H200", gpu_memory_mib=143771)
    found = find_gpus()
    assert found.driver == Driver(version="580.95.05", cuda=(13, 0))
    assert found.apart == ()
    assert [device.index for device in found.devices] == [0, 1]
    second = nvidia.check_device(found.devices[1])
    assert second.evidence.startswith("NVIDIA H200, compute capability 9.0, 140.4 GiB free of 140.4 GiB, MIG off")
    assert nvidia.check_driver(found).evidence == "580.95.05, supports CUDA 13.0"


@pytest.mark.parametrize(("apart", "pairs"), [("0-2,1-3", ((0, 2), (1, 3))), ("", ())])
def test_nvidia_smi_reports_links_between_gpus(
    apart: str, pairs: tuple[tuple[int, int], ...], doubles: Doubles
) -> None:
    doubles.configure(gpus=4, gpus_apart=apart)
    assert find_gpus().apart == pairs


def test_nvidia_smi_without_a_driver(doubles: Doubles) -> None:
    doubles.configure(gpus=0)
    with pytest.raises(MachineError, match="couldn't communicate with the NVIDIA driver"):
        find_gpus()


@pytest.fixture
def gpu_machine(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    """NVIDIA's container 25.12 on two H100s, by the doubles: packages, programs, a kernel driver."""
    doubles.configure(container="25.12", gpus=2, driver="580.95.05")
    packages = doubles.packages("1.1.0")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(runtimes, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for part in ("_python", "_triton", "_tools", "_pytorch"):
        monkeypatch.setattr(examination, part, lambda *_arguments: [])
    assert metadata.version("tensorrt_llm") == "1.1.0"
    return doubles


def test_a_gpu_machine_works(gpu_machine: Doubles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["runtime"], result["works"]) == ("tensorrt_llm", True)
    assert result["reason"] == "an NVIDIA GPU and TensorRT-LLM 1.1.0 on this machine"
    states = {finding["name"]: finding["state"] for finding in result["findings"]}
    wanted = (
        "driver",
        "GPU 0",
        "GPU 1",
        "CUDA",
        "kernels",
        "TensorRT-LLM",
        "engines",
        "tensorrtllm backend",
        "LLM API",
    )
    assert {name: states[name] for name in wanted} == dict.fromkeys(wanted, "ok")
    assert not gpu_machine.calls("import tensorrt_llm")


@pytest.mark.parametrize(
    ("settings", "failed"),
    [
        ({"gpus": 0}, {"driver"}),
        ({"driver": "550.54.15", "container": "24.08"}, {"CUDA"}),
        ({"sm": 70, "container": "25.12", "driver": "580.95.05"}, {"kernels"}),
    ],
)
def test_a_gpu_machine_that_cannot_work(
    settings: dict[str, object], failed: set[str], gpu_machine: Doubles, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_machine.configure(**settings)
    assert run(["doctor", "--json", "--runtime", "tensorrt_llm"]) == 30
    findings = json.loads(capsys.readouterr().out)["result"]["findings"]
    assert {finding["name"] for finding in findings if finding["state"] == "failed"} == failed
    assert run(["doctor", "--json", "--runtime", "openvino"]) == 0


@pytest.mark.usefixtures("gpu_machine")
def test_trtllm_version_judges_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--runtime", "llmapi", "--trtllm-version", "1.2.1"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["result"]["findings"]}
    assert "TensorRT-LLM 1.2.1 is built with CUDA 13.1" in findings["CUDA"]["evidence"]
    assert findings["TensorRT-LLM"]["state"] == "warning"
    assert run(["doctor", "--trtllm-version", "newest"]) == 2
