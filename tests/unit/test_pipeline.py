"""What an import needs is known before the pull, and the advice that is given really fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtserve.artifacts import Engine
from trtserve.errors import MemoryLimitError
from trtserve.pipeline import engine_destination
from trtserve.pipeline.capacity import Need, Wish, draft_bytes, need_of, require_memory
from trtserve.specs import BuildSpec, ConvertSpec

GIB = 2**30

# Sizes of Llama 2 7B as published in its config.json.
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float16",
}


def _wish(**changes: Any) -> Wish:
    convert = ConvertSpec(dtype=changes.pop("dtype", "auto"), quantize=changes.pop("quantize", "none"))
    kv_tokens = changes.pop("kv_tokens", None)
    return Wish(hf=LLAMA_2_7B, convert=convert, build=BuildSpec(runtime="openvino", **changes), kv_tokens=kv_tokens)


def _followed(advice: str) -> Need:
    """What a user needs who follows the flags in `advice`."""
    flags = dict(re.findall(r"--([a-z-]+) (\w+)", advice))
    kv_tokens = flags.pop("max-tokens-in-paged-kv-cache", None)
    strings = {key: flags.pop(key) for key in ("dtype", "quantize") if key in flags}
    numbers = {key.replace("-", "_"): int(value) for key, value in flags.items()}
    return need_of(_wish(**strings, **numbers, kv_tokens=int(kv_tokens) if kv_tokens else None))


def test_seven_billion_parameters() -> None:
    need = need_of(_wish())
    assert need.engine.disk_bytes == pytest.approx(2 * 6.74e9, rel=0.01)
    assert need.kv_tokens == 4096
    assert need_of(_wish(quantize="int8")).engine.disk_bytes < 0.55 * need.engine.disk_bytes
    assert need_of(_wish(dtype="float32")).engine.disk_bytes == 2 * need.engine.disk_bytes


def test_enough_memory_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    free = need_of(_wish()).total
    monkeypatch.setattr("trtserve.pipeline.capacity.free_memory", lambda: free)
    require_memory(_wish(), "llama-2-7b")
    monkeypatch.setattr("trtserve.pipeline.capacity.free_memory", lambda: free - 1)
    with pytest.raises(MemoryLimitError, match="needs"):
        require_memory(_wish(), "llama-2-7b")


@pytest.mark.parametrize(
    ("changes", "free", "expected"),
    [
        ({}, 19 * GIB, "--max-seq-len"),
        ({}, 12 * GIB, "--quantize int8"),
        ({"dtype": "float32"}, 30 * GIB, "--dtype bfloat16"),
        ({"dtype": "float32"}, 11.2 * GIB, "--dtype bfloat16 --quantize int8"),
        ({}, 9.9 * GIB, "--quantize int8 --max-seq-len 512"),
        ({"kv_tokens": 100_000}, 30 * GIB, "--max-tokens-in-paged-kv-cache"),
        ({"max_input_len": 4096}, 19 * GIB, "--max-input-len"),
    ],
)
def test_advice_fits(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], free: float, expected: str) -> None:
    monkeypatch.setattr("trtserve.pipeline.capacity.free_memory", lambda: int(free))
    with pytest.raises(MemoryLimitError, match=f"{free / GIB:.1f} GiB are free") as caught:
        require_memory(_wish(**changes), "llama-2-7b")
    hint = str(caught.value.hint)
    assert expected in hint
    assert _followed(hint).total <= free


def test_hopeless_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.pipeline.capacity.free_memory", lambda: 2 * GIB)
    with pytest.raises(MemoryLimitError) as caught:
        require_memory(_wish(), "llama-2-7b")
    assert "No setting" in str(caught.value.hint)


def test_a_draft_model_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_size": 16}
    config = {"pretrained_config": model, "build_config": {"max_seq_len": 100}, "trtserve": {"kv_precision": "f16"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "rank0.bin").write_bytes(b"x" * 5000)
    engine = Engine(path=tmp_path)
    per_token = 2 * 2 * 4 * 16 * 2  # keys and values, layers, heads, sizes, bytes
    assert draft_bytes(engine, None) == 5000 + 100 * per_token
    assert draft_bytes(engine, 7) == 5000 + 7 * per_token
    alone = need_of(_wish()).total
    monkeypatch.setattr("trtserve.pipeline.capacity.free_memory", lambda: alone)
    with pytest.raises(MemoryLimitError, match="for the server and the draft model"):
        require_memory(replace(_wish(), draft=5000), "llama-2-7b")


def test_engine_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_destination("demo") is None
    monkeypatch.setenv("ENGINE_DEST_PATH", "/engines")
    assert str(engine_destination("demo")) == "/engines/demo"
