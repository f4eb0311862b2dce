"""Memory that the cgroups around this process and its own limit leave free, and how hints install what is missing."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest

from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.errors import MemoryLimitError
from trtserve.host import machine
from trtserve.host.machine import available_memory, fastest, install_command, require_memory, to_be_mapped
from trtserve.specs import ConvertSpec

GIB = 2**30


def _memory_group(folder: Path, limit: str, used: int, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {10 * 2**20}\ntotal_inactive_file {10 * 2**20}\n")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the cgroups; this process is in /outer/inner of version 2 and /one/two of version 1."""
    (tmp_path / "own").write_text("4:cpu,memory:/one/two\n3:cpuset:/\n0::/outer/inner\n")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def test_the_limit_of_a_cgroup_counts(tmp_path: Path, cgroups: Path) -> None:
    """In a container the own group is the root, whatever its path outside is."""
    model = Model(path=write_tiny_model(tmp_path / "tiny"))
    _memory_group(cgroups, str(64 * 2**20), 60 * 2**20)
    with pytest.raises(MemoryLimitError, match="14 MiB are free"):
        convert_model(model, ConvertSpec(), out=tmp_path / "checkpoint")
    assert machine.total_memory() == 64 * 2**20


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({"outer": ("max", 0), "outer/inner": (str(50 * 2**20), 30 * 2**20)}, 30 * 2**20),
        ({"outer": (str(40 * 2**20), 35 * 2**20), "outer/inner": (str(50 * 2**20), 20 * 2**20)}, 15 * 2**20),
        ({"outer": (str(40 * 2**20), 60 * 2**20), "outer/inner": ("max", 0)}, 0),
        ({"other": (str(2**20), 0), "outer/inner": ("max", 0)}, None),
        ({"outer/inner": ("no number", 0)}, None),
    ],
)
def test_limits_of_groups_around_count_too(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]], free: int | None
) -> None:
    for name, (limit, used) in groups.items():
        _memory_group(cgroups / name, limit, used)
    assert (machine.free_memory() == free) if free is not None else (machine.free_memory() > 100 * 2**20)


def test_cgroups_of_version_1_count(cgroups: Path) -> None:
    _memory_group(cgroups / "memory", str(2**63 - 4096), 0, version=1)
    _memory_group(cgroups / "memory" / "one" / "two", str(50 * 2**20), 30 * 2**20, version=1)
    assert machine.free_memory() == 30 * 2**20
    assert machine.total_memory() == 50 * 2**20


def test_a_limit_of_addresses_counts_with_what_is_still_to_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "address_space", lambda: machine.AddressSpace(limit=3 * GIB, used=GIB))
    monkeypatch.setattr("trtserve.host.machine.address_space", machine.address_space)
    assert machine.free_memory() == 2 * GIB
    assert machine.total_memory() == 3 * GIB
    require_memory(GIB, "X needs", str, mapped=GIB)
    with pytest.raises(MemoryLimitError, match=r"X needs 1\.0 GiB of memory; 1023 MiB are free \(ulimit -v") as caught:
        require_memory(GIB, "X needs", str, mapped=GIB + 2**20)
    assert str(caught.value.hint) == f"Raise the limit: ulimit -v unlimited. Else: {GIB - 2**20}"
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 2**20)
    assert available_memory(0).advice == ""


def test_loaded_libraries_are_mapped_already(monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_be_mapped("sys", files=7) == 7
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    assert to_be_mapped("openvino", files=7) > 2**28


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 MiB"), (512, "512 bytes"), (300 * 2**10, "300 KiB"), (20.4 * 2**20, "20 MiB"), (1.5 * GIB, "1.5 GiB")],
)
def test_sizes_have_one_format(count: float, text: str) -> None:
    assert machine.format_bytes(count) == text


ROOT = Path(__file__).parents[2]


def test_a_clone_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("cpu") == "pip install --editable '.[cpu]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("oracle") == f"pip install --editable '{ROOT}[oracle]'"
    assert install_command() == f"pip install --editable {ROOT}"


def test_an_installation_from_an_index_has_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "site-packages" / "trtserve" / "host" / "x.py"))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: _Distribution())
    assert install_command("cpu") == "pip install 'trtserve[cpu]'"


class _Distribution:
    def read_text(self, name: str) -> str | None:
        return None


def test_work_is_timed_at_least_once_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run takes 100 s, longer than all that is measured; the others 3, 2 and 4 s."""
    clock, runs = [0.0], iter([100.0, 3.0, 2.0, 4.0])
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"trtserve.host.machine.time.{name}", lambda: clock[0])

    def work() -> None:
        clock[0] += next(runs)

    assert fastest(work, seconds=1.0) == 3.0
    assert fastest(work, seconds=1.0) == 4.0  # after one of 2 s that prepares


@pytest.mark.parametrize("runtime", ["openvino", pytest.param("torch", marks=pytest.mark.needs("torch"))])
def test_a_busy_machine_has_a_speed(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure matrices while an hour passes between two looks at the clock."""
    module = importlib.import_module(f"trtserve.executor.{runtime}.speed")
    hours = itertools.count(step=3600)
    monkeypatch.setattr("trtserve.host.machine.time.monotonic", lambda: float(next(hours)))
    monkeypatch.setattr(module, "_ROWS", 2)
    assert all(0 < each < math.inf for each in module.matrix_speed())
