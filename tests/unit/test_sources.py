"""What a source means, and the name that follows from it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.cli import run
from trtserve.errors import MemoryLimitError, ModelNotFoundError, UsageError
from trtserve.pipeline.estimate import Question, known_models, list_known, plan_needs, require_fit
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.store.sources import ALIASES, RESERVED_NAMES, other_meaning, parse_source, served_name


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "kind", "location", "revision", "name"),
    [
        ("demo", "demo", None, None, "demo"),
        ("llama-2-7b", "hub", "meta-llama/Llama-2-7b-hf", None, "llama-2-7b"),
        ("gpt2@607a30d", "hub", "openai-community/gpt2", "607a30d", "gpt2"),
        ("org/My.Model_1", "hub", "org/My.Model_1", None, "My.Model_1"),
        ("org/model@refs/pr/1", "hub", "org/model", "refs/pr/1", "model"),
        ("hf:org/model@main", "hub", "org/model", "main", "model"),
        ("hf:llama-3-8b", "hub", "meta-llama/Meta-Llama-3-8B", None, "llama-3-8b"),
    ],
)
def test_reads_sources(text: str, kind: str, location: str | None, revision: str | None, name: str) -> None:
    source = parse_source(text)
    assert (source.kind, source.revision, source.name) == (kind, revision, name)
    if location is not None:
        assert source.location == location


def test_existing_folder_is_never_a_hub_id(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    for text in ("org/model", "./org/model", str(folder), "local:org/model"):
        source = parse_source(text)
        assert (source.kind, source.location) == ("folder", str(folder))
    assert parse_source("hf:org/model").kind == "hub"


def test_alias_gives_way_to_a_folder_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    assert parse_source("gpt2").kind == "hub"
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    assert parse_source("gpt2").kind == "folder"


def test_a_folder_that_hides_another_model_is_reported(tmp_path: Path) -> None:
    for name in ("gpt2", "demo", "org/model", "mine"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert other_meaning(parse_source("gpt2")) == (
        f"The folder {tmp_path / 'gpt2'} is used for gpt2; hf:gpt2 is the model on the hub."
    )
    assert "hf:org/model is" in str(other_meaning(parse_source("org/model")))
    assert "run this in another folder" in str(other_meaning(parse_source("demo")))
    for plain in ("./gpt2", "local:gpt2", "hf:gpt2", str(tmp_path / "gpt2"), "mine", "gpt2-xl"):
        assert other_meaning(parse_source(plain)) is None


def test_import_warns_of_a_folder_in_the_place_of_an_alias(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path / "home"))
    write_tiny_model(tmp_path / "gpt2")
    for command in ("import", "plan"):
        assert run([command, "gpt2", *(["--dry-run"] if command == "import" else [])]) == 0
        assert "hf:gpt2 is the model on the hub" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ["./absent", "/absent", "~/absent/model", "a/b/c", "absent/", "local:absent"])
def test_missing_path_is_not_asked_for_on_the_hub(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="not a folder"):
        parse_source(text)


@pytest.mark.parametrize("text", ["lama-2-7b", "unknown", "org/", "org/model@", "org/mo del", "hf:unknown", ""])
def test_refuses_texts_that_name_no_source(text: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        parse_source(text)
    assert caught.value.code == 10


@pytest.mark.parametrize(
    ("page", "model"),
    [
        ("https://hub.example/gpt2", "gpt2"),
        ("https://hub.example/org/name", "org/name"),
        ("https://hub.example/gpt2/tree/main", "gpt2"),
        ("http://hub.example/org/name/tree/main", "org/name"),
    ],
)
def test_the_address_of_a_page_is_answered_with_the_name_of_its_model(page: str, model: str) -> None:
    with pytest.raises(UsageError, match="is the address of a page") as caught:
        parse_source(page)
    assert str(caught.value.hint).endswith(f": {model}")


def test_a_missing_gguf_file_is_named_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-q4.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"\./tiny-q8\.gguf is not a file on this machine") as caught:
        parse_source("./tiny-q8.gguf")
    assert caught.value.hint == "Did you mean tiny-q4.gguf?"
    with pytest.raises(ModelNotFoundError, match="is not a file") as caught:
        parse_source("org/other.gguf")
    assert caught.value.hint == "GGUF files there: none. A repository of the hub is named hf:org/other.gguf."


def test_suggests_close_aliases() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        parse_source("lama-2-7b")
    assert "llama-2-7b" in str(caught.value.hint)


def test_names_are_derived_or_given(tmp_path: Path) -> None:
    folder = tmp_path / "my model (v2)"
    folder.mkdir()
    assert parse_source(str(folder)).name == "my-model-v2"
    assert parse_source(str(folder), name="short").name == "short"


@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES), "a/b", "..", ".hidden", "", "with space"])
def test_refuses_names(name: str) -> None:
    with pytest.raises(UsageError):
        served_name(name)


def test_reserved_folder_name_asks_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "ensemble").mkdir()
    with pytest.raises(UsageError, match="a Triton model in every repository") as caught:
        parse_source("./ensemble")
    assert "--name" in str(caught.value.hint)
    assert parse_source("./ensemble", name="mine").name == "mine"


def test_aliases_are_hub_ids_and_names() -> None:
    for alias, repository in ALIASES.items():
        assert served_name(alias) == alias
        assert repository.count("/") == 1


def test_every_alias_has_shapes() -> None:
    """Planning needs no network; the counts are those of the models' own pages."""
    known = {model.alias: model for model in known_models()}
    assert known.keys() == ALIASES.keys()
    billions = {alias: round(model.parameters / 1e9, 2) for alias, model in known.items()}
    assert billions["llama-2-7b"] == 6.74
    assert billions["llama-3.2-1b"] == 1.24, "tied matrices count once"
    assert (billions["qwen2.5-0.5b-instruct"], billions["gemma-2-2b-it"], billions["phi-3-mini"]) == (0.49, 2.61, 3.82)
    assert not known["smollm2-135m-instruct"].gated
    published = {"smollm3-3b": 3.08, "granite-3.3-2b-instruct": 2.53, "olmo-2-1b-instruct": 1.48, "glm-4-9b": 9.4}
    published |= {"olmoe-1b-7b-instruct": 6.92, "ernie-4.5-0.3b": 0.36, "qwen3-30b-a3b": 30.53, "phi-2": 2.78}
    published |= {"mixtral-8x7b-instruct": 46.7, "internlm3-8b-instruct": 8.8, "seed-oss-36b-instruct": 36.15}
    assert {alias: billions[alias] for alias in published} == published


def test_an_alias_is_planned_without_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["plan", "llama-2-7b", "--gpu", "h100-80gb"]
    assert run(words) == 0
    assert "meta-llama/Llama-2-7b-hf, from the table in trtserve" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["parameters"], result["shipped_shapes"]) == (6738415616, True)
    assert result["source_bytes"] == 2 * result["parameters"]


def test_models_are_listed_with_what_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["models", "--json"]) == 0
    listed = {each["alias"]: each for each in json.loads(capsys.readouterr().out)["result"]}
    assert listed.keys() == ALIASES.keys()
    small = listed["smollm2-135m-instruct"]
    assert (small["repository"], small["licence"], small["gated"]) == (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
        False,
    )
    assert small["source_bytes"] == 2 * small["parameters"]
    assert listed["llama-3.3-70b-instruct"]["licence"] == "llama3.3"
    assert {each["fits"] for each in listed.values()} <= {"yes", "int8", "int4", "no", None}
    assert all(bool(each["reason"]) == (each["fits"] in ("no", None)) for each in listed.values())
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 0)
    assert run(["models"]) == 0
    assert "gated\tno: 32.1 GiB of weights in " in capsys.readouterr().out


@pytest.mark.parametrize("mib", [600, 1000, 1300, 1600, 4000])
def test_the_list_of_models_says_what_plan_says(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs it plans no conversion: those of 50 models took five seconds."""
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: mib << 20)
    name = "qwen2.5-0.5b-instruct"
    found: str | None = None
    quantizes: tuple[Literal["none", "int8", "int4"], ...] = ("none", "int8", "int4")
    for quantize in quantizes:
        question = Question(convert=ConvertSpec(quantize=quantize), build=BuildSpec(runtime="openvino"))
        with suppress(MemoryLimitError):
            require_fit(plan_needs(name, question))
            found = found or ("yes" if quantize == "none" else quantize)
    monkeypatch.setattr("trtserve.pipeline.estimate.automatic_runtime", lambda: ("openvino", ""))
    monkeypatch.delattr("trtserve.pipeline.estimate.plan_own_conversion")
    ((_, listed),) = list_known([name])
    assert listed.fit == (found or "no")
    assert found == {600: None, 4000: "yes"}.get(mib, found)  # between them the libraries that are loaded count


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama3", "llama-3.2-1b-instruct or llama-3.2-3b-instruct or llama-3-8b-instruct?"),
        ("Gemma", "gemma-3-1b-it or gemma-2-2b-it?"),
        ("lama-3-8b", "llama-3-8b"),
    ],
)
def test_small_chat_models_are_suggested_first(typed: str, meant: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        parse_source(typed)
    assert f"Did you mean {meant}" in str(caught.value.hint)
