"""CUDA_VISIBLE_DEVICES as CUDA reads it: recorded from cuDeviceGetCount on a machine with two H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.double_engines import write_core_model, write_engine_folder
from tests.support.doubles import Doubles
from tests.support.servers import free_spec
from trtserve.artifacts import ModelRepository
from trtserve.errors import MachineError
from trtserve.host.gpus import (
    count_gpus,
    gpus_now,
    list_gpus,
    require_gpus,
    shown_devices,
    visible_devices,
    visible_gpu,
)
from trtserve.server.plan import plan_server
from trtserve.store import Store

FIRST, SECOND = "GPU-8ee33302-c636-d825-62c5-d0b43bf34d49", "GPU-b96be524-4111-2055-0ebe-678700e2974f"


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0", (0,)),
        ("1,0", (1, 0)),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("0,-1,1", (0,)),
        ("0,5", (0,)),
        ("5,0", ()),
        ("0,0", ()),
        ("0,1,0", ()),
        ("0,,1", (0,)),
        (",0", ()),
        ("0,", (0,)),
        (" 1 , 0 ", (1, 0)),
        ("0 1", (0,)),
        (SECOND, (1,)),
        (SECOND[:12], (1,)),
        (f"{SECOND},{FIRST}", (1, 0)),
        (f"{FIRST},1", (0,)),
        (f"1,{FIRST}", (1,)),
        ("GPU-1234", ()),
        (f"{SECOND},GPU-1234", (1,)),
        ("abc", ()),
        ("1abc", (1,)),
        ("0x1", (0,)),
        ("01", (1,)),
        ("+1", (1,)),
        ("NoDevFiles", ()),
        ("all", ()),
        (SECOND.upper(), (1,)),
        (SECOND.removeprefix("GPU-"), ()),
    ],
)
def test_visible_gpus_are_those_of_cuda(text: str, devices: tuple[int, ...]) -> None:
    shown = shown_devices(text, [FIRST, SECOND])
    assert shown is not None
    assert shown.devices == devices


@pytest.mark.parametrize(
    ("text", "stopped"),
    [
        ("0,1", ""),
        ("0,-1", ""),
        ("", ""),
        ("0,-1,1", "-1 ends the list"),
        ("0,,1", "an empty entry ends the list"),
        ("0,5", "GPU 5 does not exist"),
        ("none", "none does not exist"),
        ("1,1", "GPU 1 is named twice"),
        (f"0,{SECOND}", f"{SECOND} ends the list: numbers and UUIDs do not mix"),
    ],
)
def test_hidden_gpus_are_explained(text: str, stopped: str) -> None:
    shown = shown_devices(text, [FIRST, SECOND])
    assert shown is not None
    assert shown.stopped == stopped


def test_partitions_are_not_judged() -> None:
    assert shown_devices("MIG-1234", [FIRST]) is None


def test_gpus_that_processes_may_see(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.configure(gpus=2)
    for text, devices in (("1", (1,)), ("0,7", (0,)), ("0,0", ()), ("GPU-00000000-0000-0000-0000-000000000001", (1,))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert (visible_devices(), count_gpus()) == (devices, len(devices))
        assert visible_gpu() == (list_gpus()[devices[0]] if devices else None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert (visible_devices(), count_gpus()) == (None, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices() == (0, 1)


def test_an_empty_device_list_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(MachineError, match="1 rank needs a GPU; CUDA_VISIBLE_DEVICES=0,0 shows none") as caught:
        require_gpus(1, 0)
    assert str(caught.value.hint).startswith("Unset CUDA_VISIBLE_DEVICES, or correct it")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(MachineError, match="nvidia-smi finds none") as caught:
        require_gpus(1, 0)
    assert str(caught.value.hint).startswith("Start it on a machine with 1 GPU, or serve the model on the CPU")


@pytest.mark.parametrize(("text", "devices"), [(None, ["0", "1"]), ("3,2", ["3", "2"]), ("2", ["0", "1"])])
def test_instances_divide_the_gpus_that_are_shown(
    text: str | None, devices: list[str], tmp_path: Path, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    write_core_model(tmp_path / "repository", "tensorrt_llm", str(tmp_path / "engine"))
    write_engine_folder(tmp_path / "engine")
    repository = ModelRepository(path=tmp_path / "repository")
    spec = replace(free_spec(), instances=2)
    plan = plan_server(repository, spec, store=Store(tmp_path / "home"))
    assert [each.launch.command.env["CUDA_VISIBLE_DEVICES"] for each in plan.instances] == devices


def test_a_gpu_that_reports_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    rows = ("0, 9.0, 20, 5, 15", "1, 9.0, [N/A], [N/A], [N/A]")
    lines = "".join(f"echo '{row}, [N/A], [N/A], [N/A], 580.1, GPU-1, NVIDIA H200'\n" for row in rows)
    tool.write_text(f"#!/bin/sh\n{lines}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(gpu.memory, gpu.free) for gpu in list_gpus()] == [(20 * 2**20, 15 * 2**20), (0, 0)]


def test_nvidia_smi_is_asked_once(doubles: Doubles) -> None:
    """What programs hold is asked again."""
    assert len(list_gpus()) == count_gpus() == len(list_gpus())
    assert len(doubles.calls("nvidia-smi")) == 1
    assert gpus_now() == list_gpus()
    assert len(doubles.calls("nvidia-smi")) == 2


def test_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0
    tool = tmp_path / "nvidia-smi"
    row = "echo '{0}, 9.0, 20, 5, 15, [N/A], [N/A], [N/A], 580.1, GPU-{0}, NVIDIA H200'\n"
    tool.write_text(f"#!/bin/sh\n{row.format(0)}{row.format(1)}")
    tool.chmod(0o755)
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,")
    assert count_gpus() == 1
