"""A GGUF file as a Hugging Face folder: its config.json, its tokenizer, and its tensors under their names there.

`config_of` and `tokenizer_of` rebuild from the metadata what llama.cpp's converter made of the original's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trtserve.checkpoint.encodings import Encoding, StoredTensor
from trtserve.checkpoint.gguf import GgufFile, GgufRows
from trtserve.errors import CorruptFileError, UnsupportedModelError

_AGAIN = "Fetch the file again, or choose another copy of it."
_OTHER = "Choose the original model, in safetensors."


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How llama.cpp keeps a family: the class in transformers, and what differs from Llama."""

    architecture: str
    model_type: str
    permuted: bool = False  # rows of q and k
    norm_shift: float = 0.0  # llama.cpp stores the norms of Gemma plus one
    own_head_size: bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: {"ffn_norm": "post_attention_layernorm"})
    config: Mapping[str, Any] = field(default_factory=dict)


_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA: dict[str, Any] = {"norm_shift": -1.0, "own_head_size": True}
_FAMILIES = {
    "llama": _Family(architecture="LlamaForCausalLM", model_type="llama", permuted=True),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": _Family(architecture="Qwen3ForCausalLM", model_type="qwen3", own_head_size=True),
    "qwen3moe": _Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        own_head_size=True,
        config={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma": _Family(architecture="GemmaForCausalLM", model_type="gemma", **_GEMMA),
    "gemma2": _Family(architecture="Gemma2ForCausalLM", model_type="gemma2", norms=_SANDWICH, **_GEMMA),
    "gemma3": _Family(architecture="Gemma3ForCausalLM", model_type="gemma3_text", norms=_SANDWICH, **_GEMMA),
    "phi3": _Family(architecture="Phi3ForCausalLM", model_type="phi3"),
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
# Tensors that say what the config says.
_ROPE = "rope_freqs.weight"
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


class _Metadata:
    """Metadata of a GGUF file, with the keys of its architecture; each is checked for its type."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in _FAMILIES:
            raise UnsupportedModelError(
                f"{file.path} holds a model of the architecture {self.architecture}; GGUF files are read for "
                f"{', '.join(_FAMILIES)}.",
                hint=_OTHER,
            )
        if file.metadata.get("split.count", 1) != 1:
            raise UnsupportedModelError(
                f"{file.path} is one of {file.metadata['split.count']} parts.",
                hint="Join them with llama.cpp's llama-gguf-split --merge, and import the result.",
            )
        self.family = _FAMILIES[self.architecture]

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """Return a value, of the architecture unless the key begins with `tokenizer` or `general`."""
        name = key if key.startswith(("tokenizer.", "general.")) else f"{self.architecture}.{key}"
        value = self.file.metadata.get(name, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise CorruptFileError(f"{self.file.path}: {name} is {value!r:.80}.", hint=_AGAIN)
        return value

    def size(self, key: str) -> int:
        value = self.get(key, int)
        if value is None or not 0 < value < 1 << 31:
            raise CorruptFileError(f"{self.file.path}: {self.architecture}.{key} is {value!r:.80}.", hint=_AGAIN)
        return int(value)

    def kv_heads(self) -> int:
        """Return the heads of keys and values, which some files list for each layer."""
        key = "attention.head_count_kv"
        listed = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(listed, list):
            return self.size(key if listed is not None else "attention.head_count")
        if len(set(listed)) != 1:
            raise UnsupportedModelError(f"{self.file.path} has layers with different numbers of heads.", hint=_OTHER)
        if type(listed[0]) is not int or not 0 < listed[0] < 1 << 31:
            raise CorruptFileError(f"{self.file.path}: {self.architecture}.{key} has {listed[0]!r:.80}.", hint=_AGAIN)
        return listed[0]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json of the model. Raises UnsupportedModelError for one that cannot be expressed."""
    data = _Metadata(file)
    family, heads, width = data.family, data.size("attention.head_count"), data.size("embedding_length")
    vocabulary = len(data.get("tokenizer.ggml.tokens", list, []))
    embedding = file.entries.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else vocabulary
    experts = data.get("expert_count", int, 0)
    if experts and data.architecture == "llama":
        family = replace(family, architecture="MixtralForCausalLM", model_type="mixtral")
    head_size = data.get("attention.key_length", int) or width // heads
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
        "hidden_size": width,
        "num_hidden_layers": data.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.kv_heads(),
        "intermediate_size": data.size("feed_forward_length"),
        "max_position_embeddings": data.size("context_length"),
        "rms_norm_eps": data.get("attention.layer_norm_rms_epsilon", float, 1e-5),
        "rope_theta": data.get("rope.freq_base", float, 10000.0),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in file.entries,
        "bos_token_id": data.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": data.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": data.get("tokenizer.ggml.padding_token_id", int),
        **family.config,
    }
    if family.own_head_size or head_size * heads != width:
        config["head_dim"] = head_size
    rotated = data.get("rope.dimension_count", int, head_size)
    if rotated != head_size:
        config["partial_rotary_factor"] = rotated / head_size
    if (scaling := _scaling(data, head_size, config["rope_theta"])) is not None:
        config["rope_scaling"] = scaling
    if experts:
        config |= {
            "num_experts": experts,
            "num_local_experts": experts,
            "num_experts_per_tok": data.size("expert_used_count"),
            "moe_intermediate_size": data.get("expert_feed_forward_length", int, config["intermediate_size"]),
        }
    return config | _of_family(data, head_size, width // heads)


def _of_family(data: _Metadata, head_size: int, share: int) -> dict[str, Any]:
    """Return what only some families have in their configs."""
    window = data.get("attention.sliding_window", int, 0)
    if data.architecture == "llama":
        biased = "blk.0.attn_q.bias" in data.file.entries
        return {"attention_bias": biased, "hidden_act": "silu"}
    if data.architecture == "phi3":
        if any(name.startswith("rope_factors_") for name in data.file.entries):
            raise UnsupportedModelError(f"{data.file.path} has the rotary factors of a long Phi-3.", hint=_OTHER)
        return {"hidden_act": "silu", "sliding_window": window or None}
    if not data.architecture.startswith("gemma"):
        return {"hidden_act": "silu"}
    layers, common = (
        data.size("block_count"),
        {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
    )
    if data.architecture == "gemma2":
        return common | {
            # 27B divides by the share of the width; the others by the size of a head
            "query_pre_attn_scalar": share if layers == 46 else head_size,
            "attn_logit_softcapping": data.get("attn_logit_softcapping", float, 50.0),
            "final_logit_softcapping": data.get("final_logit_softcapping", float, 30.0),
            "sliding_window": window or 4096,
        }
    if data.architecture == "gemma3":
        return common | {
            "query_pre_attn_scalar": share if layers == 62 else head_size,
            "rope_local_base_freq": 10000.0,
            "sliding_window": window or 512,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": data.get("final_logit_softcapping", float),
        }
    return common


def _scaling(data: _Metadata, head_size: int, base: float) -> dict[str, Any] | None:
    """Return the rotary scaling: of the metadata, or that of Llama 3.1, which llama.cpp keeps as a tensor."""
    kind, factor = data.get("rope.scaling.type", str, "none"), data.get("rope.scaling.factor", float, 1.0)
    original = data.get("rope.scaling.original_context_length", int)
    if _ROPE in data.file.entries:
        return _llama3(data, head_size, base)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(f"{data.file.path} scales its rotary embedding by {kind}.", hint=_OTHER)


def _llama3(data: _Metadata, head_size: int, base: float) -> dict[str, Any] | None:
    import numpy as np

    from trtserve.checkpoint.architectures.parts.positions import inverse_frequencies

    entry = data.file.entries[_ROPE]
    if entry.shape != (head_size // 2,) or entry.code != "F32":
        raise CorruptFileError(f"{data.file.path}: {_ROPE} is {entry.code} {list(entry.shape)}.", hint=_AGAIN)
    found = GgufRows(codes=StoredTensor(name=_ROPE, file=data.file, entry=entry)).rows(0, head_size // 2)[:, 0]
    if (found == 1).all():
        return None
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(found.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = np.asarray(inverse_frequencies(head_size, base, None))
    scaled = np.asarray(inverse_frequencies(head_size, base, scaling))
    if not np.allclose(plain / scaled, found, rtol=1e-3):
        raise UnsupportedModelError(
            f"{data.file.path} scales its rotary embedding ({_ROPE}) unlike Llama 3.1.", hint=_OTHER
        )
    return scaling


def tensors_of(file: GgufFile) -> Iterator[tuple[StoredTensor, Encoding]]:
    """Return all weights under their names in transformers, with what reads them. Raises CorruptFileError."""
    data = _Metadata(file)
    for name, entry in file.entries.items():
        if name == _ROPE:
            continue
        stored = StoredTensor(name=name, file=file, entry=entry)
        layer = _IN_LAYER.fullmatch(name)
        if layer is None:
            stem, _, kind = name.rpartition(".")
            outer, norm = _OUTER.get(stem), stem == "output_norm"
            if outer is not None:
                yield replace(stored, name=f"{outer}.{kind}"), _rows(stored, data, norm=norm)
                continue
        else:
            found = list(_of_layer(stored, data, *layer.groups()))
            yield from found
            if found:
                continue
        raise UnsupportedModelError(f"{file.path} has the tensor {name}, which is not known.", hint=_OTHER)


def _rows(stored: StoredTensor, data: _Metadata, *, norm: bool = False, heads: int = 0) -> GgufRows:
    if heads and (stored.entry.shape[0] % heads or stored.entry.shape[0] // heads % 2):
        raise CorruptFileError(f"{stored.where} has {stored.entry.shape[0]} rows for {heads} heads.", hint=_AGAIN)
    return GgufRows(codes=stored, heads=heads, shift=data.family.norm_shift if norm else 0.0)


def _of_layer(
    stored: StoredTensor, data: _Metadata, layer: str, module: str, kind: str
) -> Iterator[tuple[StoredTensor, Encoding]]:
    prefix, mixtral = f"model.layers.{layer}.", data.architecture == "llama"
    norm = module.endswith("_norm")
    own = {**_MODULES, **data.family.norms}.get(module)
    if data.architecture == "phi3" and module == "ffn_up":
        own = "mlp.gate_up_proj"
    heads = 0
    if data.family.permuted and module in ("attn_q", "attn_k"):
        heads = data.kv_heads() if module == "attn_k" else data.size("attention.head_count")
    if own is not None:
        yield replace(stored, name=f"{prefix}{own}.{kind}"), _rows(stored, data, norm=norm, heads=heads)
    elif module == "ffn_gate_inp":
        gate = "block_sparse_moe.gate" if mixtral else "mlp.gate"
        yield replace(stored, name=f"{prefix}{gate}.{kind}"), _rows(stored, data)
    elif module in _EXPERTS and len(stored.entry.shape) == 3:
        count, *shape = stored.entry.shape
        part = (_MIXTRAL if mixtral else _EXPERTS)[module]
        outer = "block_sparse_moe" if mixtral else "mlp"
        for expert in range(count):
            entry = replace(stored.entry, shape=tuple(shape), size=stored.entry.size // count)
            entry = replace(entry, begin=stored.entry.begin + expert * entry.size)
            one = replace(stored, name=f"{prefix}{outer}.experts.{expert}.{part}.{kind}", entry=entry)
            yield one, _rows(one, data)


# Pre-tokenizers of BPE by llama.cpp's names: a pattern, whether digits are split one by one, NFC, and merges that are
# not needed where a word is a token.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Words:
    """How BPE cuts a text before it merges."""

    pattern: str
    digits: bool = False
    composed: bool = False
    whole_words: bool = False
    begins: bool = False  # whether a text begins with the token for that, unless the file says otherwise


_WORDS = {
    "default": _Words(pattern=_GPT2),
    "gpt-2": _Words(pattern=_GPT2),
    "smollm": _Words(pattern=_GPT2, digits=True),
    "starcoder": _Words(pattern=_GPT2, digits=True),
    "refact": _Words(pattern=_GPT2, digits=True),
    "llama-bpe": _Words(pattern=_MODERN % "{1,3}", whole_words=True, begins=True),
    "llama3": _Words(pattern=_MODERN % "{1,3}", whole_words=True, begins=True),
    "qwen2": _Words(pattern=_MODERN % "", composed=True),
    "tekken": _Words(pattern=_TEKKEN, whole_words=True, begins=True),
}
_NORMAL, _UNKNOWN, _CONTROL, _OWN, _BYTE = 1, 2, 3, 4, 6
# A token of another length takes part in no merge; the longest pieces of SentencePiece have 16 characters.
_LONGEST_PIECE = 64
# Tokens that end an answer, by their texts.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
)


def tokenizer_of(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json by their names.

    Raises UnsupportedModelError for a tokenizer that is not known, CorruptFileError for lists that do not fit.
    """
    data = _Metadata(file)
    tokens, kinds = _vocabulary(data)
    kind = data.get("tokenizer.ggml.model", str, "none")
    if kind == "gpt2":
        model, begins = _bpe(data, tokens), _words(data).begins
    elif kind == "llama":
        model, begins = _sentencepiece(data, tokens, kinds), True
    else:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {kind}; gpt2 (BPE) and llama (SentencePiece) are rebuilt.",
            hint="Name the folder of the original's tokenizer with --tokenizer.",
        )
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[number] != _OWN,
        }
        for number in range(len(tokens))
        if kinds[number] in (_UNKNOWN, _CONTROL, _OWN)
    ]
    names = {
        f"{word}_token": tokens[number]
        for word, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := data.get(f"tokenizer.ggml.{key}_token_id", int)) is not None and 0 <= number < len(tokens)
    }
    adds = data.get("tokenizer.ggml.add_bos_token", bool, begins) and "bos_token" in names
    ends = data.get("tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in names
    model |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    edges = _edges(names["bos_token"] if adds else None, names["eos_token"] if ends else None, tokens)
    model["post_processor"] = edges or model["post_processor"]
    template = data.get("tokenizer.chat_template", str)
    eos = dict.fromkeys(
        number
        for key in ("eos", "eot", "eom")
        if (number := data.get(f"tokenizer.ggml.{key}_token_id", int)) is not None
    )
    eos |= dict.fromkeys(number for number, text in enumerate(tokens) if kinds[number] == _CONTROL and text in _ENDS)
    return {
        "tokenizer.json": model,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": data.size("context_length"),
            **names,
            **({"chat_template": template} if template else {}),
        },
        "generation_config.json": {
            "bos_token_id": data.get("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": list(eos) or None,
        },
    }


def _vocabulary(data: _Metadata) -> tuple[list[str], list[int]]:
    tokens = data.get("tokenizer.ggml.tokens", list, [])
    kinds = data.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if not tokens or len(kinds) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise CorruptFileError(
            f"{data.file.path} has {len(tokens)} tokens and {len(kinds)} kinds of tokens.", hint=_AGAIN
        )
    return tokens, kinds


def _words(data: _Metadata) -> _Words:
    name = data.get("tokenizer.ggml.pre", str, "default")
    if name not in _WORDS:
        raise UnsupportedModelError(
            f"{data.file.path} cuts its words as {name}; known: {', '.join(_WORDS)}.",
            hint="Name the folder of the original's tokenizer with --tokenizer.",
        )
    return _WORDS[name]


def _bpe(data: _Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    words, merges = _words(data), data.get("tokenizer.ggml.merges", list)
    if merges is None or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise CorruptFileError(f"{data.file.path} has no merges of two tokens each.", hint=_AGAIN)
    digits = [{"type": "Digits", "individual_digits": True}] if words.digits else []
    cut = {"type": "Split", "pattern": {"Regex": words.pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if words.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, cut, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
            "ignore_merges": words.whole_words,
        },
    }


def _sentencepiece(data: _Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """Return BPE whose merges have the order of SentencePiece's scores."""
    scores = data.get("tokenizer.ggml.scores", list)
    if scores is None or len(scores) != len(tokens):
        raise CorruptFileError(f"{data.file.path} has no score for each token.", hint=_AGAIN)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[vocabulary[piece]], vocabulary[piece[:at]], vocabulary[piece[at:]], piece[:at], piece[at:])
        for piece in pieces
        if len(piece) <= _LONGEST_PIECE
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    prefix = data.get("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = data.get("tokenizer.ggml.unknown_token_id", int)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), space],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in kinds,
            "vocab": vocabulary,
            "merges": [[left, right] for *_, left, right in sorted(merges)],
        },
    }


def _edges(first: str | None, last: str | None, tokens: Sequence[str]) -> dict[str, Any] | None:
    """Return what adds the tokens at both ends of a text, or None."""
    ends = [token for token in (first, last) if token is not None]
    if not ends:
        return None

    def around(kind: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": kind, "type_id": 0}}
        special = [
            {"SpecialToken": {"id": token, "type_id": 0}} if token is not None else None for token in (first, last)
        ]
        return [each for each in (special[0], text, special[1]) if each is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in ends},
    }
