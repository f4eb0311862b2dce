"""GGUF files: every family's weights and config, the tokenizers, each block type, and lies in a header."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gguf_files import (
    DELTA_NET,
    EXPERT_WIDTHS,
    LATENT,
    SCOUT,
    YARN,
    metadata_of,
    text,
    value,
    write_gguf,
    write_gguf_model,
)
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors
from trtserve.artifacts import Model
from trtserve.checkpoint.gguf import BY_NAME, GgufFile
from trtserve.checkpoint.gguf_model import config_of, tensors_of
from trtserve.checkpoint.gguf_tokenizer import tokenizer_of
from trtserve.errors import CorruptFileError, TrtserveError, UnsupportedModelError
from trtserve.pipeline.model import plan_model, unfolded
from trtserve.specs import ConvertSpec
from trtserve.store import Store

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
# llama.cpp multiplies the weights of Falcon-H1 by its factors.
NO_FACTORS: dict[str, Any] = {
    "mlp_multipliers": None,
    "ssm_multipliers": None,
    "mamba_norm_before_gate": False,
    **{
        f"{part}_multiplier": None
        for part in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    },
}
MAVERICK: dict[str, Any] = {
    **SCOUT,
    "num_local_experts": 128,
    "interleave_moe_layer_step": 4,
    "use_qk_norm": False,
    "rope_scaling": None,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
MODELS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama", "llama", "Q4_0", {"head_dim": 32}),
    ("llama", "llama", "F16", {"tie_word_embeddings": True}),
    ("mixtral", "llama", "Q8_0", {}),
    ("qwen2", "qwen2", "Q8_0", {}),
    ("qwen3", "qwen3", "Q4_0", {"head_dim": 64}),
    ("qwen3_moe", "qwen3moe", "Q8_0", {"head_dim": 32, "moe_intermediate_size": 64}),
    ("qwen3_next", "qwen3next", "Q8_0", DELTA_NET | EXPERT_WIDTHS),
    ("qwen3_5", "qwen35", "Q4_0", DELTA_NET),
    ("qwen3_5_moe", "qwen35moe", "Q8_0", DELTA_NET | EXPERT_WIDTHS),
    ("deepseek_v3", "deepseek2", "Q8_0", LATENT | {"q_lora_rank": 64, "rope_scaling": YARN}),
    ("glm4_moe_lite", "deepseek2", "Q4_0", LATENT | {"q_lora_rank": None}),
    ("deepseek_v2", "deepseek2", "Q8_0", LATENT | {"n_group": 1, "topk_group": 1}),
    ("deepseek_v2", "deepseek2", "Q4_0", LATENT | {"topk_method": "group_limited_greedy", "rope_scaling": YARN}),
    ("gemma", "gemma", "Q8_0", {"head_dim": 64}),
    ("gemma2", "gemma2", "Q8_0", {"head_dim": 64, "query_pre_attn_scalar": 64}),
    (
        "gemma3",
        "gemma3",
        "Q4_0",
        {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window_pattern": 6, "layer_types": None},
    ),
    ("gemma4", "gemma4", "Q8_0", {"head_dim": 32, "hidden_size_per_layer_input": 32}),
    (
        "gemma4",
        "gemma4",
        "Q4_0",
        {
            "head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        },
    ),
    ("gemma4_moe", "gemma4", "Q8_0", {"head_dim": 32}),
    ("gemma3n", "gemma3n", "F16", {"head_dim": 32}),
    ("falcon_h1", "falcon-h1", "Q8_0", NO_FACTORS),
    ("falcon_h1", "falcon-h1", "Q4_0", {**NO_FACTORS, "mamba_rms_norm": True}),
    ("granite_hybrid", "granitehybrid", "Q4_0", {}),
    ("granite_hybrid", "granitehybrid", "Q8_0", {"num_hidden_layers": 2, "layer_types": ["attention", "mamba"]}),
    ("granite_hybrid_moe", "granitehybrid", "Q8_0", {"intermediate_size": 64}),
    ("bamba", "granitehybrid", "Q4_0", {"attn_layer_indices": [0]}),
    ("bamba", "granitehybrid", "Q8_0", {"mamba_proj_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama4", "llama4", "Q4_0", SCOUT),
    ("llama4", "llama4", "Q8_0", MAVERICK),
    ("granite_moe_shared", "granitemoe", "Q8_0", {"intermediate_size": 64, "shared_intermediate_size": 96}),
    ("hunyuan_v1_moe", "hunyuan-moe", "Q8_0", {"head_dim": 64, "rope_scaling": None}),
    ("phi3", "phi3", "Q8_0", {}),
    ("phi3_long", "phi3", "Q8_0", {"hidden_size": 64}),
    ("qwen2_moe", "qwen2moe", "Q8_0", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    ("granite", "granite", "Q4_0", {}),
    ("smollm3", "smollm3", "Q8_0", {}),
    ("glm4", "glm4", "Q8_0", {"head_dim": 32, "attention_bias": True}),
    ("lfm2", "lfm2", "Q4_0", {"full_attn_idxs": None, "layer_types": ["conv", "full_attention"]}),
    ("olmo2", "olmo2", "Q8_0", {}),
    (
        "exaone4",
        "exaone4",
        "Q8_0",
        {"layer_types": ["sliding_attention", *["full_attention"] * 2, "sliding_attention"]},
    ),
    ("exaone4", "exaone4", "Q8_0", {"sliding_window": None, "layer_types": None}),
    ("seed_oss", "seed_oss", "Q4_0", {"head_dim": 64, "attention_out_bias": True}),
    ("ernie4_5", "ernie4_5", "Q8_0", {"head_dim": 64, "use_bias": False}),
    ("hunyuan_v1_dense", "hunyuan-dense", "Q8_0", {"head_dim": 64, "rope_scaling": None}),
    ("cohere2", "cohere2", "Q8_0", {"attention_bias": False}),
    (
        "gpt_oss",
        "gpt-oss",
        "Q8_0",
        {
            "rope_theta": 150000.0,
            "rope_parameters": None,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
            "swiglu_limit": 7.0,
        },
    ),
]


@pytest.mark.parametrize(("family", "architecture", "kind", "sizes"), MODELS, ids=str)
def test_checkpoints_are_those_of_the_same_floats(
    family: str, architecture: str, kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Made of the file, and of a Hugging Face folder with the weights that its blocks stand for."""
    file, plain = write_gguf_model(tmp_path, family, architecture, kind, **SIZES | sizes)
    folder = unfolded(file, Store(tmp_path / "store"), tokenizer=True)
    for tp_size in (1, 2):
        spec = ConvertSpec(dtype="float32", tp_size=tp_size)
        made, expected = (
            convert_model(Model(path=each), spec, out=tmp_path / f"{tp_size}" / each.name).path
            for each in (folder, plain)
        )
        _require_same_config(made, expected)
        for rank in range(tp_size):
            found, right = (read_safetensors(each / f"rank{rank}.safetensors") for each in (made, expected))
            if architecture == "gpt-oss":  # its rows are gates and factors in turn; in the file they are apart
                right = {
                    name: np.concatenate([values[:, 1::2], values[:, 0::2]], 1) if ".mlp.fc." in name else values
                    for name, values in right.items()
                }
            assert found.keys() == right.keys()
            for name, values in right.items():
                # Norms of Gemma were stored plus one: a rounding of the last bit.
                np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-7, err_msg=name)


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("ssm.time_step_rank", None),
        ("ssm.conv_kernel", None),
        ("rope.dimension_count", None),
        ("attention.key_length", None),
        ("ssm.group_count", 3),
    ],
)
def test_a_delta_net_without_its_sizes_is_refused(key: str, changed: int | None, tmp_path: Path) -> None:
    """They have defaults in transformers, which are those of other models."""
    file = GgufFile(write_gguf_model(tmp_path, "qwen3_5", "qwen35", "F16", **SIZES | DELTA_NET)[0])
    file.metadata.pop(f"qwen35.{key}")
    if changed is not None:
        file.metadata[f"qwen35.{key}"] = changed
    with pytest.raises(CorruptFileError, match=key.replace(".", r"\.") if changed is None else "expected multiples"):
        config_of(file)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """llama.cpp counts them among the layers and says how many they are."""
    file = GgufFile(write_gguf_model(tmp_path, "qwen3_5", "qwen35", "F16", **SIZES | DELTA_NET)[0])
    layers = file.metadata["qwen35.block_count"]
    file.metadata |= {"qwen35.block_count": layers + 1, "qwen35.nextn_predict_layers": 1}
    plain = {tensor.name for tensor, _ in tensors_of(file)}
    file.entries[f"blk.{layers}.nextn.eh_proj.weight"] = file.entries["blk.0.ffn_up.weight"]
    assert config_of(file)["num_hidden_layers"] == layers == len(config_of(file)["layer_types"])
    assert {tensor.name for tensor, _ in tensors_of(file)} == plain


def test_inputs_of_qwen3_next_in_the_older_order(tmp_path: Path) -> None:
    """Files of 2025 have them as transformers does, in one tensor; without it the gates are asked for by name."""
    file = GgufFile(write_gguf_model(tmp_path, "qwen3_next", "qwen3next", "F16", **SIZES | DELTA_NET)[0])
    entry = file.entries.pop("blk.0.attn_qkv.weight")
    gates = file.entries.pop("blk.0.attn_gate.weight")
    older = replace(entry, shape=(entry.shape[0] + gates.shape[0], entry.shape[1]), size=entry.size + gates.size)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    file.entries["blk.0.attn_qkv.weight"] = entry
    with pytest.raises(CorruptFileError, match=r"attn_gate\.weight, which is absent"):
        dict(tensors_of(file))
    del file.entries["blk.0.attn_qkv.weight"]
    file.entries["blk.0.ssm_in.weight"] = older
    assert {tensor.name: encoding.shape for tensor, encoding in tensors_of(file)}[name] == older.shape


def latent_file(folder: Path, family: str = "deepseek_v3", **sizes: Any) -> GgufFile:
    return GgufFile(write_gguf_model(folder, family, "deepseek2", "F16", **SIZES | LATENT | sizes)[0])


def test_latent_attention_of_older_files(tmp_path: Path) -> None:
    """Before April 2025 they had the joined matrix and heads of its sizes, and no groups or kinds of routers."""
    file = latent_file(tmp_path)
    wanted, names = config_of(file), {tensor.name for tensor, _ in tensors_of(file)}
    for layer in range(file.metadata["deepseek2.block_count"]):
        keys, values = (file.entries.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        shape = keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]
        file.entries[f"blk.{layer}.attn_kv_b.weight"] = replace(keys, shape=shape, size=keys.size + values.size)
    for kind in ("key", "value"):
        file.metadata[f"deepseek2.attention.{kind}_length"] = file.metadata.pop(
            f"deepseek2.attention.{kind}_length_mla"
        )
    for key in ("expert_gating_func", "expert_group_count", "expert_group_used_count"):
        del file.metadata[f"deepseek2.{key}"]
    assert config_of(file) == wanted | {"n_group": 1, "topk_group": 1}
    assert {tensor.name for tensor, _ in tensors_of(file)} == names
    file.metadata["deepseek2.expert_count"] = 256
    with pytest.raises(UnsupportedModelError, match="expert_group_count"):
        config_of(file)
    file.metadata["deepseek2.block_count"] = 61
    assert (config_of(file)["n_group"], config_of(file)["topk_group"]) == (8, 4)


@pytest.mark.parametrize(
    ("key", "content", "match"),
    [
        ("attention.kv_lora_rank", None, "kv_lora_rank is None"),
        ("rope.dimension_count", None, "dimension_count is None"),
        ("rope.dimension_count", 48, "48 are rotated"),
        ("expert_gating_func", 1, "expert_gating_func is 1"),
        ("expert_shared_count", None, "expert_shared_count is None"),
        ("attention.temperature_scale", 0.1, "scales its queries"),
        ("rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor"),
        ("attention.value_length_mla", 48, r"attn_v_b\.weight.*expected"),
    ],
)
def test_latent_attention_that_is_refused(key: str, content: Any, match: str, tmp_path: Path) -> None:
    file = latent_file(tmp_path, rope_scaling=YARN)
    file.metadata.pop(f"deepseek2.{key}", None)
    if content is not None:
        file.metadata[f"deepseek2.{key}"] = content
    with pytest.raises(TrtserveError, match=match):
        config_of(file), dict(tensors_of(file))


def test_yarn_of_kimi_needs_its_ramp(tmp_path: Path) -> None:
    file = latent_file(tmp_path, rope_scaling=YARN)
    file.metadata["tokenizer.ggml.pre"] = "kimi-k2"
    with pytest.raises(UnsupportedModelError, match="yarn_beta_fast"):
        config_of(file)
    file.metadata["deepseek2.rope.scaling.yarn_beta_fast"] = 1.0
    assert config_of(file)["rope_scaling"] == YARN | {"beta_fast": 1.0}


def test_latent_attention_without_its_values(tmp_path: Path) -> None:
    file = latent_file(tmp_path)
    del file.entries["blk.0.attn_v_b.weight"]
    with pytest.raises(CorruptFileError, match=r"attn_v_b\.weight, which is absent"):
        list(tensors_of(file))


def _require_same_config(made: Path, expected: Path) -> None:
    config, wanted = (json.loads((each / "config.json").read_text()) for each in (made, expected))
    for key, content in wanted.items():
        if isinstance(content, float):
            assert config[key] == pytest.approx(content, rel=1e-6), key
        elif key not in ("architecture", "max_attention_window", "hidden_act"):
            assert config.get(key) == content, key


def test_import_of_a_file_and_of_its_folder(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "llama", "llama", "Q8_0", **SIZES)
    store = Store(tmp_path / "store")
    plans = [plan_model(text, store=store) for text in (str(file), str(file.parent))]
    model = plans[0].run()
    assert (model.path / "model.gguf").resolve() == file.resolve()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in model.path.iterdir()}
    assert [plan.name for plan in plans] == ["llama", plans[1].name]
    assert plan_model(str(file), store=store).reused
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UnsupportedModelError, match="several GGUF files"):
        plan_model(str(file.parent), store=store)


def tokenizer(tmp_path: Path, metadata: dict[str, Any]) -> Any:
    """The tokenizer of a file without weights, read by transformers."""
    from transformers import AutoTokenizer

    config = {"max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    config |= {"num_attention_heads": 2, "vocab_size": 320}
    file = write_gguf(tmp_path / "tokens.gguf", metadata_of(config, "llama") | metadata, {})
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in tokenizer_of(GgufFile(file)).items():
        (folder / name).write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


TEXTS = [
    "Hello world, it's 2026!",
    "camelCase, THEY'RE/\n",
    "  two  spaces\n\nand\tlines",
    "Ünïcödé 速い狐 🦊",
    "x=1234567; f(y)",
    "",
]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "lfm2", "glm4", "gpt-4o", "qwen2", "tekken"])
def test_bpe_is_that_of_the_original(pre: str, tmp_path: Path) -> None:
    """A tokenizer that the library trains, with the parts that these families publish."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    numbers = dict.fromkeys(("llama-bpe", "lfm2", "glm4", "gpt-4o"), "{1,3}") | {"qwen2": "", "tekken": ""}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in numbers)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + numbers.get(pre, "")
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if pre == "gpt-4o":  # words keep their contraction, and a capital begins another one
        small, large = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
        words = [
            rf"[^\r\n\p{{L}}\p{{N}}]?{each}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for each in (f"{large}*{small}+", f"{large}+{small}*")
        ]
        rest = r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"
        pattern = "|".join([*words, *rest])
    from tokenizers import Regex

    before: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pre in numbers else []
    before += [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    original = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "lfm2")))
    original.pre_tokenizer = pre_tokenizers.Sequence([*before, level])
    original.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    original.train_from_iterator([*TEXTS, "the theory of the other thing is that it is"] * 3, trainer)
    content = json.loads(original.to_str())
    tokens = [token for token, _ in sorted(original.get_vocab().items(), key=lambda item: item[1])]
    made = tokenizer(
        tmp_path,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [
                merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
            ],
            "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
        },
    )
    for each in [*TEXTS, "a <|end|> b"]:
        if pre != "tekken":  # its pattern is another one
            assert made.encode(each) == original.encode(each).ids, each
        assert made.decode(made.encode(each)) == each or "<|end|>" in each


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    pieces = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁ab"]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*special, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [*[0.0] * 259, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0],
    }
    made = tokenizer(tmp_path, metadata)
    assert made.tokenize("abc") == ["▁", "abc"]  # bc before ab, then a with bc
    assert made.tokenize("ab") == ["▁ab"]
    assert made.tokenize("a é") == ["▁", "a", "▁", "<0xC3>", "<0xA9>"]
    assert made.encode("ab")[0] == 1  # <s>
    assert made.decode(made.encode("abc ab"), skip_special_tokens=True) == "abc ab"
    assert made.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_gemma_4_merges_as_listed_and_adds_no_space(tmp_path: Path) -> None:
    """Its published tokenizer is such a BPE: spaces become ▁, bytes stand for what has no token."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "c", "bc", "ab", "abc", "▁a", "▁ab"]
    merges = [("a", "b"), ("b", "c"), ("▁", "ab"), ("ab", "c")]
    model = models.BPE(
        {token: number for number, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    original = Tokenizer(model)
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * 9],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    made = tokenizer(tmp_path, metadata)
    for each in ("abc", "ab abc", " a é", "bc  b"):
        assert made.encode(each) == [2, *original.encode(each).ids], each
        assert made.decode(made.encode(each), skip_special_tokens=True) == each


# Where blocks have float16 numbers; 0 for the others.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
# SHA-256 of the float32 that the package gguf 0.19.0 (llama.cpp's own) makes of the blocks below.
MEANT = {
    "F32": "84e8792c7b58bf06",
    "F16": "8b2f04a372a68d20",
    "BF16": "0bce52a029c0165f",
    "Q4_0": "f1691d49275d8519",
    "Q4_1": "2161e80a71a7b12b",
    "Q5_0": "36d47333b3132f57",
    "Q5_1": "77e6a2ae029f3823",
    "Q8_0": "c8c9236e7a6b360c",
    "Q2_K": "0cd5e8be1be2f98e",
    "Q3_K": "fd2a9361f33cc4eb",
    "Q4_K": "d83c30f1d5d82bed",
    "Q5_K": "960dc974614d5af5",
    "Q6_K": "cb0b2103f8a95d54",
    "IQ4_NL": "828dd7474fb687ff",
    "IQ4_XS": "94d0c620dc180643",
    "MXFP4": "c59b0a413e5f6279",
}


@pytest.mark.parametrize("name", BY_NAME)
def test_blocks_are_those_of_llama_cpp(name: str) -> None:
    """Random bytes, with float16 numbers, or the exponent, of a usual size."""
    kind = BY_NAME[name]
    blocks = np.random.default_rng(0).integers(0, 256, (64, kind.size), dtype=np.uint8)
    places = [0] if name == "MXFP4" else [3] if name == "F32" else [at + 1 for at in HALVES.get(name, (0,))]
    for at in places:
        blocks[:, at] = blocks[:, at] % 16 + (120 if name == "MXFP4" else 0x28)
    floats = np.ascontiguousarray(kind.floats(blocks).astype("<f4")) + np.float32(0)  # no −0
    assert hashlib.sha256(floats.tobytes()).hexdigest()[:16] == MEANT[name]


def header(tensors: int, keys: int, rest: bytes = b"") -> Callable[[bytes], bytes]:
    return lambda _: b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


NAMED = text("t") + struct.pack("<I", 1)
LIES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: b"GGML" + data[4:], "does not begin"),
    (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
    (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big endian"),
    (lambda data: data[:300], "beyond its header"),
    (lambda data: data[:1000], "320 values of type 8"),
    (lambda data: data[:-64], "ends after the file"),
    (header(1 << 60, 0), "claims"),
    (header(0, 1 << 60), "claims"),
    (header(0, 1, struct.pack("<Q", 1 << 62)), "has 4611686018427387904 bytes"),
    (header(0, 1, text("a") + struct.pack("<I", 99)), "type 99"),
    (header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 1 << 62)), "claim 4611686018427387904 values"),
    (header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2)), "beyond its header"),
    (
        header(0, 2, b"".join(text(n) + struct.pack("<IIQ", 9, 0, 1_000_001) + bytes(1_000_001) for n in "ab")),
        "lists claim 2000002 values; 2000000 are read",
    ),
    (header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 1 << 20)), "values of type 8"),
    (header(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1)), "values of type 9"),
    (header(0, 2, (text("a") + value(1)) * 2), "twice"),
    (header(0, 1, text("general.alignment") + value(33)), "alignment"),
    (header(1, 0, text("t") + struct.pack("<I", 9)), "9 dimensions"),
    (header(1, 0, NAMED + struct.pack("<QIQ", 32, 16, 0)), "type 16"),
    (header(1, 0, NAMED + struct.pack("<QIQ", 33, 2, 0)), r"Q4_0 \[33\]"),
    (header(1, 0, NAMED + struct.pack("<QIQ", 1 << 63, 0, 0)), "F32"),
    (header(1, 0, NAMED + struct.pack("<QIQ", 1 << 30, 0, 0)), "ends after"),
    (header(2, 0, (NAMED + struct.pack("<QIQ", 1, 0, 0)) * 2 + bytes(64)), "overlaps"),
]


def test_lies_in_a_header_are_refused(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "llama", "llama", "Q8_0", **SIZES)
    whole = file.read_bytes()
    for change, message in LIES:
        file.write_bytes(change(whole))
        with pytest.raises(TrtserveError, match=message):
            GgufFile(file)


def test_heads_of_keys_that_are_listed_for_each_layer(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "llama", "llama", "Q8_0", **SIZES)
    found = GgufFile(file)
    meant = config_of(found), [(stored.name, rows) for stored, rows in tensors_of(found)]
    found.metadata["llama.attention.head_count_kv"] = [2, 2]
    assert (config_of(found), [(stored.name, rows) for stored, rows in tensors_of(found)]) == meant
    assert meant[0]["num_key_value_heads"] == 2
    del found.metadata["llama.attention.head_count_kv"]
    assert config_of(found)["num_key_value_heads"] == 4
    found.metadata["llama.attention.head_count_kv"] = [0, 0]
    with pytest.raises(CorruptFileError, match="head_count_kv has 0"):
        config_of(found)


def test_numbers_of_gemma_3n_that_are_not_what_they_must_be(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "gemma3n", "gemma3n", "F16", **SIZES)
    found = GgufFile(file)
    shared, sparsity = "gemma3n.attention.shared_kv_layers", "gemma3n.activation_sparsity_scale"
    meant = config_of(found)
    found.metadata[shared] = float(found.metadata[shared])
    assert config_of(found) == meant
    for key, wrong in ((shared, float("nan")), (shared, 1.5), (sparsity, [0.5]), (sparsity, [float("nan")] * 5)):
        told = found.metadata[key]
        found.metadata[key] = wrong
        with pytest.raises(CorruptFileError, match=key):
            config_of(found)
        found.metadata[key] = told


def test_falcon_h1_without_the_names_and_numbers_that_it_needs(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "falcon_h1", "falcon-h1", "Q8_0", **SIZES | NO_FACTORS)
    found = GgufFile(file)
    meant = [stored.name for stored, _ in tensors_of(found)]
    found.entries["blk.0.ffn_norm"] = found.entries.pop("blk.0.ffn_norm.weight")  # as llama.cpp names it here
    assert sorted(stored.name for stored, _ in tensors_of(found)) == sorted(meant)
    found.entries["blk.0.ssm_a"] = found.entries["blk.0.ssm_d"]
    (rows,) = (rows for stored, rows in tensors_of(found) if stored.name == "model.layers.0.mamba.A_log")
    with pytest.raises(CorruptFileError, match="not negative"):
        rows.rows(0, 8)
    del found.entries["output.weight"]
    with pytest.raises(UnsupportedModelError, match="no output matrix"):
        config_of(found)


def test_halves_of_granite_4_that_do_not_fit(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "granite_hybrid", "granitehybrid", "Q8_0", **SIZES)
    found = GgufFile(file)
    whole = found.entries.pop("blk.0.ffn_up.weight")
    with pytest.raises(CorruptFileError, match=r"blk\.0\.ffn_up\.weight is absent"):
        list(tensors_of(found))
    found.entries["blk.0.ffn_up.weight"] = found.entries["blk.0.ssm_in.weight"]
    with pytest.raises(CorruptFileError, match=r"ffn_up\.weight is \["):
        list(tensors_of(found))
    found.entries["blk.0.ffn_up.weight"] = whole
    found.metadata["granitehybrid.ssm.inner_size"] = 200
    with pytest.raises(CorruptFileError, match="200 numbers"):
        config_of(found)


def test_a_bamba_that_rotates_whole_heads_and_a_llama_4_without_chunks(tmp_path: Path) -> None:
    """transformers rotates half of each head of a Bamba, whatever its config says."""
    bamba = GgufFile(write_gguf_model(tmp_path, "bamba", "granitehybrid", "Q8_0", **SIZES)[0])
    del bamba.metadata["granitehybrid.rope.dimension_count"]
    with pytest.raises(UnsupportedModelError, match="rotates 32 numbers of 32; expected half"):
        config_of(bamba)
    llama = GgufFile(write_gguf_model(tmp_path / "4", "llama4", "llama4", "Q8_0", **SIZES | SCOUT)[0])
    llama.metadata["llama4.attention.sliding_window"] = 0
    with pytest.raises(UnsupportedModelError, match="Llama 4 without chunks"):
        config_of(llama)


def test_special_tokens_outside_the_vocabulary_are_none(tmp_path: Path) -> None:
    file, _ = write_gguf_model(tmp_path, "llama", "llama", "Q8_0", **SIZES)
    found = GgufFile(file)
    for key in ("bos", "eos", "eot", "padding", "unknown"):
        found.metadata[f"tokenizer.ggml.{key}_token_id"] = (1 << 32) - 1
    config = config_of(found)
    assert [config[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [None] * 3
    made = tokenizer_of(found)
    assert made["generation_config.json"] == {"bos_token_id": None, "eos_token_id": None}
    assert made["tokenizer.json"]["model"]["unk_token"] is None
    found.metadata["tokenizer.ggml.tokens"] += ["one more"]
    with pytest.raises(CorruptFileError, match="has 321 tokens, and embeddings of 320"):
        config_of(found)


def test_models_and_tokenizers_that_are_not_known_are_refused(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    plain, file = metadata_of(config | {"num_attention_heads": 2, "vocab_size": 320}, "llama"), tmp_path / "x.gguf"
    for change, make, message in (
        ({"general.architecture": "mamba"}, config_of, "architecture mamba"),
        ({"split.count": 2}, config_of, "one of 2 parts"),
        ({"general.architecture": "a" * 2000}, config_of, r"architecture a{80};"),
        ({"split.count": [2] * 2000}, config_of, r"one of \[[2, ]{79} parts"),
        ({"llama.block_count": "2"}, config_of, "block_count is '2'"),
        ({"llama.block_count": 2**31 - 1}, config_of, "block_count is 2147483647"),
        ({"llama.block_count": 2, "llama.attention.head_count_kv": [1, 2]}, config_of, "different numbers of heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, config_of, "head_count_kv has 2 values for 1 layers"),
        ({"llama.attention.head_count_kv": [2] * 99}, config_of, "head_count_kv has 99 values for 1 layers"),
        ({"llama.rope.freq_base": True}, config_of, "freq_base is True"),
        ({"llama.rope.scaling.type": "longrope"}, config_of, "by longrope"),
        ({"tokenizer.ggml.model": "bert"}, tokenizer_of, "kind bert"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "chatglm-bpe"}, tokenizer_of, "as chatglm-bpe"),
        ({"tokenizer.ggml.model": "gpt2"}, tokenizer_of, "no merges"),
        ({"tokenizer.ggml.scores": [1.0]}, tokenizer_of, "no score"),
        ({"tokenizer.ggml.scores": ["x"] * 320}, tokenizer_of, "no score"),
        ({"tokenizer.ggml.scores": [math.nan] * 320}, tokenizer_of, "no score"),
        ({"tokenizer.ggml.tokens": ["x"] * 320}, tokenizer_of, "two of its tokens the same text"),
        ({"tokenizer.ggml.token_type": [1]}, tokenizer_of, "1 kinds"),
    ):
        write_gguf(file, plain | change, {})
        with pytest.raises((UnsupportedModelError, CorruptFileError), match=message):
            make(GgufFile(file))
    frequencies = {"rope_freqs.weight": ((8,), "F32", np.ones(8, "<f4").tobytes())}
    write_gguf(file, plain | {"llama.rope.freq_base": -1.0}, frequencies)
    with pytest.raises(CorruptFileError, match=r"rope\.freq_base is -1\.0"):
        config_of(GgufFile(file))
