"""GPUs, drivers and releases of TensorRT-LLM: what doctor says of machines that are not here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.doubles import Doubles
from tests.support.unsupported_release import ENGINELESS, ENGINELESS_RELEASE
from trtserve.errors import MachineError, UsageError
from trtserve.host import gpus as host_gpus
from trtserve.host.gpus import Device, Driver, Gpus, find_gpus
from trtserve.nvidia.releases import RELEASES
from trtserve.nvidia.releases.containers import (
    all_containers,
    container,
    cuda_of,
    driver_of,
    driver_support,
    driver_versions,
    kernels,
    minor_version_drivers,
    newest_container,
    newest_cuda,
    numbers,
    runs_on,
)
from trtserve.nvidia.releases.installed import Installed, installed
from trtserve.server.doctor import GPU, nvidia
from trtserve.server.doctor.system import TwoRanks

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """One GPU; None means that the driver does not report it."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    used: int = GIB // 2
    mig: bool | None = False
    persistence: bool | None = True
    errors: int | None = 0


def described(
    *,
    gpus: Sequence[FakeGpu] = (FakeGpu(),),
    driver: str = "580.159.04",
    cuda: tuple[int, int] | None = (13, 0),
    apart: tuple[tuple[int, int], ...] | None = (),
) -> Gpus:
    devices = [
        Device(
            index=index,
            name=gpu.name,
            capability=f"{gpu.capability[0]}.{gpu.capability[1]}",
            memory=140 * GIB,
            used=gpu.used,
            free=140 * GIB - gpu.used - GIB // 2,  # the driver keeps a part for itself
            driver=driver,
            uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
            mig=gpu.mig,
            persistence=gpu.persistence,
            errors=gpu.errors,
        )
        for index, gpu in enumerate(gpus)
    ]
    return Gpus(driver=Driver(version=driver, cuda=cuda), devices=tuple(devices), apart=apart)


def version(text: str) -> Installed:
    found = installed(text)
    assert found is not None
    return found


def test_every_container_has_a_driver() -> None:
    needed = [numbers(driver_of(each)) for each in all_containers()]
    assert needed == sorted(needed)
    assert {cuda_of(each)[0] for each in all_containers()} == set(minor_version_drivers())
    for cuda, driver in driver_versions().items():
        assert newest_cuda(Driver(version=driver)) == tuple(numbers(cuda)[:2])


@pytest.mark.parametrize(
    ("driver", "cuda", "tag", "support"),
    [
        ("580.159.04", (13, 0), "26.02", "full"),
        ("580.159.04", (13, 0), "26.07", "minor"),  # CUDA 13.1 wants 590.44.01, 13.x 580.65.06
        ("580.159.04", (13, 0), "24.08", "full"),
        ("570.124.06", (12, 8), "25.05", "full"),
        ("570.124.06", (12, 8), "25.10", "minor"),
        ("570.124.06", (12, 8), "25.12", "none"),  # another major version
        ("525.60.13", (12, 0), "25.10", "minor"),
        ("525.60.12", (12, 0), "25.10", "none"),
        ("470.57.02", (11, 4), "24.08", "none"),
        # With the compatibility package of a container, the driver speaks what the package brings.
        ("535.161.08", (13, 1), "26.07", "full"),
        ("575.57.08", None, "25.10", "full"),
        ("450.10", None, "24.08", "none"),
    ],
)
def test_containers_that_a_driver_runs(driver: str, cuda: tuple[int, int] | None, tag: str, support: str) -> None:
    assert driver_support(Driver(version=driver, cuda=cuda), container(tag)) == support


def test_newest_container_of_a_driver() -> None:
    driver = Driver(version="570.124.06", cuda=(12, 8))
    assert newest_container(driver, "full") == "25.05"
    assert newest_container(driver, "minor") == "25.10"
    assert newest_container(driver, "full", fits=lambda release: release == "0.12") == "24.08"
    assert newest_container(Driver(version="390.1", cuda=(9, 1)), "full") == ""


@pytest.mark.parametrize(
    ("release", "capability", "runs"),
    [
        ("0.14", "7.0", True),
        ("0.15", "7.0", False),
        ("0.14", "7.5", True),
        ("0.15", "7.5", False),
        ("0.12", "9.0", True),
        (ENGINELESS_RELEASE, "9.0", True),
        ("0.16", "10.0", False),
        ("0.17", "10.0", True),
        ("0.17", "10.3", False),
        ("0.20", "12.1", True),
        ("1.2", "6.1", False),
        ("1.2", "13.0", None),
    ],
)
def test_kernels_of_releases(release: str, capability: str, runs: bool | None) -> None:
    assert runs_on(release, capability) is runs


def test_kernel_rows_name_releases() -> None:
    for row in kernels():
        assert row.since in RELEASES
        assert row.until in (None, *RELEASES)


def test_an_h200() -> None:
    found = described()
    assert found.driver == Driver(version="580.159.04", cuda=(13, 0))
    assert nvidia.check_driver(found).evidence == "580.159.04, supports CUDA 13.0"
    device = nvidia.check_device(found.devices[0])
    assert (device.state, device.needed_by) == ("ok", GPU)
    assert device.evidence == (
        "NVIDIA H200, compute capability 9.0, 139.0 GiB free of 140.0 GiB, MIG off, persistence mode on, "
        "0 uncorrected memory errors"
    )


def test_unreported_facts_of_a_gpu_are_left_out() -> None:
    found = described(gpus=[FakeGpu(name="GeForce", mig=None, persistence=None, errors=None)], cuda=None)
    evidence = nvidia.check_device(found.devices[0]).evidence
    assert evidence == "GeForce, compute capability 9.0, 139.0 GiB free of 140.0 GiB"
    # The driver's own version says what CUDA it speaks.
    assert nvidia.check_driver(found).evidence == "580.159.04, supports CUDA 13.0 (derived from its version)"


@pytest.mark.parametrize(
    ("gpu", "fix"),
    [
        (FakeGpu(used=60 * GIB), "Other programs hold 60.0 GiB"),
        (FakeGpu(mig=True), "MIG splits it"),
        (FakeGpu(errors=3), "memory has errors"),
    ],
)
def test_problems_of_a_gpu(gpu: FakeGpu, fix: str) -> None:
    finding = nvidia.check_device(described(gpus=[gpu]).devices[0])
    assert finding.state == "warning"
    assert fix in finding.fix


def test_peer_access() -> None:
    assert list(nvidia.check_peers(described())) == []
    (both,) = nvidia.check_peers(described(gpus=[FakeGpu()] * 2))
    assert (both.state, both.evidence) == ("ok", "between both GPUs")
    four = [FakeGpu()] * 4
    (fine,) = nvidia.check_peers(described(gpus=four))
    assert (fine.state, fine.evidence) == ("ok", "between all 4 GPUs")
    (apart,) = nvidia.check_peers(described(gpus=four, apart=((0, 2), (1, 3))))
    assert (apart.state, apart.evidence) == ("warning", "none between GPUs 0–2, 1–3")
    assert list(nvidia.check_peers(described(gpus=four, apart=None))) == []


@pytest.mark.parametrize(
    ("fault", "bus", "hint"),
    [
        ("Driver/library version mismatch", 1, "reboot"),
        ("Driver Not Loaded", 2, "Install NVIDIA's driver"),
        ("not installed", 0, "--runtime openvino"),
    ],
)
def test_why_there_is_no_driver(fault: str, bus: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_gpus, nvidia):
        monkeypatch.setattr(module, "on_the_bus", lambda: bus)
    ended = SimpleNamespace(code=9, stdout=f"Failed to initialize NVML: {fault}\n", stderr="")
    monkeypatch.setattr(host_gpus, "run", lambda *_arguments, **_options: ended)
    with pytest.raises(MachineError, match=fault) as caught:
        find_gpus()
    finding = nvidia.check_no_driver(caught.value)
    assert finding.state == "failed"
    assert hint in finding.fix
    assert f"{bus or 'no'} NVIDIA GPU" in finding.evidence


def test_gpus_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot, vendor, kind in (
        ("00", "0x10de", "0x030200"),
        ("01", "0x10de", "0x068000"),
        ("02", "0x8086", "0x030000"),
    ):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(f"{vendor}\n")
        (tmp_path / slot / "class").write_text(f"{kind}\n")
    (tmp_path / "03").mkdir()
    monkeypatch.setattr(host_gpus, "_PCI", tmp_path)
    assert host_gpus.on_the_bus() == 1
    monkeypatch.setattr(host_gpus, "_PCI", tmp_path / "absent")
    assert host_gpus.on_the_bus() == 0


def test_a_driver_without_gpus() -> None:
    finding = nvidia.check_driver(described(gpus=[]))
    assert (finding.state, finding.evidence) == ("failed", "580.159.04 shows no GPU")


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="nvidia-smi: not installed"):
        find_gpus()


@pytest.mark.parametrize(
    ("text", "state", "evidence"),
    [
        (None, None, ""),
        ("1", "ok", "1: 1 of 2 GPUs"),
        ("GPU-1234", "failed", "'GPU-1234': GPU-1234 does not exist, so no GPU is left"),
        ("", "failed", "'': no GPU is left"),
        ("-1", "failed", "'-1': no GPU is left"),
        ("0,5", "warning", "'0,5': 1 of 2 GPUs, because GPU 5 does not exist"),
        ("1,1", "failed", "'1,1': GPU 1 is named twice, so no GPU is left"),
        ("MIG-1234", "ok", "MIG-1234: partitions, not checked"),
    ],
)
def test_visible_devices(text: str | None, state: str | None, evidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    found = [(finding.state, finding.evidence) for finding in nvidia.check_visible(described(gpus=[FakeGpu()] * 2))]
    assert found == ([] if state is None else [(state, evidence)])


def test_driver_against_the_cuda_of_tensorrt_llm() -> None:
    found = described()
    fine = nvidia.check_cuda(found, version("1.1.0"))
    assert (fine.state, fine.evidence) == (
        "ok",
        "driver 580.159.04 supports CUDA 13.0; TensorRT-LLM 1.1.0 is built with CUDA 13.0",
    )
    assert nvidia.check_cuda(found, version("1.2.1")).evidence.endswith("runs thanks to minor version compatibility")
    old = described(driver="550.54.15", cuda=(12, 4))
    refused = nvidia.check_cuda(old, version("1.2.1"))
    assert refused.state == "failed"
    assert refused.fix == (
        "Install driver 590.44.01 or newer, or use an older container: this driver runs 25.10 (1.0.0) "
        "by minor version compatibility."
    )
    assert nvidia.check_cuda(found, version("1.9.0")).state == "warning"


def test_without_tensorrt_llm_the_containers_of_a_driver_are_named() -> None:
    assert nvidia.check_cuda(described(), None).evidence == (
        "this driver runs container 26.02 (TensorRT-LLM 1.1.0), 26.07 (1.2.1) by minor version compatibility"
    )
    # A V100 has a new driver, but no new release has its kernels.
    old = [FakeGpu(name="Tesla V100-SXM2-16GB", capability=(7, 0))]
    assert "container 24.10 (TensorRT-LLM 0.14.0)" in nvidia.check_cuda(described(gpus=old), None).evidence
    none = described(driver="390.1", cuda=(9, 1))
    assert nvidia.check_cuda(none, None).evidence == "this driver runs none of the containers 24.08 … 26.07"


@pytest.mark.parametrize(
    ("capability", "trtllm", "state", "fix"),
    [
        ((9, 0), "1.2.1", "ok", ""),
        ((7, 0), "0.14.0", "ok", ""),
        (
            (7, 0),
            "0.15.0",
            "failed",
            "Use TensorRT-LLM 0.14 at most (container 24.10), a newer GPU, or --runtime openvino.",
        ),
        ((10, 0), "0.16.0", "failed", "Use TensorRT-LLM 0.17 or newer (container 25.01)."),
        ((6, 1), "1.0.0", "failed", "Use a newer GPU, or --runtime openvino."),
        ((13, 0), "1.2.1", "warning", "See its release notes."),
    ],
)
def test_kernels_for_the_gpu(capability: tuple[int, int], trtllm: str, state: str, fix: str) -> None:
    finding = nvidia.check_kernels(described(gpus=[FakeGpu(capability=capability)]), version(trtllm))
    assert (finding.state, finding.fix) == (state, fix)


def test_gpus_of_different_kinds() -> None:
    mixed = [FakeGpu(), FakeGpu(name="NVIDIA L40S", capability=(8, 9))]
    finding = nvidia.check_kernels(described(gpus=mixed), None)
    assert (finding.state, finding.evidence) == (
        "warning",
        "TensorRT-LLM 1.2 has kernels for Ada Lovelace (8.9), Hopper (9.0)",
    )


def test_installed_version() -> None:
    here = Installed(version="1.1.0", release="1.1", tensorrt="10.13.3.9", source="package metadata")
    fine = nvidia.check_installed(here, None)
    assert (fine.state, fine.evidence) == ("ok", "1.1.0, TensorRT 10.13.3.9 (package metadata)")
    other = nvidia.check_installed(here, version("1.2.0"))
    assert (other.state, other.fix) == (
        "warning",
        "--trtllm-version is 1.2.0: engines of one version do not run on the other.",
    )
    missing = nvidia.check_installed(None, version("0.17.0"))
    assert missing.state == "failed"
    assert "tritonserver:25.02-trtllm-python-py3" in missing.fix
    newer = nvidia.check_installed(None, version(ENGINELESS), suited="26.02")
    assert "Install the wheel of that release" in newer.fix
    assert "26.07, has 1.2" in newer.fix
    suited = nvidia.check_installed(None, None, suited="26.02")
    assert suited.fix.startswith("Use NVIDIA's container: add `--container 26.02`")


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("1.2.0", ("ok", "ok")),
        (ENGINELESS, ("failed", "ok")),
        ("0.11.0", ("failed", "failed")),
        ("0.18.2", ("ok", "failed")),
    ],
)
def test_engines_and_llm_api_of_a_version(text: str, states: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    llmapi = next(iter(nvidia.check_llmapi(version(text), 1)))
    assert (nvidia.check_engine_path(version(text)).state, llmapi.state) == states


def test_launcher_of_the_llm_api(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.state for finding in nvidia.check_llmapi(version("1.2.0"), 2)] == ["ok", "ok"]
    monkeypatch.setenv("PATH", "")
    missing = list(nvidia.check_llmapi(version("1.2.0"), 2))
    assert [finding.state for finding in missing] == ["ok", "warning"]
    assert len(list(nvidia.check_llmapi(version("1.2.0"), 1))) == 1
    assert doubles.calls() == []


def test_the_container_that_suits_a_driver() -> None:
    assert nvidia.suited_container(described()) == "26.02"
    assert nvidia.suited_container(described(driver="550.54.15", cuda=(12, 4))) == "25.10"
    assert nvidia.suited_container(described(driver="390.1", cuda=(9, 1))) == ""


def test_no_version_of_tensorrt_llm() -> None:
    with pytest.raises(UsageError):
        installed("newest")


SEEN: dict[str, Any] = {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "gpus": 2, "problem": ""}
HELLO = [{"rank": rank, "device": f"cuda:{rank}", "sum": 12.0} for rank in (0, 1)]


@pytest.fixture
def with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "find_spec", lambda _name: object())


@pytest.mark.usefixtures("with_pytorch")
@pytest.mark.parametrize(
    ("seen", "state", "evidence"),
    [
        ({}, "ok", "2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, calculates on 2 GPUs"),
        ({"cuda": None, "nccl": None, "gpus": 0}, "failed", "2.11.0+cu130 is built without CUDA"),
        ({"gpus": 0, "problem": "The driver is too old"}, "failed", "no usable GPU: The driver is too old"),
        ({"problem": "no kernel image is available"}, "failed", "no usable GPU: no kernel image is available"),
        ({"gpus": 0}, "failed", "no usable GPU: the driver shows none"),
    ],
)
def test_pytorch(monkeypatch: pytest.MonkeyPatch, seen: dict[str, Any], state: str, evidence: str) -> None:
    printed = f"a warning\nfound {json.dumps(SEEN | seen)}\n"
    monkeypatch.setattr(nvidia, "run", lambda *_arguments, **_options: SimpleNamespace(stdout=printed))
    found = nvidia.check_pytorch()
    assert (found.state, bool(found.fix)) == (state, state == "failed")
    assert evidence in found.evidence
    assert found.needed_by == {"torch"}


@pytest.mark.usefixtures("with_pytorch")
@pytest.mark.parametrize(
    ("code", "said", "state", "evidence"),
    [
        (0, HELLO, "ok", "two ranks added a tensor on cuda:0 and cuda:1"),
        (0, [HELLO[0], {**HELLO[1], "sum": 4.0}], "failed", "two ranks: exit code 0"),
        (1, [], "failed", "two ranks: exit code 1: it printed nothing"),
        (None, HELLO[:1], "failed", "two ranks: did not end in time"),
    ],
)
def test_two_ranks(
    monkeypatch: pytest.MonkeyPatch, code: int | None, said: list[dict[str, Any]], state: str, evidence: str
) -> None:
    output = "".join(f"[1,{each['rank']}]<stdout>: found {json.dumps(each)}\n" for each in said)
    monkeypatch.setattr(nvidia, "run_two_ranks", lambda _program, *, bound: TwoRanks(code=code, output=output))
    found = nvidia.check_ranks()
    assert (found.state, found.group) == (state, "mpi")
    assert found.evidence.startswith(evidence)


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "find_spec", lambda _name: None)
    for found in (nvidia.check_pytorch(), nvidia.check_ranks()):
        assert (found.state, found.judged("openvino").state, found.judged("torch").state) == (
            "failed",
            "unneeded",
            "failed",
        )
        assert "[cuda]" in found.fix
