"""Which vLLM an interpreter has."""

from __future__ import annotations

import json
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.counting_vllm import PACKAGES, counting_python, gpu_repository
from trtserve.cli import run
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.executor.api import Executor, ExecutorConfig, ModelType, OutputConfig, Request, Response
from trtserve.executor.vllm.installation import VARIABLE, find_installation, require_installation
from trtserve.server.plan import plan_server
from trtserve.specs import ServerSpec
from trtserve.store import Store


def test_the_installation_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    python = counting_python(tmp_path)
    found = find_installation(str(python))
    assert found is not None
    assert (found.version, found.on_cpu, found.python) == ("0.32.0+cpu", True, python)
    monkeypatch.setenv(VARIABLE, str(python))
    assert require_installation() == found


def test_without_vllm_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(MissingDependencyError, match="needs vLLM, which is not installed here") as error:
        require_installation()
    assert "--vllm-python ~/vllm" in str(error.value.hint)
    with pytest.raises(MissingDependencyError, match="there is no interpreter"):
        require_installation(str(tmp_path / "nothing"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path("/bin/true"))
    with pytest.raises(MissingDependencyError, match="has no vLLM: it has no package vllm"):
        require_installation(str(tmp_path))


def test_a_server_takes_what_the_environment_names_then_what_its_repository_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (counting_python(tmp_path / name) for name in ("first", "second"))
    monkeypatch.setenv(VARIABLE, str(first))
    assert require_installation(recorded=str(second)).python == first
    monkeypatch.setenv(VARIABLE, "any")  # for an import: the vLLM of another machine
    assert require_installation(recorded=str(second)).python == second
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path))
    assert find_installation() is None
    monkeypatch.setenv(VARIABLE, "/nothing")
    with pytest.raises(MissingDependencyError, match=r"^TRTSERVE_VLLM_PYTHON /nothing: there is no interpreter"):
        require_installation()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(MissingDependencyError, match=r"^The repository's interpreter /gone: there is no interpreter"):
        require_installation(recorded="/gone")


def test_a_start_without_an_interpreter_is_refused_before_triton_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gpu_repository(tmp_path, device="cpu")
    (tmp_path / "vllm" / "python").unlink()
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(MissingDependencyError, match=r"^The repository's interpreter .* there is no interpreter"):
        plan_server(made, ServerSpec(), store=Store(tmp_path))


def test_an_old_vllm_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = version = '0.11.2'\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {package / '__init__.py'}\n")
    python.chmod(0o755)
    with pytest.raises(MissingDependencyError, match=r"vLLM 0.11.2 .* is too old; the vllm runtime needs 0.13"):
        require_installation(str(python))


def write_wheel(folder: Path) -> None:
    """Write the counting vLLM as a wheel."""
    folder.mkdir()
    own = {
        "METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / "vllm-0.32.0-py3-none-any.whl", "w") as wheel:
        for path in PACKAGES.rglob("*.py"):
            wheel.write(path, path.relative_to(PACKAGES))
        wheel.writestr("own.pth", sysconfig.get_path("purelib") + "\n")  # the packages that vLLM itself needs
        for name, text in own.items():
            wheel.writestr(f"vllm-0.32.0.dist-info/{name}", text)


def test_an_environment_of_its_own_is_made_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "index")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setattr("trtserve.executor.vllm.installation.list_gpus", tuple)
    words = ["import", "demo", "--runtime", "vllm", "--install-vllm"]
    assert run([*words, "0.32 --pre"]) == UsageError.code
    assert run([*words, "0.99.0"]) == MissingDependencyError.code
    assert "vLLM 0.99.0 cannot be installed" in capsys.readouterr().err
    assert run(words[:-1]) == MissingDependencyError.code  # before the name is taken
    assert Store().recorded() == []
    assert run([*words, "0.32.0", "--dry-run"]) == 0
    assert run([*words, "0.32.0"]) == 0
    found = require_installation()  # of the store, where no other one is named
    assert (found.version, found.python) == ("0.32.0+cpu", tmp_path / "home" / "vllm" / "bin" / "python")
    (core,) = (tmp_path / "home" / "repositories").glob("*/tensorrt_llm/1/config.json")
    assert json.loads(core.read_text())["trtserve"]["vllm_python"] == str(found.python)
    assert "it will not serve on this machine" in " ".join(capsys.readouterr().err.split())
    with Executor(core.parent, ModelType.DECODER_ONLY, ExecutorConfig()) as executor:
        asked = Request([10, 11], 3, output_config=OutputConfig(exclude_input_from_output=True))
        (response,) = executor.await_responses(executor.enqueue_request(asked))
    assert isinstance(response, Response)
    assert response.result.output_token_ids == [[12, 13, 14]]
