"""`config.json` of a TensorRT-LLM checkpoint, typed: read once, where the file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from trtserve.errors import CorruptFileError, TrtserveError
from trtserve.files import decode_as

T = TypeVar("T", bool, int, float, str)

_AGAIN = "Convert the model again."
# Layers and experts are counted one by one, as are ranks.
Parts = Annotated[int, Meta(ge=0, le=10_000)]
Heads = Annotated[int, Meta(ge=0, le=65_536)]
Size = Annotated[int, Meta(ge=0, lt=1 << 31)]
_MOST_RANKS = 65_536


@dataclass(frozen=True, kw_only=True)
class ParallelMapping:
    """`mapping`: how ranks share the model."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    moe_tp_size: int | None = None  # None, and -1 in TensorRT-LLM: follows from the others
    moe_ep_size: int = 1  # -1 in TensorRT-LLM: follows from the others
    gpus_per_node: int = 8
    world_size: int | None = None  # as stated; see `ranks`

    def __post_init__(self) -> None:
        """Refuse sizes of which no mapping can be made."""
        if self.moe_ep_size == -1:
            parts = self.tp_size if self.moe_tp_size in (None, -1) else self.moe_tp_size
            object.__setattr__(self, "moe_ep_size", max(1, self.tp_size // max(1, parts)))
        for name in ("tp_size", "pp_size", "cp_size", "moe_ep_size", "gpus_per_node", "world_size"):
            size = getattr(self, name)
            if size is not None and not 1 <= size <= _MOST_RANKS:
                raise ValueError(f"Expected a `{name}` of 1 to {_MOST_RANKS}, got {size}")

    @property
    def product(self) -> int:
        """The ranks that tensor, pipeline and context parallelism need; engines may state another world size."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def ranks(self) -> int:
        """The processes that serve the model, each with a file of its own."""
        return max(self.product, self.world_size or 1)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """`quantization`: how matrices and the KV cache are stored."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    exclude_modules: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str | None:
        """TensorRT-LLM's name for how matrices are stored, or None for floats."""
        return None if self.quant_algo == "NO_QUANT" else self.quant_algo


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """`moe`: the experts of each layer, and how many of them see a token."""

    num_experts: Parts = 0
    top_k: Parts = 0
    normalization_mode: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExecutorDefaults:
    """`runtime_defaults`: values for the executor where its user gives none."""

    max_attention_window: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OwnCheckpointKeys:
    """`trtserve`: what we record in a checkpoint; TensorRT-LLM ignores unknown keys."""

    gpu_sm: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The keys that all families have, with TensorRT-LLM's defaults for those that are missing or null.

    `content` is the file as it is: what is written again is written from it, unknown keys included. A size is 0 where
    an engine of another tool does not say it.
    """

    architecture: str = ""
    dtype: str = ""
    logits_dtype: str = "float32"
    vocab_size: Size = 0
    hidden_size: Size = 0
    num_hidden_layers: Parts = 0
    num_attention_heads: Heads = 0
    num_key_value_heads: Heads = 0
    head_size: Heads = 0
    intermediate_size: Size = 0
    moe_intermediate_size: Size = 0
    moe_shared_expert_intermediate_size: Size = 0
    hidden_act: str = ""
    norm_epsilon: float = 1e-5
    position_embedding_type: str = ""
    max_position_embeddings: Size = 0
    original_max_position_embeddings: Size = 0
    rotary_base: float = 10000.0
    rotary_scaling: Mapping[str, Any] | None = None
    full_attention_rotary_scaling: Mapping[str, Any] | None = None  # ours: of Gemma 3's layers without a window
    longrope_scaling_short_factors: tuple[float, ...] = ()
    longrope_scaling_long_factors: tuple[float, ...] = ()
    max_attention_window: tuple[int | None, ...] = ()  # ours: sliding windows, see `Decoder.windows`
    unrotated_layers: tuple[bool, ...] = ()  # ours: see `Decoder.unrotated`
    dense_layers: tuple[int, ...] = ()  # ours: layers without experts in a model with experts
    mixer_layers: tuple[int, ...] = ()  # ours: layers with a state instead of keys and values
    mixer_beside: bool = False  # ours: beside them
    full_head_size: Heads = 0  # ours: of layers without a window, where it differs (Gemma 4)
    full_num_key_value_heads: Heads = 0  # ours: the same
    shared_key_layers: Parts = 0  # ours: so many last layers use keys and values of earlier ones
    shared_wide_mlp: bool = False  # ours: and have an MLP of twice the width
    layer_input_size: Size = 0  # ours: see `Decoder.layer_inputs`
    layer_input_vocab: Size = 0  # ours: rows of their table, whose first one stands for all other tokens; 0: all
    streams: Parts = 0  # ours: see `Decoder.streams`
    stream_rank: Size = 0  # ours: of the product beside attention
    gate_sparsity: tuple[float, ...] = ()  # ours: the share of each layer's gate that does not count
    mlp_layers: tuple[int, ...] = ()  # ours: layers with an MLP only, see `Decoder.mlp_layers`
    superset: tuple[str, ...] = ()  # ours: what of the model TensorRT-LLM's format does not have, in words
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    share_embedding_table: bool = False
    mapping: ParallelMapping = field(default_factory=ParallelMapping)
    quantization: Quantization = field(default_factory=Quantization)
    moe: MixtureOfExperts = field(default_factory=MixtureOfExperts)
    runtime_defaults: ExecutorDefaults = field(default_factory=ExecutorDefaults)
    trtserve: OwnCheckpointKeys = field(default_factory=OwnCheckpointKeys)
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        content: Mapping[str, Any],
        source: object = "config.json",
        error: type[TrtserveError] = CorruptFileError,
        *,
        hint: str | None = _AGAIN,
    ) -> CheckpointConfig:
        """Return the content of `source` as a config; `error` names a key of another type."""
        known = without_nulls({key: value for key, value in content.items() if key != "content"})
        decoded = decode_as(known, cls, "the config of a checkpoint", source, error, hint=hint, tolerant=True)
        heads, hidden = decoded.num_attention_heads, decoded.hidden_size
        return replace(
            decoded,
            num_key_value_heads=decoded.num_key_value_heads or heads,
            head_size=decoded.head_size or hidden // (heads or 1),
            intermediate_size=decoded.intermediate_size or 4 * hidden,
            content=content,
        )

    def changed(self, **keys: object) -> CheckpointConfig:
        """Return the config with other values for some keys of the file."""
        return self.of({**self.content, **keys})

    def key_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer uses: the last one of its kind with its own."""
        first = self.num_hidden_layers - self.shared_key_layers
        if layer < first:
            return layer
        return max(other for other in range(first) if self.sees_all(other) == self.sees_all(layer))

    def sees_all(self, layer: int) -> bool:
        """Return whether a layer has no window."""
        windows = self.max_attention_window or (None,)
        return windows[layer % len(windows)] is None

    def of_layer(self, layer: int) -> CheckpointConfig:
        """Return the config with the sizes of one layer's heads and MLP."""
        found = self
        if self.full_head_size and self.sees_all(layer):
            kv_heads = self.full_num_key_value_heads or self.num_key_value_heads
            found = replace(found, head_size=self.full_head_size, num_key_value_heads=kv_heads)
        if self.shared_wide_mlp and self.key_layer(layer) != layer:
            shared = self.moe_shared_expert_intermediate_size
            found = replace(
                found, intermediate_size=2 * self.intermediate_size, moe_shared_expert_intermediate_size=2 * shared
            )
        return found

    @property
    def layers_without_keys(self) -> set[int]:
        """The layers without attention."""
        return {*self.mlp_layers, *(() if self.mixer_beside else self.mixer_layers)}

    def completed(self) -> CheckpointConfig:
        """Return the config with the sizes that older releases omit, as the file of an engine has them."""
        sizes = ("num_key_value_heads", "head_size", "intermediate_size")
        return self.changed(**{key: getattr(self, key) for key in sizes if self.content.get(key) is None})

    def own(self, key: str, default: T) -> T:
        """Return a key that only some families have, or `default` if it is missing or null.

        Raises CorruptFileError for another type than that of `default`.
        """
        found = self.own_or_none(key, type(default))
        return default if found is None else found

    def own_or_none(self, key: str, kind: type[T]) -> T | None:
        """Return a key that only some families have, or None; errors as in `own`."""
        found: object = self.content.get(key)
        if found is None:
            return None
        if type(found) is int and kind is float:
            return kind(found)
        if type(found) is not kind:
            raise CorruptFileError(
                f"config.json cannot be read as the config of a checkpoint: expected `{kind.__name__}`, got "
                f"`{type(found).__name__}` at `{key}`.",
                hint=_AGAIN,
            )
        return found


def without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without keys that are null: they have TensorRT-LLM's defaults."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value is not None
    }
