"""Sizes of a decoder, windows of its layers, and the matrices that TensorRT-LLM's LoRA modules change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.lora_adapter import MODULES

_LAST_PLAIN = 7  # in `lora_config`


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a whole decoder, not of one rank."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float
    full_kv_heads: int = 0  # of layers without a window, where it differs; 0: it does not
    full_head: int = 0  # the same

    def of_layer(self, *, full: bool) -> Sizes:
        """Return the sizes of a layer without a window (`full`), or of one with it."""
        kv_heads, head = self.full_kv_heads or self.kv_heads, self.full_head or self.head
        return replace(self, kv_heads=kv_heads, head=head) if full else self

    @classmethod
    def of(cls, config: CheckpointConfig) -> Sizes:
        return cls(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head=config.head_size,
            epsilon=config.norm_epsilon,
            full_kv_heads=config.full_num_key_value_heads,
            full_head=config.full_head_size,
        )


def layer_windows(
    own: Sequence[int | None], asked: Sequence[int] | None, longest: int, *, chunked: bool = False
) -> list[int | None]:
    """Return the windows to repeat over the layers: the shorter one of the model's own and the requested one.

    A window as long as the longest sequence becomes None, which leaves the graph unchanged. Raises RuntimeError for a
    requested window where the model's are chunks.
    """
    if chunked and asked and min(asked) < longest:
        raise RuntimeError(
            f"max_attention_window is {list(asked)}; the layers of this model see chunks, and take no other windows"
        )
    both: tuple[Sequence[int | None], ...] = (own or (None,), asked or (None,))
    repeated = [[turn[layer % len(turn)] for turn in both] for layer in range(math.lcm(*map(len, both)))]
    shortest = [min((window for window in pair if window is not None), default=longest) for pair in repeated]
    return [window if window < longest else None for window in shortest]


_PLAIN = {hf: (name, number) for hf, (name, number) in MODULES.items() if number <= _LAST_PLAIN}
MODULE_IDS: Mapping[str, int] = dict(_PLAIN.values())
"""Ids in `lora_config` of the modules that a decoder without experts and without an encoder has."""

HF_MODULES: Mapping[str, str] = {name: hf for hf, (name, _) in reversed(_PLAIN.items())}
"""Hugging Face's names of the same modules in Llama, which are the first of each."""

OTHER_MODULES = (
    "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense", "moe_h_to_4h",
    "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router", "mlp_gate_up",
)  # fmt: skip
"""Names of `--lora-target-modules` for other kinds of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """One module: it changes outputs `first` … `first + outputs` of the matrix `linear`."""

    id: int
    name: str
    linear: str  # name of the matrix inside a layer of the checkpoint
    inputs: int  # width of the adapter's in-weights
    outputs: int  # width of the adapter's out-weights
    width: int  # outputs of the whole matrix
    first: int = 0

    def numbers(self, rank: int) -> int:
        """Return how many numbers the weights of an adapter of `rank` have, in- and out-weights together."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The shape of the adapters that an engine accepts."""

    modules: tuple[LoraModule, ...]
    layers: int
    max_rank: int
    bfloat16: bool = False  # whether the engine computes with adapters in bfloat16 instead of float32

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of every matrix with a module, by its name inside a layer."""
        return {module.linear: (module.inputs, module.width) for module in self.modules}


def lora_modules(config: CheckpointConfig, names: Iterable[str], *, fused_mlp: bool = False) -> tuple[LoraModule, ...]:
    """Return the modules `names` of a decoder, sorted by id; `config` is the checkpoint's, KeyError for unknown names.

    `fused_mlp`: the first matrix of the MLP holds the activated part and the gate (Phi-3), and so does its module.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    fused = queries + 2 * keys
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


def lora_shape(config: EngineConfig) -> LoraShape | None:
    """Return the shape of the adapters of an engine with this `config.json`, or None if it takes none."""
    if not config.build.plugin_config.lora_plugin:
        return None
    lora, own = config.build.lora_config, config.trtserve
    return LoraShape(
        modules=lora_modules(config.model, lora.lora_target_modules, fused_mlp=own.mlp == "fused"),
        layers=config.model.num_hidden_layers,
        max_rank=lora.max_lora_rank,
        bfloat16=own.compute_precision == "bf16",
    )
