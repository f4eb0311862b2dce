"""Mixture-of-experts layers: their tensors and config keys, as in TensorRT-LLM 1.2's MixtureOfExperts and SharedMoE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig, MixtureOfExperts
from trtserve.checkpoint.architectures.base import (
    ExpertNames,
    Experts,
    HfConfig,
    Target,
    WrongConfigError,
    expert_size,
    is_number,
    moe_object,
    require_sizes,
    required,
)
from trtserve.errors import UnsupportedModelError

_COUNTS = ("num_experts", "num_local_experts")  # keys for the number of experts in Hugging Face configs
# TensorRT-LLM's ExpertScaleNormalizationMode.
NOT_NORMALIZED, RENORMALIZED = 0, 1
_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0}
DEEPSEEK_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    shared="mlp.shared_experts",
    correction="mlp.gate.e_score_correction_bias",
)


def expert_targets(config: CheckpointConfig, names: ExpertNames, layer: int) -> Iterator[Target]:
    """Yield a layer's expert tensors: [up; gate] of all experts in one tensor, `down` in another, and the router.

    The router is float32 in every checkpoint: small differences decide which experts run.
    """
    hidden, inner, count = config.hidden_size, expert_size(config), _moe(config).num_experts
    ours, theirs = f"transformer.layers.{layer}.mlp.", f"model.layers.{layer}."
    bias = f"{names.router}.bias" if names.router_bias else None
    router = {"weight": f"{names.router}.weight", "bias": bias, "correction": names.correction, "scale": names.scale}
    for name, source in router.items():
        if source is not None:
            shape = (count, hidden) if name == "weight" else (count,)
            yield Target(
                name=f"{ours}router.{name}", sources=(theirs + source,), shape=shape, dtype="float32", layer=layer
            )
    if names.router_norm is not None:
        yield Target(
            name=f"{ours}router_norm.weight", sources=(theirs + names.router_norm,), shape=(hidden,), layer=layer
        )
    halves = (names.up,) if names.gate is None else (names.up, names.gate)
    outer = inner if names.plain else 2 * inner
    for kind, columns in (("weight", (hidden, inner)), ("bias", (1, 1)))[: 2 if names.biases else 1]:
        yield Target(
            name=f"{ours}fc.{kind}",
            sources=[f"{theirs}{part.format(e)}.{kind}" for e in range(count) for part in halves],
            shape=(count, outer, columns[0]),
            split="expert_column",
            parts=(inner,) * (2 * count) if names.gate_first else (outer // len(halves),) * (count * len(halves)),
            order=((inner, inner), (0, inner)) if names.gate_first else (),
            transpose=names.transposed and kind == "weight",
            layer=layer,
        )
        yield Target(
            name=f"{ours}proj.{kind}",
            sources=[f"{theirs}{names.down.format(e)}.{kind}" for e in range(count)],
            shape=(count, hidden, columns[1]),
            split="expert_row" if kind == "weight" else "experts",
            parts=(hidden,) * count,
            transpose=names.transposed and kind == "weight",
            layer=layer,
        )
    if names.shared is not None:
        yield from _shared_targets(config, theirs + names.shared, layer, names)


def _shared_targets(config: CheckpointConfig, theirs: str, layer: int, names: ExpertNames) -> Iterator[Target]:
    hidden, inner = config.hidden_size, config.moe_shared_expert_intermediate_size
    ours, fused = f"transformer.layers.{layer}.mlp.shared_expert", names.shared_fused
    sources = ["input_linear"] if fused else ["up_proj"] if names.plain else ["up_proj", "gate_proj"]
    yield Target(
        name=f"{ours}.fc.weight",
        sources=[f"{theirs}.{source}.weight" for source in sources],
        order=((inner, inner), (0, inner)) if fused else (),
        shape=(inner if names.plain else 2 * inner, hidden),
        split="fused",
        parts=(inner,) if names.plain else (inner, inner),
        layer=layer,
    )
    yield Target(
        name=f"{ours}.proj.weight",
        sources=(f"{theirs}.{'output_linear' if fused else 'down_proj'}.weight",),
        shape=(hidden, inner),
        split="row",
        layer=layer,
    )
    if config.own("shared_expert_gate", True):
        yield Target(name=f"{ours}_gate.weight", sources=(f"{theirs}_gate.weight",), shape=(1, hidden), layer=layer)


def expert_counts(hf: HfConfig, count: str) -> tuple[int, int]:
    """Return experts per layer (read from the key `count`) and experts per token.

    Raises UnsupportedModelError if impossible.

    transformers has two names for `count`, and re-saves a Qwen3-MoE under the newer one.
    """
    count = next((name for name in (count, *_COUNTS) if hf.get(name) is not None), count)
    numbers = required(hf, count, "num_experts_per_tok")
    experts, chosen = numbers[count], numbers["num_experts_per_tok"]
    if experts < 2 or chosen > experts:
        raise WrongConfigError(
            f"config.json has {count} = {experts} and num_experts_per_tok = {chosen}; expected at least two experts, "
            "and no more per token than there are."
        )
    return experts, chosen


def softmax_experts(hf: HfConfig, counts: tuple[int, int], mode: int, *, shared: int) -> dict[str, Any]:
    """Return the keys of experts with softmax routers, and `shared` experts of `moe_intermediate_size` without a gate.

    `counts` are experts per layer and per token, `mode` says whether the chosen scores are renormalised.
    """
    inner = required(hf, "moe_intermediate_size")["moe_intermediate_size"]
    require_sizes({"shared experts": shared or 1}, "shared experts")
    return {
        "moe": moe_object(num_experts=counts[0], top_k=counts[1], normalization_mode=mode, shared_size=shared * inner),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": shared * inner,
        "shared_expert_gate": False,
    }


def layers_without_experts(hf: HfConfig) -> dict[str, Any]:
    """Return the key of layers that `mlp_layer_types` calls dense; empty without that list.

    Raises UnsupportedModelError for a list that does not name each layer.
    """
    kinds, layers = hf.get("mlp_layer_types"), int(hf["num_hidden_layers"])
    if kinds is None:
        return {}
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise WrongConfigError(
            f"config.json has mlp_layer_types = {kinds!r:.80}; expected `dense` or `sparse`, {layers} times."
        )
    return {"dense_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"]}


def deepseek_experts(hf: HfConfig) -> dict[str, Any]:
    """Return the keys of experts as in DeepSeek V3, with the names of its config; absent ones have V3's defaults.

    Sigmoid routers choose within the best groups, and the first layers have no experts. Raises UnsupportedModelError
    for numbers of groups that do not fit each other.
    """
    hf = {"norm_topk_prob": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, **hf}
    experts, chosen = expert_counts(hf, "n_routed_experts")
    groups, chosen_groups, shared = (hf.get(key) or least for key, least in _GROUPS.items())
    require_sizes({"n_group": groups, "topk_group": chosen_groups, "n_shared_experts": shared or 1}, *_GROUPS)
    if not is_number(factor := hf["routed_scaling_factor"]):
        raise WrongConfigError(
            f"config.json has {factor!r:.80} as the factor of its routers' weights; expected a positive number."
        )
    members = experts // groups
    if experts % groups or chosen_groups > groups or chosen > chosen_groups * members or (groups > 1 and members < 2):
        raise WrongConfigError(
            f"config.json has n_routed_experts = {experts}, n_group = {groups}, topk_group = {chosen_groups} and "
            f"num_experts_per_tok = {chosen}; expected equal groups, and enough experts in the chosen ones."
        )
    if (scores := hf.get("scoring_func", "sigmoid")) != "sigmoid":
        raise UnsupportedModelError(f"config.json has scoring_func = {scores!r}; this family's is sigmoid.")
    dense, inner = hf["first_k_dense_replace"] or 0, required(hf, "moe_intermediate_size")["moe_intermediate_size"]
    if type(dense) is not int or not 0 <= dense <= hf["num_hidden_layers"]:
        raise UnsupportedModelError(f"config.json has first_k_dense_replace = {dense!r}; expected a number of layers.")
    mode = RENORMALIZED if hf["norm_topk_prob"] else NOT_NORMALIZED
    return {
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode, shared_size=shared * inner),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": shared * inner,
        "shared_expert_gate": False,
        "scoring_func": "sigmoid",
        "n_group": groups,
        "topk_group": chosen_groups,
        "routed_scaling_factor": float(factor),
        "dense_layers": list(range(dense)),
    }


def halves_apart(hf: HfConfig) -> dict[str, Any]:
    """Return the key of experts whose gates and factors are tensors of their own, as in a GGUF file."""
    quantization = hf.get("quantization_config")
    gguf = isinstance(quantization, Mapping) and quantization.get("quant_method") == "gguf"
    return {"halves_apart": True} if gguf else {}


def _moe(config: CheckpointConfig) -> MixtureOfExperts:
    """Return the `moe` object of a checkpoint's config. Raises UnsupportedModelError for a model without experts."""
    moe = config.moe
    if not moe.num_experts or not moe.top_k:
        raise UnsupportedModelError(
            f"The config of this {config.architecture} checkpoint has no `moe` object with num_experts and top_k.",
            hint="Convert the original model again.",
        )
    return moe


def experts_of(config: CheckpointConfig) -> Experts:
    """Describe the experts of a checkpoint.

    Raises UnsupportedModelError for a normalisation that no supported family uses.
    """
    moe = _moe(config)
    mode = moe.normalization_mode
    if mode not in (NOT_NORMALIZED, RENORMALIZED):
        raise UnsupportedModelError(
            f"The checkpoint has normalization_mode {mode}; expected {NOT_NORMALIZED} or {RENORMALIZED}."
        )
    return Experts(
        count=moe.num_experts,
        chosen=moe.top_k,
        renormalized=mode == RENORMALIZED,
        shared=bool(config.moe_shared_expert_intermediate_size),
        shared_gate=config.own("shared_expert_gate", True),
        apart=config.own("experts_apart", False),
        scaled_inputs=config.own("experts_scale_inputs", False),
        scores="sigmoid" if config.own("scoring_func", "softmax") == "sigmoid" else "softmax",
        groups=config.own("n_group", 1),
        chosen_groups=config.own("topk_group", 1),
        scale=config.own("routed_scaling_factor", 1.0),
        dense_layers=frozenset(config.dense_layers),
    )
