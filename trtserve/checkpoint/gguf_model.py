"""A GGUF file as a Hugging Face folder: its config.json, and its tensors under their names there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from trtserve.checkpoint.encodings import Encoding, StoredTensor
from trtserve.checkpoint.gguf import GgufFile, GgufRows, Joined
from trtserve.checkpoint.gguf_delta_net import DELTA_NETS, DeltaNetSizes, in_order, with_gates
from trtserve.checkpoint.gguf_latent import keys_and_values, latent_of, yarn_of_latent
from trtserve.checkpoint.gguf_metadata import AGAIN, BAMBA, MODULES, OTHER, OUTER, Metadata
from trtserve.errors import CorruptFileError, UnsupportedModelError

_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+?)(?:\.(weight|bias|scale))?")
# Tensors that say what the config says.
_ROPE = "rope_freqs.weight"
_OF_CONFIG = (_ROPE, "rope_factors_short.weight", "rope_factors_long.weight")
_MOST_PAIRS = 65_536
# Whole names in transformers, without `.weight`.
_WHOLE = (
    *("self_attn.sinks", "layer_scalar", "router.scale", "router.per_expert_scale"),
    *("altup.correct_output_scale", "mamba.A_log", "mamba.D", "mamba.dt_bias"),
    *("linear_attn.A_log", "linear_attn.dt_bias", "mlp.gate.e_score_correction_bias"),
)
# What llama.cpp divides the frequencies by that do not turn.
_STILL = 1e30
_MIXTRAL = {
    f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_MIXTRAL_GATE = {"ffn_gate_inp": "block_sparse_moe.gate"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json of the model. Raises UnsupportedModelError for one that cannot be expressed."""
    data = Metadata(file)
    family, heads, width = data.family, data.size("attention.head_count"), data.size("embedding_length")
    vocabulary = len(data.get("tokenizer.ggml.tokens", list, []))
    embedding = file.entries.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else vocabulary
    if vocabulary > rows:
        raise CorruptFileError(f"{file.path} has {vocabulary} tokens, and embeddings of {rows}.", hint=AGAIN)
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
        "num_hidden_layers": data.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": data.kv_heads(),
        "intermediate_size": data.smallest(_inner(data)),
        "max_position_embeddings": data.size("context_length"),
        "rms_norm_eps": data.get("attention.layer_norm_rms_epsilon", float, 1e-5),
        "rope_theta": data.get("rope.freq_base", float, 10000.0),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in file.entries,
        "bos_token_id": data.token("bos"),
        "eos_token_id": data.token("eos"),
        "pad_token_id": data.token("padding"),
        **family.config,
        **data.own_keys(),
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


def _inner(data: Metadata) -> str:
    """Return the key of the MLP's width; a Qwen3.5 with experts in every layer has none."""
    key = "feed_forward_length"
    absent = f"{data.architecture}.{key}" not in data.file.metadata
    return f"expert_{key}" if absent and data.architecture == "qwen35moe" else key


def _of_family(data: Metadata, head_size: int, share: int) -> dict[str, Any]:
    """Return what only some families have in their configs, beyond `GgufFamily.keys`."""
    own = {
        "phi3": _phi3,
        "lfm2": _lfm2,
        "exaone4": _exaone4,
        "olmo2": _olmo2,
        "llama4": _llama4,
        "falcon-h1": _falcon_h1,
        "granitehybrid": _granite_hybrid,
        "deepseek2": latent_of,
        **dict.fromkeys(DELTA_NETS, _delta_net),
    }.get(data.architecture)
    if data.architecture.startswith("gemma"):
        return _gemma(data, head_size, share)
    return {"hidden_act": "silu"} | ({} if own is None else own(data))


def _phi3(data: Metadata) -> dict[str, Any]:
    window = {"sliding_window": data.get("attention.sliding_window", int, 0) or None}
    names = [f"rope_factors_{kind}.weight" for kind in ("short", "long")]
    if not any(name in data.file.entries for name in names):
        return window
    short, long = (_numbers(data, name) for name in names)
    return {**window, "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long}}


def _lfm2(data: Metadata) -> dict[str, Any]:
    return {"layer_types": ["full_attention" if heads else "conv" for heads in data.kv_heads_of_layers()]}


def _exaone4(data: Metadata) -> dict[str, Any]:
    if not data.get("attention.sliding_window", int, 0):
        return {"sliding_window": None}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in data.sliding_layers()]}


def _olmo2(data: Metadata) -> dict[str, Any]:
    if data.get("attention.sliding_window", int, 0):
        raise UnsupportedModelError(f"{data.file.path} is an OLMo 3; OLMo 2 is read from GGUF.", hint=OTHER)
    return {}


def _falcon_h1(data: Metadata) -> dict[str, Any]:
    if "output.weight" not in data.file.entries:
        raise UnsupportedModelError(
            f"{data.file.path} has no output matrix: its embeddings are multiplied by a factor of their own.",
            hint=OTHER,
        )
    inner, heads = data.size("ssm.inner_size"), data.size("ssm.time_step_rank")
    # llama.cpp gates before it norms.
    return {"mamba_d_head": inner // heads, "mamba_norm_before_gate": False}


def _delta_net(data: Metadata) -> dict[str, Any]:
    """Return the keys of Qwen3-Next and Qwen3.5; which layers have states is said by their tensors."""
    sizes, head_size = DeltaNetSizes.of(data), data.size("attention.key_length")
    states = [f"blk.{layer}.ssm_conv1d.weight" in data.file.entries for layer in range(data.layers)]
    shared = "expert_shared_feed_forward_length"
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in states],
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key,
        "linear_value_head_dim": sizes.value,
        "linear_conv_kernel_dim": data.size("ssm.conv_kernel"),
        "partial_rotary_factor": data.size("rope.dimension_count") / head_size,
        **({} if data.architecture == "qwen35" else {"shared_expert_intermediate_size": data.size(shared)}),
    }


def _granite_hybrid(data: Metadata) -> dict[str, Any]:
    inner, width = data.size("ssm.inner_size"), data.size("embedding_length")
    if inner % width:
        raise CorruptFileError(f"{data.file.path} has states of {inner} numbers, and tokens of {width}.", hint=AGAIN)
    attends = [bool(heads) for heads in data.kv_heads_of_layers()]
    sizes = {"mamba_expand": inner // width, "mamba_d_head": inner // data.size("ssm.time_step_rank")}
    if data.family is not BAMBA:
        return {"layer_types": ["attention" if each else "mamba" for each in attends], **sizes}
    size = width // data.size("attention.head_count")
    if (rotated := data.get("rope.dimension_count", int, size)) * 2 != size:
        raise UnsupportedModelError(
            f"{data.file.path} is a Bamba that rotates {rotated} numbers of {size}; expected half of them.", hint=OTHER
        )
    return {"attn_layer_indices": [layer for layer, each in enumerate(attends) if each], **sizes}


def _llama4(data: Metadata) -> dict[str, Any]:
    if data.get("attention.sliding_window", int) == 0:
        raise UnsupportedModelError(f"{data.file.path} is a Llama 4 without chunks.", hint=OTHER)
    # llama.cpp norms queries and keys unless there are 128 experts (Maverick).
    return {"use_qk_norm": data.get("expert_count", int, 0) != 128}


def _gemma(data: Metadata, head_size: int, share: int) -> dict[str, Any]:
    window, layers = data.get("attention.sliding_window", int, 0), data.size("block_count")
    common = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
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
    own = {"gemma4": _gemma4, "gemma3n": _gemma3n}.get(data.architecture)
    return common if own is None else common | own(data)


def _gemma3n(data: Metadata) -> dict[str, Any]:
    """Return the keys of a Gemma 3n; the file has what shares of the gates are at, in standard deviations."""
    key, layers = "activation_sparsity_scale", data.size("block_count")
    scales, rank = data.get(key, list, []), data.file.entries.get("blk.0.laurel_l.weight")
    inputs = data.file.entries.get("per_layer_token_embd.weight")
    if len(scales) != layers or any(type(scale) is not float or scale != scale for scale in scales):
        raise CorruptFileError(
            f"{data.file.path}: gemma3n.{key} is {scales!r:.80}; expected a number for each of {layers} layers.",
            hint=AGAIN,
        )
    if rank is None or inputs is None:
        raise CorruptFileError(
            f"{data.file.path} lacks blk.0.laurel_l.weight or per_layer_token_embd.weight.", hint=AGAIN
        )
    return {
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in data.sliding_layers()],
        "sliding_window": data.size("attention.sliding_window"),
        "rope_local_base_freq": data.get("rope.freq_base_swa", float, 10000.0),
        "num_kv_shared_layers": data.whole("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": data.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": inputs.shape[0],
        "laurel_rank": rank.shape[0],
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "final_logit_softcapping": data.get("final_logit_softcapping", float),
    }


def _gemma4(data: Metadata) -> dict[str, Any]:
    """Return the keys of a Gemma 4; `rope_freqs` says which pairs of the heads without a window turn."""
    slides, widths = data.sliding_layers(), data.file.metadata.get("gemma4.feed_forward_length")
    full = [layer for layer, windowed in enumerate(slides) if not windowed]
    factors = _numbers(data, _ROPE) if _ROPE in data.file.entries else [1.0]
    if not {*factors} <= {1.0, _STILL} or sorted(factors) != factors:
        raise UnsupportedModelError(f"{data.file.path} scales its rotary embedding ({_ROPE}).", hint=OTHER)
    proportional = {"rope_type": "proportional", "partial_rotary_factor": factors.count(1.0) / len(factors)}
    same = bool(full) and f"blk.{full[0]}.attn_v.weight" not in data.file.entries
    return {
        "head_dim": data.size("attention.key_length_swa"),
        "global_head_dim": data.size("attention.key_length"),
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in slides],
        "sliding_window": data.size("attention.sliding_window"),
        "attention_k_eq_v": same,
        "num_global_key_value_heads": data.kv_heads_of_layers()[full[0]] if same else None,
        "num_kv_shared_layers": data.whole("attention.shared_kv_layers"),
        "enable_moe_block": data.get("expert_count", int, 0) > 0,
        "use_double_wide_mlp": isinstance(widths, list) and len(set(widths)) > 1,
        "hidden_size_per_layer_input": data.get("embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": data.file.entries["token_embd.weight"].shape[0],
        "final_logit_softcapping": data.get("final_logit_softcapping", float),
        "rope_parameters": {
            "full_attention": proportional | {"rope_theta": data.get("rope.freq_base", float, 1e6)},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": data.get("rope.freq_base_swa", float, 10000.0),
            },
        },
    }


def _numbers(data: Metadata, name: str) -> list[float]:
    """Return the numbers of a small tensor of floats, each as its shortest decimal, as config.json would have it."""
    entry = data.file.entries.get(name)
    if entry is None or len(entry.shape) != 1 or entry.code != "F32" or entry.shape[0] > _MOST_PAIRS:
        found = "absent" if entry is None else f"{entry.code} {list(entry.shape)}"
        raise CorruptFileError(f"{data.file.path}: {name} is {found}.", hint=AGAIN)
    rows = GgufRows(codes=StoredTensor(name=name, file=data.file, entry=entry)).rows(0, entry.shape[0])
    return [float(str(number)) for number in rows[:, 0]]


def _scaling(data: Metadata, head_size: int, base: float) -> dict[str, Any] | None:
    """Return the rotary scaling: of the metadata, or that of Llama 3.1 and 4, which llama.cpp keeps as a tensor."""
    kind, factor = data.get("rope.scaling.type", str, "none"), data.get("rope.scaling.factor", float, 1.0)
    original = data.get("rope.scaling.original_context_length", int)
    if data.architecture == "gemma4" and kind in ("none", "linear") and factor == 1:
        return None  # see _gemma4
    if _ROPE in data.file.entries:
        return _llama3(data, head_size, base)
    if kind == "longrope" and data.architecture == "phi3":
        return None  # see _phi3
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        own = {"gpt-oss": {"truncate": False}}.get(data.architecture, {})
        own |= yarn_of_latent(data) if data.architecture == "deepseek2" else {}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | own | _ramp(data)
    raise UnsupportedModelError(f"{data.file.path} scales its rotary embedding by {kind:.80}.", hint=OTHER)


def _ramp(data: Metadata) -> dict[str, Any]:
    """Return the ends of yarn's ramp, which only newer files have. Raises UnsupportedModelError for further factors."""
    key = "rope.scaling.yarn_"
    if data.get(f"{key}ext_factor", float, 1.0) not in (1, -1):  # -1: not set
        raise UnsupportedModelError(f"{data.file.path} has {data.architecture}.{key}ext_factor.", hint=OTHER)
    read = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
    found = {ours: data.get(key + theirs, float) for ours, theirs in read.items()}
    return {ours: number for ours, number in found.items() if number is not None}


def _llama3(data: Metadata, head_size: int, base: float) -> dict[str, Any] | None:
    import numpy as np

    from trtserve.checkpoint.architectures.parts.positions import inverse_frequencies

    found = np.asarray(_numbers(data, _ROPE))
    if len(found) != head_size // 2 or not 0 < base < np.inf:
        raise CorruptFileError(
            f"{data.file.path}: {_ROPE} has {len(found)} numbers, and rope.freq_base is {base}.", hint=AGAIN
        )
    if (found == 1).all():
        return None
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(found.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0 if data.architecture == "llama4" else 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = np.asarray(inverse_frequencies(head_size, base, None))
    scaled = np.asarray(inverse_frequencies(head_size, base, scaling))
    if not np.allclose(plain / scaled, found, rtol=1e-3):
        raise UnsupportedModelError(
            f"{data.file.path} scales its rotary embedding ({_ROPE}) unlike Llama 3.1 and 4.", hint=OTHER
        )
    return scaling


def tensors_of(file: GgufFile) -> Iterator[tuple[StoredTensor, Encoding]]:
    """Return all weights under their names in transformers, with what reads them. Raises CorruptFileError."""
    data = Metadata(file)
    second, layers = {follows for follows, _ in data.family.joined.values()}, data.layers
    second |= {"qwen3next": {"attn_gate"}, "deepseek2": {"attn_v_b"}}.get(data.architecture, set())
    if data.architecture == "deepseek2" and "blk.0.attn_kv_b.weight" in file.entries:
        second.add("attn_k_b")  # some files have the matrix and its parts
    for name, entry in file.entries.items():
        layer = _IN_LAYER.fullmatch(name)
        if name in _OF_CONFIG or (layer is not None and layer[2] in second):
            continue
        if layer is not None and int(layer[1]) >= layers:
            continue
        stored = StoredTensor(name=name, file=file, entry=entry)
        if layer is None:
            stem, _, kind = name.rpartition(".")
            outer, norm = {**OUTER, **data.family.outer}.get(stem), stem == "output_norm"
            if outer is not None and "{}" in outer and len(stored.entry.shape) == 3:
                yield from _each(stored, data, f"{outer}.{kind}")
                continue
            if outer is not None and "{}" not in outer:
                yield replace(stored, name=f"{outer}.{kind}"), _rows(stored, data, norm=norm)
                continue
        else:
            found = list(_of_layer(stored, data, layer[1], layer[2], layer[3] or "weight"))
            yield from found
            if found:
                continue
        raise UnsupportedModelError(f"{file.path} has the tensor {name}, which is not known.", hint=OTHER)


def _rows(stored: StoredTensor, data: Metadata, *, norm: bool = False, heads: int = 0) -> GgufRows:
    if heads and (stored.entry.shape[0] % heads or stored.entry.shape[0] // heads % 2):
        raise CorruptFileError(f"{stored.where} has {stored.entry.shape[0]} rows for {heads} heads.", hint=AGAIN)
    shift = data.family.norm_shift if norm else 0.0
    return GgufRows(codes=stored, heads=heads, shift=shift, logarithms=stored.name.endswith(".ssm_a"))


def _of_layer(
    stored: StoredTensor, data: Metadata, layer: str, module: str, kind: str
) -> Iterator[tuple[StoredTensor, Encoding]]:
    prefix, norm = f"model.layers.{layer}.", module.endswith("_norm") and module != "ssm_norm"
    shape = stored.entry.shape
    mixtral = data.architecture == "llama"
    own = {**MODULES, **(_MIXTRAL_GATE if mixtral else {}), **data.family.modules}.get(
        f"{module}.scale" if kind == "scale" else module
    )
    experts = (_MIXTRAL if mixtral else data.family.experts).get(module)
    if module in data.family.joined:
        yield from _joined(stored, data, prefix, layer, module, kind)
        return
    heads = 0
    if data.family.permuted and module in ("attn_q", "attn_k"):
        heads = data.kv_heads() if module == "attn_k" else data.size("attention.head_count")
    if module == "attn_k_b" and data.architecture == "deepseek2":
        if (entry := data.file.entries.get(other := f"blk.{layer}.attn_v_b.weight")) is None:
            raise CorruptFileError(f"{stored.where} needs {other}, which is absent.", hint=AGAIN)
        values = StoredTensor(name=other, file=data.file, entry=entry)
        yield replace(stored, name=f"{prefix}self_attn.kv_b_proj.weight"), keys_and_values(stored, values, data)
    elif own is not None:
        if module == "ffn_gate_inp_shexp" and len(shape) == 1:
            stored = stored.seen_as(1, *shape)
        name = own if own in _WHOLE else f"{own}.{kind}"
        if module in ("ssm_a", "ssm_d", "ssm_norm"):  # they have a dimension more
            stored = stored.seen_as(math.prod(shape))
        encoding = _of_delta_net(stored, data, layer, module) if data.architecture in DELTA_NETS else None
        yield replace(stored, name=prefix + name), encoding or _rows(stored, data, norm=norm, heads=heads)
    elif experts is not None and len(shape) == (3 if kind == "weight" else 2):
        yield from _each(stored, data, f"{prefix}{experts}.{kind}")


def _of_delta_net(stored: StoredTensor, data: Metadata, layer: str, module: str) -> Encoding | None:
    """Return a tensor in transformers' order; None: it has this order."""
    if data.architecture != "qwen3next":
        return in_order(stored, data, module)
    if module != "attn_qkv":
        return None
    entry = data.file.entries.get(name := f"blk.{layer}.attn_gate.weight")
    if entry is None:
        raise CorruptFileError(f"{stored.where} needs {name}, which is absent.", hint=AGAIN)
    return with_gates(stored, StoredTensor(name=name, file=data.file, entry=entry), data)


def _joined(
    stored: StoredTensor, data: Metadata, prefix: str, layer: str, module: str, kind: str
) -> Iterator[tuple[StoredTensor, Encoding]]:
    """Return a matrix, or one of each expert, whose rows are those of two tensors of the file."""
    follows, name = data.family.joined[module]
    other, name = f"blk.{layer}.{follows}.{kind}", f"{prefix}{name}.{kind}"
    entry = data.file.entries.get(other)
    if entry is None or entry.shape != stored.entry.shape:
        found = "absent" if entry is None else list(entry.shape)
        raise CorruptFileError(f"{stored.where} has {list(stored.entry.shape)}, and {other} is {found}.", hint=AGAIN)
    pair = stored, StoredTensor(name=other, file=data.file, entry=entry)
    if len(entry.shape) == 3:
        for (one, first), (_, second) in zip(*(_each(each, data, name) for each in pair), strict=True):
            yield one, Joined(codes=one, parts=(first, second))
    else:
        first, second = (_rows(each, data) for each in pair)
        yield replace(stored, name=name), Joined(codes=stored, parts=(first, second))


def _each(stored: StoredTensor, data: Metadata, name: str) -> Iterator[tuple[StoredTensor, GgufRows]]:
    """Return the tensors of a stack, with their numbers in the name; those of vectors are columns."""
    count, *inner = stored.entry.shape
    inner += [1] if len(inner) == 1 else []
    for number in range(count):
        entry = replace(stored.entry, shape=tuple(inner), size=stored.entry.size // count)
        entry = replace(entry, begin=stored.entry.begin + number * entry.size)
        one = replace(stored, name=name.format(number), entry=entry)
        yield one, _rows(one, data)
