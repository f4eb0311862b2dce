"""Experts in place of a layer's MLP: their tensors, and what configs say about them.

Facts: convert-and-build, "MoE"; TensorRT-LLM's MixtureOfExperts and SharedMoE (release 1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trtserve.architectures.base import CheckpointConfig, Experts, HfConfig, Target, expert_size, required
from trtserve.errors import UnsupportedModelError

# How Hugging Face configs call the number of experts.
_COUNTS = ("num_experts", "num_local_experts")
# TensorRT-LLM's ExpertScaleNormalizationMode.
NOT_NORMALIZED, RENORMALIZED = 0, 1


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names inside a layer, without `.weight`; `{}` stands for the number of an expert.

    `gate` carries the activated branch and is multiplied with `up`. `shared` is the prefix of the shared expert's
    gate_proj, up_proj and down_proj; `_gate` behind it makes the name of its gate.
    """

    router: str
    gate: str
    up: str
    down: str
    shared: str | None = None


def expert_targets(config: CheckpointConfig, names: ExpertNames, layer: int) -> Iterator[Target]:
    """Tensors of the experts of a layer: [up; gate] of every expert in one tensor, `down` in another.

    The router is float32 in every checkpoint: which experts work on a token hangs on small differences.
    """
    hidden, inner, count = config["hidden_size"], expert_size(config), _moe(config)["num_experts"]
    ours, theirs = f"transformer.layers.{layer}.mlp.", f"model.layers.{layer}."
    yield Target(
        name=f"{ours}router.weight",
        sources=(f"{theirs}{names.router}.weight",),
        shape=(count, hidden),
        dtype="float32",
        layer=layer,
    )
    yield Target(
        name=f"{ours}fc.weight",
        sources=[f"{theirs}{part.format(e)}.weight" for e in range(count) for part in (names.up, names.gate)],
        shape=(count, 2 * inner, hidden),
        split="expert_column",
        parts=(inner, inner) * count,
        layer=layer,
    )
    yield Target(
        name=f"{ours}proj.weight",
        sources=[f"{theirs}{names.down.format(e)}.weight" for e in range(count)],
        shape=(count, hidden, inner),
        split="expert_row",
        parts=(hidden,) * count,
        layer=layer,
    )
    if names.shared is not None:
        yield from _shared_targets(config, theirs + names.shared, layer)


def _shared_targets(config: CheckpointConfig, theirs: str, layer: int) -> Iterator[Target]:
    hidden, inner = config["hidden_size"], config["moe_shared_expert_intermediate_size"]
    ours = f"transformer.layers.{layer}.mlp.shared_expert"
    yield Target(
        name=f"{ours}.fc.weight",
        sources=(f"{theirs}.up_proj.weight", f"{theirs}.gate_proj.weight"),
        shape=(2 * inner, hidden),
        split="fused",
        parts=(inner, inner),
        layer=layer,
    )
    yield Target(
        name=f"{ours}.proj.weight",
        sources=(f"{theirs}.down_proj.weight",),
        shape=(hidden, inner),
        split="row",
        layer=layer,
    )
    yield Target(name=f"{ours}_gate.weight", sources=(f"{theirs}_gate.weight",), shape=(1, hidden), layer=layer)


def expert_counts(hf: HfConfig, count: str) -> tuple[int, int]:
    """Experts of a layer (the key `count`) and experts of a token; UnsupportedModelError for numbers that cannot be.

    transformers has two names for the former, and saves a Qwen3-MoE with the one that it did not have at first.
    """
    count = next((name for name in (count, *_COUNTS) if hf.get(name) is not None), count)
    numbers = required(hf, count, "num_experts_per_tok")
    experts, chosen = numbers[count], numbers["num_experts_per_tok"]
    if experts < 2 or chosen > experts:
        raise UnsupportedModelError(
            f"config.json gives {count} = {experts} and num_experts_per_tok = {chosen}; expected two experts or more, "
            "and not more of a token than there are.",
            hint="Take config.json from where the weights are from.",
        )
    return experts, chosen


def _moe(config: CheckpointConfig) -> dict[str, Any]:
    """The `moe` object; UnsupportedModelError for checkpoints of TensorRT-LLM ≤ 0.9, which had flat keys instead."""
    moe: dict[str, Any] = config.get("moe") or {}
    if not moe.get("num_experts") or not moe.get("top_k"):
        raise UnsupportedModelError(
            f"The config of this {config['architecture']} checkpoint has no `moe` object with num_experts and top_k; "
            "TensorRT-LLM up to 0.9 named experts in another way.",
            hint="Convert the original model again.",
        )
    return moe


def experts_of(config: CheckpointConfig) -> Experts:
    """The experts by a checkpoint's config; UnsupportedModelError for a normalisation that no family here has."""
    moe = _moe(config)
    mode = moe.get("normalization_mode")
    if mode not in (NOT_NORMALIZED, RENORMALIZED):
        raise UnsupportedModelError(
            f"The checkpoint's experts have normalization_mode {mode}; expected {NOT_NORMALIZED} or {RENORMALIZED}."
        )
    return Experts(
        count=moe["num_experts"],
        chosen=moe["top_k"],
        renormalized=mode == RENORMALIZED,
        shared=bool(config.get("moe_shared_expert_intermediate_size")),
    )
