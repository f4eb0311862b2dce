"""Each check of the machine, on machines that lack what it looks for."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtserve.cli import run
from trtserve.cli.doctor import _lines
from trtserve.errors import MachineError, UsageError
from trtserve.host import machine
from trtserve.host.machine import install_command
from trtserve.server.doctor import EMBEDDED, EVERY, GPU, NONE, CheckResult, examination, look, stub, system
from trtserve.server.triton import installation, tritonserver
from trtserve.store import Store

GIB = 2**30


def broken(name: str, evidence: str, fix: str, *, needed_by: frozenset[str] = EMBEDDED) -> CheckResult:
    return CheckResult(group="triton", name=name, state="failed", evidence=evidence, fix=fix, needed_by=needed_by)


@pytest.mark.parametrize(
    ("version", "state"),
    [(("glibc", "2.35"), "ok"), (("glibc", "2.40"), "ok"), (("glibc", "2.31"), "failed"), (("", ""), "failed")],
)
def test_glibc(version: tuple[str, str], state: str) -> None:
    assert system.check_glibc(version).state == state


@pytest.mark.parametrize(
    ("name", "architecture", "state"),
    [
        ("Linux", "x86_64", "ok"),
        ("Linux", "aarch64", "ok"),
        ("Linux", "ppc64le", "failed"),
        ("Darwin", "arm64", "failed"),
    ],
)
def test_system(name: str, architecture: str, state: str) -> None:
    finding = system.check_system(name, architecture)
    assert (finding.state, finding.needed_by) == (state, EVERY)
    assert architecture in finding.evidence


@pytest.mark.parametrize(
    ("variables", "state", "evidence"),
    [
        ({}, "ok", "none in the environment"),
        ({"https_proxy": "", "no_proxy": "x"}, "ok", "none in the environment"),
        ({"HTTP_PROXY": "http://me:secret@p:3128"}, "warning", "HTTP_PROXY=http://…@p:3128: trtserve takes no proxy"),
        ({"grpc_proxy": "http://p", "no_proxy": "localhost"}, "warning", "grpc_proxy=http://p: trtserve takes"),
        ({"all_proxy": "socks5://p", "NO_PROXY": "localhost,127.0.0.1"}, "ok", "not for this machine (no_proxy)"),
    ],
)
def test_proxy(variables: dict[str, str], state: str, evidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    finding = system.check_proxy()
    assert (finding.state, "secret" in finding.evidence) == (state, False)
    assert evidence in finding.evidence


def test_cpu() -> None:
    new = system.check_cpu(frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "sse2"}), 8)
    assert (new.state, new.evidence) == ("ok", "8 cores, AVX2, AVX-512, VNNI, bfloat16")
    assert system.check_cpu(frozenset({"asimd", "sve", "bf16"}), 4).evidence == "4 cores, NEON, SVE, bfloat16"
    old = system.check_cpu(frozenset({"sse2"}), 2)
    assert old.state == "warning"
    assert "AVX2" in old.fix


def test_numpy() -> None:
    assert stub.check_numpy({"numpy": "1.26.4"}).state == "ok"
    new = stub.check_numpy({"numpy": "2.1.0"})
    assert (new.state, new.fix) == ("failed", "pip install 'numpy>=1.26,<2'")
    assert stub.check_numpy({"numpy": None}).state == "failed"


def test_python_of_another_environment_is_refused() -> None:
    here = {"version": list(sys.version_info[:2]), "prefix": sys.prefix}
    assert stub.check_python(here).state == "ok"
    assert "of /usr" in stub.check_python({**here, "prefix": "/usr"}).evidence
    assert stub.check_python({**here, "version": [3, 8]}).state == "failed"
    assert stub.check_python({}).state == "failed"


def test_python_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.check_python_version().state == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    new = system.check_python_version()
    assert (new.state, new.fix, new.needed_by) == ("failed", "Servers need Python 3.10 – 3.12.", EVERY)


def test_missing_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_stub = installation.Triton(executable=tmp_path / "tritonserver", backends=tmp_path / "backends")
    monkeypatch.setattr(installation, "installed", lambda: [no_stub])
    finding = stub.check_stub()
    assert (finding.state, finding.fix) == ("failed", "Use Python 3.10, 3.11 or 3.12.")


def test_without_triton_everything_that_it_brings_has_one_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "installed", list)
    for finding in (stub.check_triton(), stub.check_stub()):
        assert (finding.state, finding.fix) == ("failed", f"Install the package: {install_command('cpu')}")


def test_libpython(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(stub, "_linker_cache", lambda: "")
    assert stub.check_libpython().state == "failed"
    monkeypatch.setattr(stub, "_linker_cache", lambda: f"\t{name} (libc6,x86-64) => /lib/{name}")
    assert stub.check_libpython().state == "ok"
    monkeypatch.setattr(stub, "_linker_cache", lambda: "")
    (tmp_path / name).touch()
    assert stub.check_libpython().evidence == str(tmp_path / name)


def test_shared_memory(tmp_path: Path) -> None:
    assert system.check_shared_memory(tmp_path).state == "ok"
    assert system.check_shared_memory(tmp_path / "absent").state == "failed"
    small = system.check_shared_memory(tmp_path, least=2**62)
    assert (small.state, small.fix) == ("failed", "In Docker: --shm-size=1g.")
    tight = system.check_shared_memory(tmp_path, wanted=2**62)
    assert (tight.state, tight.fix) == ("warning", "In Docker: --shm-size=1g.")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 100)
    assert [system.check_memory(wanted).state for wanted in (50, 190)] == ["ok", "warning"]


def test_memory_names_the_limit_of_a_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("free_memory", 3), ("total_memory", 4), ("physical_memory", 64)):
        monkeypatch.setattr(machine, name, lambda count=count: count * GIB)
    evidence = system.check_memory(GIB).evidence
    assert evidence == "3.0 GiB free of 4.0 GiB (the limit of this process; the machine has 64.0 GiB)"


@pytest.mark.parametrize(("free", "state"), [(2**29, "failed"), (5 * GIB, "warning"), (100 * GIB, "ok")])
def test_disk(free: int, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "free_disk", lambda _path: free)
    finding = system.check_disk(Store(tmp_path / "store"))
    assert finding.state == state
    assert bool(finding.fix) == (state != "ok")


def test_a_store_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    finding = system.check_disk(Store(tmp_path / "store"))
    assert (finding.state, finding.evidence) == ("failed", f"{tmp_path} is not writable")


def test_taken_ports_name_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = tritonserver.Address(host="127.0.0.1", http_port=port, grpc_port=port, metrics_port=port)
        finding = system.check_ports(address, store)
    assert finding.state == "warning"
    assert finding.evidence.startswith(f"{port} is taken by process {os.getpid()}")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        first, second = one.getsockname()[1], two.getsockname()[1]
        address = tritonserver.Address(host="127.0.0.1", http_port=first, grpc_port=second, metrics_port=first)
        finding = system.check_ports(address, store)
    assert finding.evidence.startswith(f"{first}, {second} are taken by process {os.getpid()}")
    assert finding.evidence.count("taken") == 1
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_server(("127.0.0.1", 0)) as other:
        first, second = own.getsockname()[1], other.getsockname()[1]
        server = SimpleNamespace(name="demo", ports={first})
        monkeypatch.setattr(system, "list_servers", lambda _store: [server])
        for http, state in ((first, "ok"), (second, "warning")):
            address = tritonserver.Address(host="127.0.0.1", http_port=http, grpc_port=first, metrics_port=first)
            finding = system.check_ports(address, store)
            assert finding.state == state
            assert f"{first} is taken by your server demo" in finding.evidence


class Installed:
    """Distributions of an environment, as importlib.metadata lists them."""

    def __init__(self, versions: dict[str, str], requires: Mapping[str, Sequence[str]]) -> None:
        self._versions, self._requires = versions, requires

    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        for name, version in self._versions.items():
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            needs = "".join(f"Requires-Dist: {text}\n" for text in self._requires.get(name, ()))
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        monkeypatch.setattr(
            metadata,
            "distributions",
            lambda **_options: metadata.MetadataPathFinder.find_distributions(
                metadata.DistributionFinder.Context(path=[str(folder)])
            ),
        )
        monkeypatch.setattr(metadata, "distribution", self._one)

    def _one(self, name: str) -> metadata.Distribution:
        found = [each for each in metadata.distributions() if each.metadata["Name"] == name]
        if not found:
            raise metadata.PackageNotFoundError(name)
        return found[0]


def test_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requires = ["rich>=13", "numpy<2; extra == 'cpu'", "openvino>=2026; extra == 'cpu'", "torch; extra == 'oracle'"]
    here = {"trtserve": "0.1", "rich": "14.0", "numpy": "2.1.0"}
    Installed(here, {"trtserve": requires}).install(monkeypatch, tmp_path)
    assert system.check_packages("").state == "ok"
    wrong = system.check_packages("cpu")
    assert wrong.state == "failed"
    assert wrong.evidence == "numpy 2.1.0 (wanted <2), openvino missing (wanted >=2026)"
    assert wrong.fix == install_command("cpu")


def test_another_version_than_required_may_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Installed({"trtserve": "0.1", "rich": "12.0"}, {"trtserve": ["rich>=13"]}).install(monkeypatch, tmp_path)
    old = system.check_packages("")
    assert (old.state, old.evidence, old.fix) == ("warning", "rich 12.0 (wanted >=13)", install_command())


def test_packages_of_a_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Installed({"rich": "14.0"}, {}).install(monkeypatch, tmp_path)
    finding = system.check_packages("cpu")
    assert (finding.state, finding.fix) == ("warning", install_command("cpu"))


def test_conflicts_between_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requires = {"triton-cli": ["grpcio-tools==1.64.0", "fastapi>=0.1"], "rich": ["pygments>=2; python_version < '3'"]}
    here = {"triton-cli": "0.1.2", "grpcio-tools": "1.60.0", "rich": "14.0", "pygments": "1.0"}
    Installed(here, requires).install(monkeypatch, tmp_path)
    finding = system.check_conflicts()
    assert (finding.state, finding.evidence) == (
        "warning",
        "triton-cli 0.1.2: grpcio-tools 1.60.0 (wanted ==1.64.0)",
    )


def test_a_failure_counts_for_the_runtimes_that_need_it() -> None:
    finding = broken("stub", "none", "Install it.")
    assert [finding.judged(name).state for name in ("openvino", "llmapi")] == ["failed", "unneeded"]
    assert broken("docker", "none", "Install it.", needed_by=NONE).judged("llmapi").state == "unneeded"
    fine = CheckResult(group="gpu", name="driver", state="ok", evidence="580.1", needed_by=GPU)
    assert fine.judged("openvino") is fine


@pytest.mark.parametrize(
    ("error", "evidence", "fix"),
    [
        (ValueError("no number"), "could not be checked: ValueError: no number", "Check it yourself."),
        (UsageError("No such port.", hint="Use another."), "could not be checked: No such port", "Use another."),
    ],
)
def test_a_probe_that_breaks_is_a_finding(error: Exception, evidence: str, fix: str) -> None:
    def probe() -> CheckResult:
        raise error

    (finding,) = look("tools", "docker", probe)
    assert (finding.state, finding.evidence, finding.fix) == ("warning", evidence, fix)


def test_failures_become_one_error_with_every_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    findings = [
        broken("glibc", "glibc 2.31", "Newer system."),
        broken("numpy", "2.1.0", "Older NumPy."),
        broken("stub numpy", "2.1.0", "Older NumPy."),
        CheckResult(group="machine", name="ports", state="warning", evidence="taken", fix="Other ports."),
    ]
    monkeypatch.setattr(examination, "quick_checks", lambda: findings)
    with pytest.raises(MachineError, match=r"glibc: glibc 2\.31; numpy: 2\.1\.0") as caught:
        examination.require_machine(Store(tmp_path))
    assert caught.value.hint == "Newer system.\nOlder NumPy."


def test_a_path_stays_whole_on_a_terminal() -> None:
    path = "/" + "folder/" * 8 + "tritonserver"
    finding = CheckResult(group="triton", name="tritonserver", state="ok", evidence=path, fix="")
    assert [line.rstrip() for line in _lines(finding, 15, 79).plain.splitlines()] == [
        "  ok        tritonserver",
        f"    {path}",
    ]
    short = replace(finding, evidence="/bin/tritonserver")
    assert _lines(short, 15, 79).plain == "  ok        tritonserver   /bin/tritonserver"
    missing = broken("docker", "none", "Install it.", needed_by=NONE)
    assert "→ Install it." in _lines(missing, 15, 79).plain
    assert "Install it." not in _lines(missing.judged("llmapi"), 15, 79).plain, "nothing has to be done"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of an examination but the stub's is left out."""
    for part in ("_host", "_python", "_gpus", "_tensorrt_llm", "_tools"):
        monkeypatch.setattr(examination, part, lambda *_arguments: [])
    monkeypatch.setattr(stub, "quick_checks", lambda: [broken("stub", "none", "Install it.")])


@pytest.mark.usefixtures("bare")
def test_command_reports_failures_as_data_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--runtime", "openvino"]) == 30
    captured = capsys.readouterr()
    result = json.loads(captured.out)["result"]
    assert (result["runtime"], result["reason"], result["works"]) == ("openvino", "asked for", False)
    stub_finding = next(finding for finding in result["findings"] if finding["name"] == "stub")
    assert stub_finding == {
        "group": "triton",
        "name": "stub",
        "state": "failed",
        "evidence": "none",
        "fix": "Install it.",
        "needed_by": ["openvino", "torch", "vllm"],
    }
    assert "Install it." in captured.err
    assert run(["doctor", "--quiet", "--runtime", "openvino"]) == 30
    assert "triton\tstub\tfailed\tnone\tInstall it.\n" in capsys.readouterr().out


@pytest.mark.usefixtures("bare")
def test_a_failure_of_another_runtime_is_unneeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "_driver", lambda: (None, []))
    monkeypatch.setattr(installation, "installed", list)
    assert run(["doctor", "--json", "--runtime", "tensorrt_llm"]) == 0
    states = {f["name"]: f["state"] for f in json.loads(capsys.readouterr().out)["result"]["findings"]}
    assert states["stub"] == "unneeded"


def test_command_refuses_an_unknown_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--runtime", "sglang"]) == 2
    assert "expected one of auto, tensorrt_llm, llmapi, torch, vllm, openvino." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "added"),
    [("/usr/lib/x86_64-linux-gnu", False), ("/usr/lib64", False), ("/opt/python/lib", True), ("/usr/local/lib", True)],
)
def test_the_linkers_own_folders_are_not_named_again(folder: str, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _name: folder)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64")
    found = tritonserver.stub_environment()["LD_LIBRARY_PATH"].split(os.pathsep)
    assert found == ([folder] if added else []) + ["/opt/cuda/lib64"]
