"""Facts about releases, checked against the compatibility page and the sources, row by row and not from our tables."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.doubles import convert_checkpoint
from tests.doubles.containers import CONTAINERS
from tests.support.families import FAMILIES
from tests.support.unsupported_release import ENGINELESS, ENGINELESS_RELEASE
from trtserve.cli.app import command_tree
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.nvidia.releases import LAST_WITH_ENGINES, NEWEST, RELEASES, normalize_release, order, release_of
from trtserve.nvidia.releases.containers import (
    all_containers,
    container,
    containers_of,
    kernels,
)
from trtserve.nvidia.releases.converters import converter_script, converters, launcher_facts, named_script
from trtserve.nvidia.releases.installed import has_engine_path, installed, require_engine_path
from trtserve.nvidia.releases.loaders import keys_of_release
from trtserve.nvidia.releases.options import all_build_flags

GENERATE = Path(__file__).parents[2] / "docs" / "generate.py"


def test_releases_are_listed_in_order() -> None:
    assert list(RELEASES) == sorted(RELEASES, key=order)
    assert RELEASES[-1] == NEWEST


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.17.0.post1", "0.17"), ("1.0.3.2510", "1.0"), ("v1.2.1", "1.2"), ("1.3.0rc4", "1.3"), ("0.12", "0.12")],
)
def test_release_of_a_version(version: str, release: str) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize("text", ["", "latest", "1", "1.x", "24:08"])
def test_other_text_is_not_a_version(text: str) -> None:
    with pytest.raises(UsageError, match="not a version"):
        release_of(text)


def test_normalize_names_the_option() -> None:
    assert normalize_release("v1.2.1") == "1.2"
    with pytest.raises(UsageError, match=r"--trtllm-version is '9\.9'"):
        normalize_release("9.9", option="--trtllm-version")


def test_versions_in_containers_are_those_of_the_compatibility_page() -> None:
    """The doubles have their own copy of the page."""
    for tag, row in CONTAINERS.items():
        found = container(tag)
        assert (found.tensorrt_llm, found.tensorrt) == (row.tensorrt_llm, row.tensorrt)
        assert (found.cuda, found.python) == (row.cuda, row.python)
        assert container(f"nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3") is found


def test_every_month_and_every_release_has_its_container() -> None:
    months = [f"{year}.{month:02}" for year in (24, 25, 26) for month in range(1, 13)]
    assert [each.tag for each in all_containers()] == months[months.index("24.08") : months.index("26.07") + 1]
    assert [each.tag for each in containers_of("1.0.0")] == ["25.09", "25.10", "25.11"]
    for release in RELEASES:
        assert containers_of(release), release


def test_an_unknown_container_is_refused() -> None:
    with pytest.raises(UsageError, match=r"24\.08 … 26\.07"):
        container("23.10")


def test_containers_can_be_built_from_source() -> None:
    source_build = runpy.run_path(str(GENERATE))["source_build"]
    assert all(source_build(release).commands for release in RELEASES)
    old, new = source_build("0.12"), source_build("0.20")
    assert old.repository == "triton-inference-server/tensorrtllm_backend"
    assert "dockerfile/Dockerfile.trt_llm_backend" in old.commands[-1]
    assert new.repository == "NVIDIA/TensorRT-LLM"
    assert new.commands[-1] == "make -C docker tritonrelease_build"


@pytest.mark.parametrize(
    ("architecture", "release", "script"),
    [
        ("LlamaForCausalLM", "0.19", "examples/llama/convert_checkpoint.py"),
        ("LlamaForCausalLM", "0.20", "examples/models/core/llama/convert_checkpoint.py"),
        ("Starcoder2ForCausalLM", "0.12", "examples/gpt/convert_checkpoint.py"),
        ("Gemma2ForCausalLM", "0.13", "examples/gemma/convert_checkpoint.py"),
        ("ChatGLMModel", "0.19", "examples/chatglm/convert_checkpoint.py"),
        ("ChatGLMModel", "0.20", "examples/models/core/glm-4-9b/convert_checkpoint.py"),
        ("DeepseekV2ForCausalLM", "1.2", "examples/models/contrib/deepseek_v2/convert_checkpoint.py"),
    ],
)
def test_converter_script_of_an_architecture(architecture: str, release: str, script: str) -> None:
    assert converter_script(architecture, release) == script


def test_architectures_without_a_converter_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"0\.13 is the first"):
        converter_script("Gemma2ForCausalLM", "0.12")
    with pytest.raises(UnsupportedModelError, match="NoSuchModel"):
        converter_script("NoSuchModel", "1.2")


@pytest.mark.parametrize(
    ("folder", "release", "script"),
    [
        ("llama", "0.19", "examples/llama/convert_checkpoint.py"),
        ("mpt", "0.20", "examples/models/contrib/mpt/convert_checkpoint.py"),
        ("mine", "1.2", "examples/models/core/mine/convert_checkpoint.py"),
        ("contrib/mine/", "1.2", "examples/models/contrib/mine/convert_checkpoint.py"),
        ("contrib/mine", "0.18", "examples/mine/convert_checkpoint.py"),
    ],
)
def test_a_converter_folder_can_be_named(folder: str, release: str, script: str) -> None:
    assert named_script(folder, release) == script


def test_every_architecture_of_the_doubles_has_a_converter() -> None:
    for folder, architectures in convert_checkpoint._ARCHITECTURES.items():
        assert {converters()[architecture].folder for architecture in architectures} == {folder}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.nvidia])
def test_every_family_that_nvidia_has_is_in_the_table_of_converters(name: str) -> None:
    family = FAMILIES[name]
    assert family.architecture in converters(), (
        f"{family.architecture} is not in trtserve/nvidia/releases/converters.yaml. Add it below the folder of its "
        "convert_checkpoint.py, with the first release that has it. If none has, set nvidia=False in its row in "
        "tests/support/families: --converter upstream then refuses it, and --converter own converts it for OpenVINO."
    )
    assert converters()[family.architecture].since == family.since


@pytest.mark.parametrize("release", RELEASES)
def test_launcher_facts_of_a_release(release: str) -> None:
    facts = launcher_facts(release)
    assert facts.ports_twice == facts.no_mpi == (order(release) >= (0, 19))
    assert facts.exit_timeout == facts.llmapi_launch == (order(release) >= (1, 0))
    assert facts.spawn_switch == facts.memory_pools == (release != "0.12")


@pytest.mark.parametrize(
    ("release", "examples"),
    [
        ("0.16", "/tensorrtllm_backend/tensorrt_llm/examples"),
        ("0.18", "/app/examples"),
        ("0.19", "/app/tensorrt_llm/examples"),
    ],
)
def test_examples_folder_in_containers(release: str, examples: str) -> None:
    assert launcher_facts(release).examples == examples


def test_trtllm_version_is_read_from_one_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = command_tree().commands["repo"]
    monkeypatch.setenv("TRTSERVE_TRTLLM_VERSION", "1.1.0")
    assert repo.make_context("repo", ["engine", "--tokenizer", "t"]).params["trtllm_version"] == "1.1.0"
    given = ["engine", "--tokenizer", "t", "--trtllm-version", "1.2.1"]
    assert repo.make_context("repo", given).params["trtllm_version"] == "1.2.1"


def test_engines_exist_until_the_last_release_with_them() -> None:
    assert has_engine_path(LAST_WITH_ENGINES)
    assert not has_engine_path(ENGINELESS_RELEASE)
    assert require_engine_path(f"{LAST_WITH_ENGINES}.1") == LAST_WITH_ENGINES


def test_releases_without_engines_are_refused_with_alternatives() -> None:
    with pytest.raises(
        UsageError, match=rf"TensorRT-LLM {re.escape(ENGINELESS)} has no TensorRT engines any more"
    ) as caught:
        require_engine_path(ENGINELESS)
    assert "removed after 1.2" in caught.value.message
    assert "--runtime llmapi" in str(caught.value.hint)
    assert "26.07" in str(caught.value.hint)


def test_older_releases_are_refused() -> None:
    with pytest.raises(UsageError, match=r"older than 0\.12"):
        require_engine_path("0.9.0")


def _environment(prefix: Path, **packages: str) -> Path:
    """An environment as pip leaves it, with a trtllm-build and with packages that must not be imported."""
    folder = prefix / "lib" / "python3.12" / "site-packages"
    for name, version in packages.items():
        information = folder / f"{name}-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "trtllm-build").write_text("#!/bin/sh\n")
    (prefix / "bin" / "trtllm-build").chmod(0o755)
    return folder


def test_the_installed_version_is_read_from_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _environment(tmp_path, tensorrt_llm="1.1.0", tensorrt="10.13.3.9")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = installed()
    assert found is not None
    assert (found.version, found.release, found.tensorrt) == ("1.1.0", "1.1", "10.13.3.9")
    assert (found.source, found.environment) == ("package metadata", folder)
    assert "tensorrt_llm" not in sys.modules


def test_a_linked_trtllm_build_leads_to_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv").mkdir()
    _environment(tmp_path / "venv", tensorrt_llm="0.20.0")
    links = tmp_path / "links" / "bin"
    links.mkdir(parents=True)
    (links / "trtllm-build").symlink_to(tmp_path / "venv" / "bin" / "trtllm-build")
    monkeypatch.setenv("PATH", str(links))
    found = installed()
    assert found is not None
    assert (found.version, found.tensorrt) == ("0.20.0", "10.10.0.31")  # that of its containers


def test_trtllm_version_overrides_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(tmp_path, tensorrt_llm="1.1.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = installed("v1.2.1")
    assert found is not None
    assert (found.version, found.release, found.tensorrt) == ("1.2.1", "1.2", "10.14.1.48")
    assert found.source == "--trtllm-version"
    with pytest.raises(UsageError, match="newest"):
        installed("newest")


def test_nothing_is_found_without_tensorrt_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed() is None


def test_every_release_named_in_a_table_is_a_supported_one() -> None:
    """YAML reads an unquoted 0.20 as the number 0.2."""
    rows = [*all_build_flags(), *kernels(), *converters().values()]
    for row in rows:
        assert {row.since, row.until or NEWEST} <= {*RELEASES}, row
    for release in RELEASES:
        assert keys_of_release("mapping", {"tp_size": 1}, architecture="LlamaForCausalLM", release=release)
