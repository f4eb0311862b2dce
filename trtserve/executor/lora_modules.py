"""Where adapters act: TensorRT-LLM's LoRA modules, their numbers, and the matrices of a decoder that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MODULE_IDS: Mapping[str, int] = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}
"""Numbers in `lora_config` of the modules that a decoder without experts and without an encoder has."""

OTHER_MODULES = (
    "cross_attn_qkv",
    "cross_attn_q",
    "cross_attn_k",
    "cross_attn_v",
    "cross_attn_dense",
    "moe_h_to_4h",
    "moe_4h_to_h",
    "moe_gate",
    "moe_router",
    "mlp_router",
    "mlp_gate_up",
)
"""Words of `--lora-target-modules` that belong to other kinds of models."""

HF_MODULES: Mapping[str, str] = {
    "attn_qkv": "qkv_proj",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
}
"""Names of the same modules in Hugging Face's Llama."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """One module: it adds to outputs `first` … `first + outputs` of the matrix `linear`, which has `width` of them.

    `linear` is the matrix' name inside a layer of the checkpoint; `inputs` and `outputs` are the widths of the
    adapter's in- and out-weights.
    """

    id: int
    name: str
    linear: str
    inputs: int
    outputs: int
    width: int
    first: int = 0

    def numbers(self, rank: int) -> int:
        """How many numbers the weights of an adapter of `rank` have here, in- and out-weights together."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """What the adapters of an engine may look like; `bfloat16` tells in which type the engine calculates with them."""

    modules: tuple[LoraModule, ...]
    layers: int
    max_rank: int
    bfloat16: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of every matrix that has a module, by its name inside a layer."""
        return {module.linear: (module.inputs, module.width) for module in self.modules}


def lora_modules(config: Mapping[str, Any], names: Iterable[str], *, fused_mlp: bool = False) -> tuple[LoraModule, ...]:
    """The modules called `names` of a decoder, by their numbers; `config` is the checkpoint's, KeyError for others.

    `fused_mlp`: the first matrix of the MLP holds the activated part and the gate (Phi-3), and so does its module.
    """
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head = int(config.get("head_size") or hidden // heads)
    queries, keys = heads * head, int(config.get("num_key_value_heads") or heads) * head
    inner, fused = int(config.get("intermediate_size") or 4 * hidden), queries + 2 * keys
    first = 2 * inner if fused_mlp else inner
    parts = {  # linear, inputs, outputs, width, first
        "attn_qkv": ("attention.qkv", hidden, fused, fused, 0),
        "attn_q": ("attention.qkv", hidden, queries, fused, 0),
        "attn_k": ("attention.qkv", hidden, keys, fused, queries),
        "attn_v": ("attention.qkv", hidden, keys, fused, queries + keys),
        "attn_dense": ("attention.dense", queries, hidden, hidden, 0),
        "mlp_h_to_4h": ("mlp.fc", hidden, first, first, 0),
        "mlp_4h_to_h": ("mlp.proj", inner, hidden, hidden, 0),
        "mlp_gate": ("mlp.gate", hidden, inner, inner, 0),
    }
    return tuple(
        LoraModule(id=MODULE_IDS[name], name=name, linear=linear, inputs=inputs, outputs=outputs, width=width, first=at)
        for name in sorted(names, key=MODULE_IDS.__getitem__)
        for linear, inputs, outputs, width, at in [parts[name]]
    )
