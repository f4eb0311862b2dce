"""Mixture-of-experts layers: their tensors and config keys, as in TensorRT-LLM 1.2's MixtureOfExperts and SharedMoE."""

from __future__ import annotations

from collections.abc import Iterator

from trtserve.artifacts.checkpoint_config import CheckpointConfig, MixtureOfExperts
from trtserve.checkpoint.architectures.base import ExpertNames, Experts, HfConfig, Target, expert_size, required
from trtserve.errors import UnsupportedModelError

# Keys for the number of experts in Hugging Face configs.
_COUNTS = ("num_experts", "num_local_experts")
# TensorRT-LLM's ExpertScaleNormalizationMode.
NOT_NORMALIZED, RENORMALIZED = 0, 1


def expert_targets(config: CheckpointConfig, names: ExpertNames, layer: int) -> Iterator[Target]:
    """Yield a layer's expert tensors: [up; gate] of all experts in one tensor, `down` in another, and the router.

    The router is float32 in every checkpoint: small differences decide which experts run.
    """
    hidden, inner, count = config.hidden_size, expert_size(config), _moe(config).num_experts
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
    hidden, inner = config.hidden_size, config.moe_shared_expert_intermediate_size
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
    """Return experts per layer (read from the key `count`) and experts per token.

    Raises UnsupportedModelError if impossible.

    transformers has two names for `count`, and re-saves a Qwen3-MoE under the newer one.
    """
    count = next((name for name in (count, *_COUNTS) if hf.get(name) is not None), count)
    numbers = required(hf, count, "num_experts_per_tok")
    experts, chosen = numbers[count], numbers["num_experts_per_tok"]
    if experts < 2 or chosen > experts:
        raise UnsupportedModelError(
            f"config.json has {count} = {experts} and num_experts_per_tok = {chosen}; expected at least two experts, "
            "and no more per token than there are.",
            hint="Use the config.json that was published with the weights.",
        )
    return experts, chosen


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
    )
