"""Facts about releases, checked against the compatibility page and the sources, row by row and not from our tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.doubles import convert_checkpoint
from trtserve.architectures import FAMILIES
from trtserve.cli.app import _command_line
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.releases import NEWEST, RELEASES, normalize_release, order, release_of
from trtserve.releases.containers import CONTAINERS, container, containers_of, shares_engines, source_build
from trtserve.releases.converters import CONVERTERS, converter_script, named_script
from trtserve.releases.installed import engine_route, has_engine_path, installed, require_engine_path
from trtserve.releases.launcher import launcher_facts


def test_releases_in_order() -> None:
    assert list(RELEASES) == sorted(RELEASES, key=order)
    assert (RELEASES[0], NEWEST) == ("0.12", "1.2")
    assert len(RELEASES) == 13


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.17.0.post1", "0.17"), ("1.0.3.2510", "1.0"), ("v1.2.1", "1.2"), ("1.3.0rc4", "1.3"), ("0.12", "0.12")],
)
def test_release_of_a_version(version: str, release: str) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize("text", ["", "latest", "1", "1.x", "24:08"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(UsageError, match="no version"):
        release_of(text)


def test_normalize_names_the_option() -> None:
    assert normalize_release("v1.2.1") == "1.2"
    with pytest.raises(UsageError, match=r"--trtllm-version is '1\.3'"):
        normalize_release("1.3", option="--trtllm-version")


@pytest.mark.parametrize(
    ("tag", "tensorrt_llm", "tensorrt", "cuda", "python"),
    [
        ("24.08", "0.12.0", "10.3.0", "12.5.1.007", "3.10"),
        ("24.11", "0.15.0", "10.6.0", "12.6.3", "3.10"),
        ("24.12", "0.16.0", "10.7.0", "12.6.3", "3.12"),
        ("25.02", "0.17.0.post1", "10.8.0.43", "12.8.0.038", "3.12"),
        ("25.07", "0.20.0", "10.10.0.31", "12.9.0.036", "3.12"),
        ("25.11", "1.0.3.2510", "10.13.3.9", "13.0.2.006", "3.12"),
        ("25.12", "1.1.0", "10.13.3.9", "13.0.2.006", "3.12"),
        ("26.03", "1.2.0", "10.14.1.48", "13.1.0.036", "3.12"),
        ("26.07", "1.2.1", "10.14.1.48", "13.1.0.036", "3.12"),
    ],
)
def test_containers(tag: str, tensorrt_llm: str, tensorrt: str, cuda: str, python: str) -> None:
    found = container(tag)
    assert (found.tensorrt_llm, found.tensorrt, found.cuda, found.python) == (tensorrt_llm, tensorrt, cuda, python)
    assert found.image == f"nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3"
    assert container(found.image) is found


def test_every_month_and_every_release_has_its_container() -> None:
    months = [f"{year}.{month:02}" for year in (24, 25, 26) for month in range(1, 13)]
    assert [each.tag for each in CONTAINERS] == months[months.index("24.08") : months.index("26.07") + 1]
    assert [each.tag for each in containers_of("1.0.0")] == ["25.09", "25.10", "25.11"]
    for release in RELEASES:
        assert containers_of(release), release


def test_an_unknown_container_is_refused() -> None:
    with pytest.raises(UsageError, match=r"24\.08 … 26\.07"):
        container("23.10")


def test_which_containers_share_engines() -> None:
    assert shares_engines(container("26.03"), container("26.07"))
    assert not shares_engines(container("25.10"), container("25.11"))  # another TensorRT
    assert not shares_engines(container("24.09"), container("24.10"))  # another TensorRT-LLM


def test_source_builds() -> None:
    old, new = source_build("0.12"), source_build("0.20")
    assert old.repository == "triton-inference-server/tensorrtllm_backend"
    assert "dockerfile/Dockerfile.trt_llm_backend" in old.commands[-1]
    assert old.base == "24.07"
    assert new.repository == "NVIDIA/TensorRT-LLM"
    assert new.commands[-1] == "make -C docker tritonrelease_build"
    assert source_build("1.2").base == "25.12"


@pytest.mark.parametrize(
    ("architecture", "release", "script"),
    [
        ("LlamaForCausalLM", "0.19", "examples/llama/convert_checkpoint.py"),
        ("LlamaForCausalLM", "0.20", "examples/models/core/llama/convert_checkpoint.py"),
        ("MixtralForCausalLM", "1.2", "examples/models/core/llama/convert_checkpoint.py"),
        ("Starcoder2ForCausalLM", "0.12", "examples/gpt/convert_checkpoint.py"),
        ("GPTNeoXForCausalLM", "1.0.0", "examples/models/contrib/gptneox/convert_checkpoint.py"),
        ("Gemma2ForCausalLM", "0.13", "examples/gemma/convert_checkpoint.py"),
        ("MPTForCausalLM", "1.0", "examples/models/contrib/mpt/convert_checkpoint.py"),
        ("RWForCausalLM", "0.12", "examples/falcon/convert_checkpoint.py"),
        ("PhiMoEForCausalLM", "0.14", "examples/phi/convert_checkpoint.py"),
        ("InternLM2ForCausalLM", "0.20", "examples/models/core/internlm2/convert_checkpoint.py"),
        ("ChatGLMModel", "0.19", "examples/chatglm/convert_checkpoint.py"),
        ("ChatGLMModel", "0.20", "examples/models/core/glm-4-9b/convert_checkpoint.py"),
        ("DeepseekV2ForCausalLM", "1.2", "examples/models/contrib/deepseek_v2/convert_checkpoint.py"),
    ],
)
def test_converters(architecture: str, release: str, script: str) -> None:
    assert converter_script(architecture, release) == script


def test_what_no_converter_takes() -> None:
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
def test_a_converter_that_the_user_names(folder: str, release: str, script: str) -> None:
    assert named_script(folder, release) == script


def test_every_family_and_every_architecture_of_the_doubles_has_a_converter() -> None:
    for family, architectures in convert_checkpoint._ARCHITECTURES.items():
        assert {CONVERTERS[architecture].folder for architecture in architectures} == {family}
    assert {name for name in FAMILIES if name != "Gemma3ForConditionalGeneration"} <= CONVERTERS.keys()


@pytest.mark.parametrize("release", RELEASES)
def test_launcher(release: str) -> None:
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
def test_folders_in_containers(release: str, examples: str) -> None:
    assert launcher_facts(release).examples == examples


def test_the_option_is_read_from_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = _command_line().commands["repo"]
    monkeypatch.setenv("TRTSERVE_TRTLLM_VERSION", "1.1.0")
    assert repo.make_context("repo", ["engine", "--tokenizer", "t"]).params["trtllm_version"] == "1.1.0"
    given = ["engine", "--tokenizer", "t", "--trtllm-version", "1.2.1"]
    assert repo.make_context("repo", given).params["trtllm_version"] == "1.2.1"


def test_the_way_of_engines() -> None:
    assert engine_route("0.21") == "tensorrt_llm.LLM"
    assert engine_route("1.0") == "tensorrt_llm._tensorrt_engine.LLM"
    assert has_engine_path("1.2")
    assert not has_engine_path("1.3")
    assert require_engine_path("1.2.1") == "1.2"


def test_engines_ended_with_1_2() -> None:
    with pytest.raises(UsageError, match=r"TensorRT-LLM 1\.3\.0 has no TensorRT engines any more") as caught:
        require_engine_path("1.3.0")
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


def test_the_option_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(tmp_path, tensorrt_llm="1.1.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = installed("v1.2.1")
    assert found is not None
    assert (found.version, found.release, found.tensorrt) == ("1.2.1", "1.2", "10.14.1.48")
    assert found.source == "--trtllm-version"
    with pytest.raises(UsageError, match="newest"):
        installed("newest")


def test_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed() is None
