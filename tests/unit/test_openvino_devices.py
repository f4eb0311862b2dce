"""`--device` of the openvino runtime: CPU, an Intel GPU where OpenVINO finds one, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.executor.openvino import paged_model
from trtserve.executor.openvino.runtime import OpenvinoPlan
from trtserve.executor.runtimes import RUNTIMES
from trtserve.pipeline.build import plan_build
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.specs.build import DeviceName
from trtserve.specs.runtime import Runtime

SPEC = BuildSpec(runtime="openvino", max_seq_len=64)


def checkpoint_of(family: str, folder: Path) -> Checkpoint:
    return convert_model(Model(path=write_tiny_model(folder / "model", family)), ConvertSpec(), out=folder / "made")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint_of("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = SimpleNamespace(available_devices=["CPU", "GPU.0", "GPU.1"])
    monkeypatch.setattr(paged_model, "openvino_core", lambda: devices)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("npu", "--device npu: OpenVINO has paged attention, which this runtime needs, for CPUs and GPUs only"),
        ("gpu", "--device gpu: OpenVINO finds no Intel GPU here; it finds CPU"),
    ],
)
def test_a_device_that_cannot_serve_is_refused(
    checkpoint: Checkpoint, device: DeviceName, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_model, "openvino_core", lambda: SimpleNamespace(available_devices=["CPU"]))
    with pytest.raises(UsageError, match=words):
        plan_build(checkpoint, replace(SPEC, device=device))


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_no_runtime_is_named_for_an_npu(runtime: Runtime) -> None:
    with pytest.raises(UsageError) as refused:
        runtime.require_device(BuildSpec(device="npu"))
    assert "npu" not in f"{refused.value.hint} {runtime.devices}"


def test_auto_is_the_cpu_where_there_is_no_gpu(checkpoint: Checkpoint) -> None:
    assert plan_build(checkpoint, replace(SPEC, device="auto")).fingerprint == plan_build(checkpoint, SPEC).fingerprint


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("device", ["gpu", "auto"])
def test_an_engine_for_a_gpu_records_it_and_calculates_in_float16(checkpoint: Checkpoint, device: DeviceName) -> None:
    build = plan_build(checkpoint, replace(SPEC, device=device))
    plan = build.engine
    assert isinstance(plan, OpenvinoPlan)
    recorded = EngineConfig.of(plan.engine_config()).trtserve
    assert (recorded.plugin, recorded.compute_precision, recorded.kv_precision) == ("GPU", "f16", "f16")
    assert "No Intel GPU ran this yet" in " ".join(plan.notes)
    assert build.fingerprint != plan_build(checkpoint, SPEC).fingerprint


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_keeps_the_cache_in_the_precision_of_arithmetic(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="--kv-precision u8"):
        plan_build(checkpoint, replace(SPEC, device="gpu", kv_precision="u8"))


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_what_only_the_cpu_has_operations_for_is_refused_on_a_gpu(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="--device gpu: "):
        plan_build(checkpoint_of(family, tmp_path), replace(SPEC, device="gpu"))
