"""The doubles of the converters: places and flags per release, checkpoints that the double of trtllm-build takes."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import convert_checkpoint, trtllm_build
from tests.support.doubles import Doubles

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "intermediate_size": 32},
    "qwen": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "intermediate_size": 32},
    "gemma": {"architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1, "intermediate_size": 32},
    "phi": {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 2, "intermediate_size": 32},
    "falcon": {"architectures": ["FalconForCausalLM"]},
    "gpt": {"architectures": ["GPT2LMHeadModel"]},
}
_SIZES = {"vocab_size": 32, "max_position_embeddings": 64}
_NAMES = {
    "gpt": {"n_embd": 16, "n_head": 4, "n_layer": 2},
    None: {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2},
}


def _model(folder: Path, family: str) -> str:
    folder.mkdir(exist_ok=True)
    config = _CONFIGS[family] | _SIZES | _NAMES.get(family, _NAMES[None])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def _folders(family: str, model: str, output: Path, tp: int) -> list[str]:
    if family == "gemma":
        return ["--ckpt-type", "hf", "--model-dir", model, "--output-model-dir", str(output), "--world-size", str(tp)]
    return ["--model_dir", model, "--output_dir", str(output), "--tp_size", str(tp)]


class Converter:
    """Runs the doubles in this process."""

    def __init__(self, folder: Path) -> None:
        self.doubles = Doubles(folder / "doubles")
        self.folder = folder

    def __call__(self, family: str, *arguments: str, tp: int = 2, **settings: Any) -> int:
        self.doubles.configure(**settings)
        model = _model(self.folder / family, family)
        words = [*_folders(family, model, self.folder / "checkpoint", tp), *arguments]
        return convert_checkpoint.main(words, self.doubles.folder, family=family, script="convert_checkpoint.py")

    def build(self) -> int:
        """Build what was converted."""
        words = ["--checkpoint_dir", str(self.folder / "checkpoint"), "--output_dir", str(self.folder / "engine")]
        return trtllm_build.main([*words, "--output_timing_cache", str(self.folder / "cache")], self.doubles.folder)


@pytest.fixture
def convert(tmp_path: Path) -> Converter:
    return Converter(tmp_path)


@pytest.mark.parametrize("family", list(_CONFIGS))
@pytest.mark.parametrize("container", ["24.08", "25.04", "26.07"])
def test_every_family_can_be_built(convert: Converter, family: str, container: str) -> None:
    assert convert(family, container=container) == 0
    assert convert.build() == 0
    assert len(list((convert.folder / "engine").glob("*.engine"))) == 2


@pytest.mark.parametrize(
    ("family", "arguments", "refusing", "taking"),
    [
        ("llama", ("--use_embedding_sharing",), "24.12", "24.08"),
        ("llama", ("--dtype", "auto"), "24.10", "24.11"),
        ("llama", ("--use_qserve",), "24.11", "24.12"),
        ("llama", ("--weight_only_precision", "w4a16_awq"), "25.04", None),
        ("llama", ("--moe_tp_mode", "1"), "24.08", None),
        ("llama", ("--dataset-cache-dir", "x"), "24.08", None),
        ("phi", ("--use_parallel_embedding",), "25.04", None),
        ("qwen", ("--fp8_kv_cache",), "25.04", None),
        ("gemma", ("--tp_size", "2"), "25.04", None),
        ("gemma", ("--int8_kv_cache",), "24.11", "24.12"),
        ("gpt", ("--gpt_variant", "jais"), "25.04", None),
    ],
)
def test_flags(convert: Converter, family: str, arguments: tuple[str, ...], refusing: str, taking: str | None) -> None:
    with pytest.raises(SystemExit) as caught:
        convert(family, *arguments, container=refusing)
    assert caught.value.code == 2
    if taking:
        assert convert(family, *arguments, container=taking) == 0


@pytest.mark.parametrize(
    ("family", "arguments", "text"),
    [
        ("phi", ("--pp_size", "2"), "Pipeline parallelism is not supported."),
        ("llama", ("--moe_tp_size", "2", "--moe_ep_size", "2"), "moe_tp_size * moe_ep_size must equal to tp_size"),
        ("llama", ("--pp_size", "4"), "must be divisible by pp_size"),
    ],
)
def test_refusals(
    convert: Converter, family: str, arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(family, *arguments) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "code", "buildable"),
    [("exit", 1, False), ("missing_rank", 0, False), ("cut_rank", 0, False), ("no_config", 0, False)],
)
def test_faults(convert: Converter, fault: str, code: int, buildable: bool) -> None:
    assert convert("llama", convert_fault=fault) == code
    assert (convert.build() == 0) is buildable


@pytest.mark.parametrize(
    ("arguments", "algorithm"),
    [
        (("--use_weight_only",), "W8A16"),
        (("--use_weight_only", "--weight_only_precision", "int4"), "W4A16"),
        (("--smoothquant", "0.5", "--per_token", "--per_channel"), "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"),
        (("--smoothquant", "0.5"), "W8A8_SQ_PER_TENSOR_PLUGIN"),
        (("--use_fp8",), "FP8"),
    ],
)
def test_quantization(convert: Converter, arguments: tuple[str, ...], algorithm: str) -> None:
    assert convert("llama", *arguments) == 0
    config = json.loads((convert.folder / "checkpoint" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization"]["quant_algo"] == algorithm
    assert convert.build() == 0


def test_examples_lie_where_the_release_has_them(doubles: Doubles, tmp_path: Path) -> None:
    assert (doubles.examples("0.19") / "llama" / "convert_checkpoint.py").exists()
    examples = doubles.examples("1.0")
    assert not (examples / "llama").exists()
    assert (examples / "models" / "contrib" / "falcon" / "convert_checkpoint.py").exists()
    model = _model(tmp_path / "model", "llama")
    for script, words in (
        ("models/core/llama/convert_checkpoint.py", ["--dtype", "float16"]),
        ("quantization/quantize.py", ["--qformat", "int4_awq", "--kv_cache_dtype", "int8"]),
    ):
        command = [sys.executable, str(examples / script), "--model_dir", model, "--output_dir", str(tmp_path / "out")]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, check=True)
        assert "version: 1.0." in done.stdout.splitlines()[0]
        assert (tmp_path / "out" / "rank0.safetensors").exists()
    assert [call.tool for call in doubles.calls()] == ["convert_checkpoint.py", "quantize.py"]


def test_metadata_of_an_installation(doubles: Doubles) -> None:
    folder = str(doubles.packages("0.18.2"))
    found = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions(path=[folder])}
    assert found == {"tensorrt-llm": "0.18.2", "tensorrt": "10.9.0.34"}
    done = subprocess.run(
        [sys.executable, "-c", "import tensorrt_llm"], env={"PYTHONPATH": folder}, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert len(doubles.calls("import tensorrt_llm")) == 1
