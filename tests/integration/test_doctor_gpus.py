"""What doctor reads from the output of nvidia-smi."""

from __future__ import annotations

import sys

import pytest

from tests.support.doubles import Doubles
from trtserve.errors import MachineError
from trtserve.host.nvidia import Driver, find_gpus
from trtserve.server.doctor import gpus


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.usefixtures("without_nvml")
def test_nvidia_smi_reports_the_same_gpus_as_nvml(doubles: Doubles) -> None:
    doubles.configure(gpus=2, container="25.12", driver="580.95.05", gpu_name="NVIDIA H200", gpu_memory_mib=143771)
    found = find_gpus()
    assert found.driver == Driver(version="580.95.05", cuda=(13, 0))
    assert (found.source, found.apart) == ("nvidia-smi", ())
    assert [device.index for device in found.devices] == [0, 1]
    second = gpus.check_device(found.devices[1])
    assert second.evidence.startswith("NVIDIA H200, compute capability 9.0, 140.4 GiB free of 140.4 GiB, MIG off")
    assert "nvidia-ml-py is not installed" in gpus.check_driver(found).evidence


@pytest.mark.usefixtures("without_nvml")
@pytest.mark.parametrize(("apart", "pairs"), [("0-2,1-3", ((0, 2), (1, 3))), ("", ())])
def test_nvidia_smi_reports_links_between_gpus(
    apart: str, pairs: tuple[tuple[int, int], ...], doubles: Doubles
) -> None:
    doubles.configure(gpus=4, gpus_apart=apart)
    assert find_gpus().apart == pairs


@pytest.mark.usefixtures("without_nvml")
def test_nvidia_smi_without_a_driver(doubles: Doubles) -> None:
    doubles.configure(gpus=0)
    with pytest.raises(MachineError, match="couldn't communicate with the NVIDIA driver"):
        find_gpus()
