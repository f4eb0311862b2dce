"""NVIDIA's template folders: the rules of its tool, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recorded_progress import Lines
from trtserve.cli import run
from trtserve.errors import RepositoryError, UsageError
from trtserve.repository.config import parse_config, read_config
from trtserve.repository.templates import fill_templates, parse_substitutions, write_filled

# The shape of NVIDIA's files: a comment, fields with bare placeholders, one block for each parameter.
CORE = """# Licence, with a ${placeholder} of its own
name: "tensorrt_llm"
backend: "${triton_backend}"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy {
  decoupled: ${decoupled_mode}
}
dynamic_batching {
    preferred_batch_size: [ ${triton_max_batch_size} ]
    max_queue_delay_microseconds: ${max_queue_delay_microseconds}
    default_queue_policy: { max_queue_size: ${max_queue_size} }
}
parameters: {
  key: "gpt_model_type"
  value: {
    string_value: "${batching_strategy}"
  }
}
parameters: {
  key: "gpu_device_ids"
  value: {
    string_value: "${gpu_device_ids}"
  }
}
parameters: {
  key: "guided_decoding_backend"
  value: {
    string_value: "${guided_decoding_backend}"
  }
}
"""
PREPROCESSING = """name: "preprocessing"
backend: "python"
max_batch_size: ${triton_max_batch_size}
parameters {
  key: "tokenizer_dir"
  value: {
    string_value: "${tokenizer_dir}"
  }
}
parameters {
  key: "multimodal_model_path"
  value: {
    string_value: "${multimodal_model_path}"
  }
}
"""
NEEDED = (
    "triton_max_batch_size:4,decoupled_mode:False,triton_backend:tensorrtllm,batching_strategy:inflight_fused_batching"
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, text in (("tensorrt_llm", CORE), ("preprocessing", PREPROCESSING)):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(text)
    (tmp_path / "models" / "tensorrt_llm" / "1" / "model.py").write_text("# program\n")
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("release", "text", "values"),
    [
        ("0.15", "a:1,b:/x", {"a": "1", "b": "/x"}),
        ("0.15", r"a:0\,b:1", {"a": "0\\", "b": "1"}),
        ("0.16", r"gpu_device_ids:0\,1", {"gpu_device_ids": "0,1"}),
        ("0.16", r"a:x\\:y,b:2", {"a": "x:y", "b": "2"}),
        ("1.2", r"a:c\\\\d", {"a": r"c\d"}),
        ("1.2", "a:", {"a": ""}),
    ],
)
def test_substitutions_are_split_as_in_each_release(release: str, text: str, values: dict[str, str]) -> None:
    assert parse_substitutions(text, release) == values


@pytest.mark.parametrize(
    ("release", "text"), [("0.15", "a:b:c"), ("0.15", "a:0,1"), ("0.16", r"a:x\:y"), ("1.2", "a"), ("1.2", "a:0,1")]
)
def test_invalid_substitutions_are_refused(release: str, text: str) -> None:
    with pytest.raises(UsageError, match="is not KEY:VALUE"):
        parse_substitutions(text, release)


def test_drop_unset_removes_optional_parameters(models: Path) -> None:
    filled = fill_templates(models, f"{NEEDED},tokenizer_dir:/t", release="0.19", drop_unset=True)
    configs = {path.parent.name: parse_config(text) for path, text in filled.items()}
    core = configs["tensorrt_llm"]
    assert (core.backend, core.max_batch_size, core.model_transaction_policy.decoupled) == ("tensorrtllm", 4, False)
    assert core.dynamic_batching.default_queue_policy.max_queue_size == 0
    # The C++ backend takes an empty list of GPUs for no GPU, and does not load without the other key.
    assert {key: value.string_value for key, value in core.parameters.items()} == {
        "gpt_model_type": "inflight_fused_batching",
        "guided_decoding_backend": "",
    }
    assert configs["preprocessing"].parameters["multimodal_model_path"].string_value == ""


def test_unfilled_placeholders_are_listed_with_file_and_line(models: Path) -> None:
    with pytest.raises(RepositoryError) as caught:
        fill_templates(models / "tensorrt_llm", NEEDED, release="0.19")
    assert f"{models}/tensorrt_llm/config.pbtxt, line 22: ${{gpu_device_ids}}" in str(caught.value)
    assert "${placeholder}" not in str(caught.value)
    assert "--drop-unset" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("value", "left"), [("a#${tag}", True), (r"a\"#${tag}", True), ("a", False)], ids=["quoted", "escaped", "comment"]
)
def test_a_placeholder_after_a_quoted_hash_is_found(value: str, left: bool, tmp_path: Path) -> None:
    config = tmp_path / "bls" / "config.pbtxt"
    config.parent.mkdir()
    config.write_text(f'name: "bls"\nbackend: "python"\ndefault_model_filename: "{value}"  # of ${{nobody}}\n')
    if left:
        with pytest.raises(RepositoryError, match=r"line 3: \$\{tag\}") as caught:
            fill_templates(tmp_path, "", release="0.19")
        assert "nobody" not in str(caught.value)
    else:
        assert fill_templates(tmp_path, "", release="0.19")


def test_drop_unset_keeps_placeholders_outside_parameters(models: Path) -> None:
    with pytest.raises(RepositoryError) as caught:
        fill_templates(models, "triton_max_batch_size:4,decoupled_mode:true", release="0.18", drop_unset=True)
    assert "max_queue_delay_microseconds" in str(caught.value)  # the tool fills it in from 0.19 on
    assert "${batching_strategy}" in str(caught.value)
    assert "max_queue_delay_microseconds:VALUE" in str(caught.value.hint)


def test_unknown_keys(models: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer_type\. tokenizer_type was a key .* until .* 0\.8"):
        fill_templates(models, f"{NEEDED},tokenizer_type:auto", release="0.19")
    heard = Lines()
    text = f"{NEEDED},tokenizer_type:auto,max_queue_delay_microseconds:0,gpu_device_ids:0,guided_decoding_backend:"
    assert fill_templates(models / "tensorrt_llm", text, release="0.18", progress=heard)
    assert "tokenizer_type" in heard.warnings[0]


def test_invalid_values_are_refused(models: Path) -> None:
    given = NEEDED.replace("batching_strategy:inflight_fused_batching", "batching_strategy:foo")
    assert "batching_strategy:foo" in given
    with pytest.raises(UsageError, match=r"batching_strategy:foo: expected .*inflight_fused_batching") as caught:
        fill_templates(models, f"{given},gpu_device_ids:all", drop_unset=True)
    assert "gpu_device_ids:all: expected" in caught.value.message


def test_out_does_not_change_the_templates(models: Path, tmp_path: Path) -> None:
    filled = fill_templates(models, f"{NEEDED},tokenizer_dir:/t", drop_unset=True)
    write_filled(models, filled, tmp_path / "out")
    assert (models / "tensorrt_llm" / "config.pbtxt").read_text() == CORE
    assert "${" not in (tmp_path / "out" / "preprocessing" / "config.pbtxt").read_text()
    assert (tmp_path / "out" / "tensorrt_llm" / "1" / "model.py").exists()
    with pytest.raises(UsageError, match="exists already"):
        write_filled(models, filled, tmp_path / "out")
    write_filled(models, filled, None)
    assert "${triton_backend}" not in (models / "tensorrt_llm" / "config.pbtxt").read_text()


def test_a_template_can_be_named_by_its_file(models: Path, tmp_path: Path) -> None:
    file = models / "tensorrt_llm" / "config.pbtxt"
    filled = fill_templates(file, NEEDED, release="0.19", drop_unset=True)
    write_filled(file, filled, tmp_path / "out")
    assert (tmp_path / "out" / "config.pbtxt").read_text() == filled[Path("config.pbtxt")]
    assert (tmp_path / "out" / "1" / "model.py").exists()
    assert file.read_text() == CORE
    write_filled(file, filled, None)
    assert file.read_text() == filled[Path("config.pbtxt")]


def test_an_out_folder_below_a_file_is_explained(models: Path, tmp_path: Path) -> None:
    filled = fill_templates(models / "tensorrt_llm", NEEDED, release="0.19", drop_unset=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a folder"):
        write_filled(models / "tensorrt_llm", filled, tmp_path / "file" / "out")


def test_a_template_that_is_not_utf_8_is_refused(models: Path) -> None:
    (models / "preprocessing" / "config.pbtxt").write_bytes(f"# für {PREPROCESSING}".encode("latin-1"))
    with pytest.raises(RepositoryError, match=r"preprocessing/config\.pbtxt is not UTF-8 text"):
        fill_templates(models, NEEDED, release="0.19")
    with pytest.raises(RepositoryError, match="is not UTF-8 text"):
        read_config(models / "preprocessing" / "config.pbtxt")


def test_a_file_that_triton_cannot_read_is_refused(models: Path) -> None:
    with pytest.raises(RepositoryError, match="not a Triton model configuration"):
        fill_templates(models, f"{NEEDED},tokenizer_dir:/t".replace(":4", ":four"), drop_unset=True)
    with pytest.raises(RepositoryError, match=r"has a config\.pbtxt"):
        fill_templates(models / "tensorrt_llm" / "1", "")


def test_unfilled_placeholders_of_all_files_are_listed_together(models: Path) -> None:
    with pytest.raises(RepositoryError) as caught:
        fill_templates(models, "decoupled_mode:true", release="0.19", drop_unset=True)
    told = str(caught.value)
    assert {name for name in ("preprocessing", "tensorrt_llm") if f"/{name}/config" in told} == {
        "preprocessing",
        "tensorrt_llm",
    }
    keys = str(caught.value.hint).splitlines()[0].partition(": ")[2].split(",")
    assert keys == ["triton_max_batch_size:VALUE"]


def test_options_for_engines_are_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["repo", "a:b", "--from-template", str(models), "--tokenizer", "t", "--suffix", "_b"]) == 2
    assert "--tokenizer, --suffix" in capsys.readouterr().err
