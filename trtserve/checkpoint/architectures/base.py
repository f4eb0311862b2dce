"""The interface of a model family: how Hugging Face tensors map to a checkpoint, and how its decoder is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.parts.mixers import Mixer, MixerTensor
from trtserve.errors import UnsupportedModelError
from trtserve.specs.options import INT32

_MOST_PARTS = 10_000
_MOST_HEADS = 65_536
_MOST_IN_A_ROW = 1 << 20
_FLOAT32_MAX = 3.4e38
PUBLISHED = "Use the config.json that was published with the weights."

HfConfig = Mapping[str, Any]

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned", "alibi"]

# The MLP's form:
#   plain    fc → activation → proj
#   gated    the activation is multiplied by gate
#   fused    fc holds both halves, the factor first, then the activated half (TensorRT-LLM's swiglu)
#   experts  several fused MLPs; a router picks some of them for each token. Layers without experts are gated
Mlp = Literal["gated", "plain", "fused", "experts"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]

# With α₊ = softplus(a), α₋ = ½ + softplus(b) and a layer's tensor `mlp.xielu` = (a, b), xIELU is α₊ x² + ½ x for x > 0,
# else α₋ (exp(x) − 1 − x) + ½ x (arXiv 2411.13010). Its MLP is plain.

# Names in Hugging Face configs.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}

# How a layer adds attention and MLP to its input x:
#   sequential  x + attention(norm(x)), then the same for the MLP
#   sandwich    x + norm(attention(norm(x))), then the same for the MLP (Gemma 2)
#   branch      x + norm(attention(x)), then the same for the MLP (OLMo 2)
#   parallel    x + attention(norm(x)) + MLP(norm(x)), with two norms or a shared one (GPT-J, Falcon)
#   post        norm(x + attention(x)), then the same for the MLP; no norm after the last layer (OPT-350m)
#   streamed    sandwich on one of several states, see `Streams` (Gemma 3n)
#   single      x + attention(norm(x)), or x + MLP(norm(x)) in `mlp_layers` (Nemotron-H)
Block = Literal["sequential", "sandwich", "branch", "parallel", "post", "streamed", "single"]

# How queries and keys are normalised; the norm is of the decoder's kind, without biases:
#   heads    each head before rotation, with one weight for all heads or one for each
#   all      all heads together before rotation (OLMo 2)
#   rotated  each head after rotation (Hunyuan)
#   bare     each head after rotation, by the RMS alone, and only in layers that rotate (Llama 4)
HeadNorm = Literal["heads", "all", "rotated", "bare"]

# How tensor-parallel ranks share a tensor:
#   replicated     every rank holds a full copy
#   column         split on dimension 0 (output features)
#   row            split on dimension 1 (input features)
#   qkv            each rank holds its rows of q, k and v, joined on dimension 0; too few key/value heads are repeated
#   fused          each of the `parts` is split on dimension 0, and each rank joins its pieces
#   first_rank     rank 0 holds the tensor, the others hold zeros: a bias that the all-reduce must add only once
#   vocab          zero-padded on dimension 0 to a multiple of the rank count, then split on it
#   expert_column  [experts, out, in]: experts split over expert-parallel ranks, then the parts of each as `fused`
#   expert_row     [experts, out, in]: experts split over expert-parallel ranks, then the input features of each
#   experts        [experts, out, 1]: experts split over expert-parallel ranks; of the ranks that share an expert, the
#                  first adds its bias
Split = Literal[
    "replicated", "column", "row", "qkv", "fused", "first_rank", "vocab", "expert_column", "expert_row", "experts"
]


class WrongConfigError(UnsupportedModelError):
    """config.json cannot be the one that was published with the weights."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint=PUBLISHED)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A matrix [width, columns] of the Hugging Face model, to be multiplied into a target's source."""

    name: str
    width: int
    transposed: bool = False  # stored as [columns, width]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor of the unsharded checkpoint and its source tensors.

    A tensor of experts has three dimensions and is treated as a matrix whose rows are those of all experts: `sources`
    and `parts` list the first expert's, then the second's, and so on.
    """

    name: str
    sources: Sequence[str]  # names in the Hugging Face model, joined on dimension 0
    shape: tuple[int, ...]  # unsharded, [out, in] for weights, without vocabulary padding
    split: Split = "replicated"
    parts: tuple[int, ...] = ()  # row counts of the fused parts: q, k and v, or the halves of a gated MLP
    head_size: int = 0  # rows of q, k or v that stay on one rank
    order: tuple[tuple[int, int], ...] = ()  # runs (first row, rows) of each source, in target order; (): unchanged
    runs: tuple[tuple[int, int, int], ...] = ()  # the same with the number of the source in front
    transpose: bool = False  # Conv1D weights, stored [in, out]
    offset: float = 0.0  # added to all values
    factor: Factor | None = None  # the target is the one source times this matrix
    layer: int | None = None  # global index; None outside the layers
    last_stage: bool = False  # a tensor outside the layers: on the last pipeline stage instead of the first
    dtype: str | None = None  # None: the checkpoint's


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """Inverse frequencies for sequences that may exceed `beyond` tokens (LongRoPE)."""

    inv_freq: tuple[float, ...]
    beyond: int


@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """gate · sigmoid(alpha · gate) · (factor + 1), with gate at most `limit` and factor within ± limit (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + `beta` · ln(1 + ⌊(p + `first`) / `every`⌋) (Ministral 3, Llama 4)."""

    beta: float
    every: int
    first: int = 0
    unrotated: bool = False  # only in layers that do not rotate


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts: the router sends each token to its best experts and weights their outputs by their scores.

    Tensors that a layer may have besides its matrices: `router.bias`, added before scores are made of the products,
    `router.correction`, added to the scores only to choose by them, `router.scale`, by which the weights of the chosen
    experts are multiplied, and the biases of `fc` and `proj`.
    """

    count: int  # experts per layer
    chosen: int  # experts per token (top-k)
    renormalized: bool  # the chosen experts' scores are scaled to sum to 1
    scores: Literal["softmax", "sigmoid"] = "softmax"  # over all experts, or of each for itself
    shared: bool = False  # one more expert sees every token
    shared_gate: bool = True  # its output is weighted by the sigmoid of its gate
    # Both have norms of their own: `pre_experts`, `post_experts` and `post_shared`, whose names end with `_layernorm`.
    # The router sees what `router_norm` makes of the states before them, / √hidden (Gemma 4).
    apart: bool = False
    groups: int = 1  # experts form groups of neighbours; those of the `chosen_groups` best groups can be chosen
    chosen_groups: int = 1
    group_scores: int = 2  # a group's score is the sum of so many of its experts' best scores
    scale: float = 1.0  # multiplies the weights
    scaled_inputs: bool = False  # the weights multiply what the experts see, not their outputs (Llama 4)
    clamp: ClampedGate | None = None  # instead of activation and product
    gated: bool = True  # otherwise `fc` is activated, without a factor, in layers with one MLP too
    interleaved: bool = False  # the rows of `fc` are gate, factor, gate, …: not the factors first, then the gates
    dense_layers: frozenset[int] = frozenset()  # layers with an MLP instead


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values are made of one latent vector per token (MLA).

    A head's query and key have `plain` numbers without positions, which the key takes from the latent vector, and
    `rotated` ones; the rotated key is the same for all heads. Queries may come from a smaller vector (`q_a`).
    """

    rank: int  # numbers of the latent vector
    rotated: int
    plain: int
    value: int  # numbers of a head's value
    epsilon: float  # of the norms of the latent vector and of what queries are made of


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Several states of each token, of which a layer sees one and corrects all (AltUp, arXiv 2301.13310).

    Beside a layer's attention stands a product of low rank, added to its own input (LAuReL, arXiv 2411.07501).
    """

    count: int
    active: int  # the state that layers see


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The layers of a decoder. Runtimes build their graph from it and from the sizes in the checkpoint's config."""

    norm: Norm
    positions: Positions
    mlp: Mlp
    activation: Activation
    attention_scale: float  # multiplies q·k
    # One inverse frequency, scaling applied, per rotated pair of a head; with partial rotation the first pairs rotate.
    rope_inv_freq: tuple[float, ...] | None = None
    # Of layers with a window, without `rope_scale`; None: as the other layers.
    local_rope_inv_freq: tuple[float, ...] | None = None
    rope_interleaved: bool = False  # pairs are neighbours (GPT-J), not the two halves of a head (GPT-NeoX)
    rope_scale: float = 1.0  # multiplies the rotated values
    long_rope: LongRope | None = None
    query_growth: QueryGrowth | None = None
    alibi_slopes: tuple[float, ...] | None = None  # per head; slope × key position is added to the scaled scores
    windows: tuple[int | None, ...] = ()  # sliding windows in tokens, cycled over the layers; None: full attention
    chunked: bool = False  # instead of a window, tokens see those of their own chunk of so many tokens (Llama 4)
    block: Block = "sequential"
    unrotated: tuple[bool, ...] = ()  # layers whose queries and keys have no positions, cycled over the layers
    qk_norm: HeadNorm | None = None
    mlp_norm: str | None = "post_layernorm"  # the norm before the MLP; None: a parallel MLP shares attention's
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and MLP add to their input
    logits_scale: float = 1.0  # multiplies the logits
    embedding_norm: bool = False
    attention_softcap: float | None = None  # c: scores become c · tanh(score / c)
    logits_softcap: float | None = None  # the same for logits
    attention_sinks: bool = False  # a learned score per head takes its share of the softmax and adds nothing (gpt-oss)
    value_norm: bool = False  # each head's values are normed, by the RMS alone (Gemma 4)
    key_layers: tuple[int, ...] = ()  # the layer whose keys and values each layer uses; (): its own
    # So many numbers for each token and layer, of a table and of a product of the embedding, are an input to the layer
    # after its MLP; 0: none (Gemma 3n and 4). In a streamed block they change all states but the first.
    layer_inputs: int = 0
    streams: Streams | None = None  # in a decoder of streamed blocks
    # Of each layer, in standard deviations above the mean: what a gated MLP activates is at least so large, and only
    # the rest counts; None: all of it (Gemma 3n).
    gate_thresholds: tuple[float | None, ...] = ()
    layer_scales: bool = False  # what a layer returns is multiplied by a learned number
    attention_gate: bool = False  # what heads attend to is multiplied by the sigmoid of a product (Qwen3-Next)
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mixer: Mixer | None = None  # of layers with a state
    mixer_layers: frozenset[int] = frozenset()  # the layers that have it instead of attention
    mixer_beside: bool = False  # they have it beside attention: both see the same and are added (Falcon-H1)
    attention_factor: float = 1.0  # multiplies what attention adds
    gate_factor: float = 1.0  # multiplies what a gated MLP activates
    mlp_factor: float = 1.0  # multiplies what a gated MLP adds
    mlp_layers: frozenset[int] = frozenset()  # of a decoder of single blocks: layers with neither

    @property
    def gated(self) -> bool:
        """Whether layers with one MLP have a matrix `gate`."""
        return self.mlp == "gated" or (self.experts is not None and self.experts.gated)

    def mixer_of(self, layer: int) -> Mixer | None:
        """Return what a layer has instead of attention, or None."""
        return self.mixer if layer in self.mixer_layers else None

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer, or None for one with a single MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def gate_threshold(self, layer: int) -> float | None:
        """Return what a layer's gate must exceed, in standard deviations above its mean, or None."""
        return self.gate_thresholds[layer] if self.gate_thresholds else None

    def key_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer uses."""
        return self.key_layers[layer] if self.key_layers else layer

    def window(self, layer: int) -> int | None:
        """Return a layer's sliding window in tokens, or None for full attention."""
        return self.windows[layer % len(self.windows)] if self.windows else None

    def has_chunks(self, longest: int) -> bool:
        """Return whether sequences of `longest` tokens have several chunks."""
        return self.chunked and any(window is not None and window < longest for window in self.windows)

    def growth(self, layer: int) -> QueryGrowth | None:
        """Return how a layer's queries grow, or None."""
        growth = self.query_growth
        return None if growth is None or (growth.unrotated and self.rotation(layer) is not None) else growth

    def rotation(self, layer: int) -> tuple[float, ...] | None:
        """Return a layer's inverse frequencies, or None without rotation."""
        if self.unrotated and self.unrotated[layer % len(self.unrotated)]:
            return None
        local = None if self.window(layer) is None else self.local_rope_inv_freq
        return local or self.rope_inv_freq


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Tensor names inside a layer, without `.weight`; `{}` stands for the expert's number.

    `gate` is the activated branch, multiplied by `up`. `shared` is the prefix of the shared expert's gate_proj, up_proj
    and down_proj; `shared` + `_gate` names its gate.
    """

    router: str
    gate: str | None  # None: `up` holds both
    up: str
    down: str
    shared: str | None = None
    shared_fused: bool = False  # with input_linear, the gate first, and output_linear instead (Granite 4)
    correction: str | None = None  # the whole name of what is added to scores to choose by
    router_bias: bool = False
    router_norm: str | None = None  # the whole name of the weight of a norm before the router
    scale: str | None = None  # the whole name of the factors of the experts' weights
    biases: bool = False  # of the experts' matrices
    transposed: bool = False  # the experts' matrices are stored [in, out]
    plain: bool = False  # `up` is activated; there is no factor
    gate_first: bool = False  # in an `up` that holds both; the checkpoint stores them in the other order


Part = Literal["qkv", "dense", "fc", "gate", "proj", "head"]


@dataclass(frozen=True, kw_only=True)
class SourceNames:
    """The source tensors of a family, by their names without `.weight` and `.bias`.

    Names inside a layer follow its prefix `layer`, which has `{}` for the layer's number. The keys of norms are their
    names in the checkpoint.
    """

    embedding: str
    layer: str
    norms: Mapping[str, str]
    qkv: Sequence[str]  # three names, or one fused tensor
    dense: str
    fc: str
    proj: str
    final_norm: str | None
    head: str = "lm_head"
    gate: str | None = None  # of a gated MLP; `fc` is the activated branch
    experts: ExpertNames | None = None  # instead of the MLP, but for layers that are dense
    latent: bool = False  # latent attention instead of `qkv` and `dense`
    attention_gate: str | None = None  # what heads attend to is multiplied by the sigmoid of this product
    gated_queries: bool = False  # the first of `qkv` has each head's query and then its gate
    single: bool = False  # a layer has attention, a state or an MLP, after one norm
    mixer: Sequence[MixerTensor] = ()  # instead of attention, in layers with a state
    xielu: tuple[str, ...] = ()  # the whole names of the activation's two numbers
    values_are_keys: bool = False  # layers without a window have keys, which are their values before norms (Gemma 4)
    layer_scale: str | None = None  # the whole name of the number that a layer's result is multiplied by
    sinks: str | None = None  # the whole name of the scores of attention's sinks
    head_norms: Mapping[str, str] = field(default_factory=dict)  # of queries and keys; `{}` for the number of a head
    # The weights of `head_norms`: one for all heads [D], one for each [H, D], or all in a row [H · D].
    head_norm_weights: Literal["shared", "each", "row"] = "shared"
    positions: str | None = None
    embedding_norm: str | None = None
    biases: frozenset[Part] = frozenset()  # the matrices that have one
    norm_biases: bool = True
    norm_offset: float = 0.0  # added to the weights of all norms
    grouped: bool = False  # fused qkv: the queries of a key/value head, its key and its value, then those of the next
    gate_up: bool = False  # `fc` holds gate and up of a gated MLP, which the checkpoint stores in the other order
    first_rank_bias: bool = False  # the bias of `proj` is on rank 0 only
    transposed: bool = False  # the matrices of the layers are stored [in, out]
    unused_positions: int = 0  # first rows of the table `positions`, which no token uses
    factors: Mapping[str, Factor] = field(default_factory=dict)  # checkpoint tensor → what it is multiplied by
    unused: tuple[str, ...] = ()  # patterns (fnmatch) of tensors that the checkpoint does not need


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model family: the functions of its module, Llama's `names` and `decoder` where it has none, and two facts."""

    # Returns the family's part of the checkpoint's `config.json`: sizes, positions and extra keys.
    # Raises UnsupportedModelError when the model has a feature that cannot be converted.
    checkpoint_config: Callable[[HfConfig], dict[str, Any]]
    source_names: SourceNames | Callable[[CheckpointConfig], SourceNames]  # the same for all models, or of one
    decoder: Callable[[CheckpointConfig], Decoder]  # the decoder that a checkpoint's `config.json` describes
    prefix: str  # of all source names except the head's. Files saved without the head omit it
    tied: bool  # transformers' default for `tie_word_embeddings`

    def names(self, config: CheckpointConfig) -> SourceNames:
        """Return the names of a model's source tensors."""
        return self.source_names if isinstance(self.source_names, SourceNames) else self.source_names(config)


def required(hf: HfConfig, *keys: str) -> dict[str, Any]:
    """Return the sizes `keys` of a Hugging Face config.

    Raises UnsupportedModelError when one is absent or not a size.
    """
    absent = [key for key in keys if hf.get(key) is None]
    if absent:
        raise UnsupportedModelError(
            f"config.json of this {hf.get('model_type', 'unknown')} model lacks {', '.join(absent)}.",
            hint="Take config.json from the model's own repository.",
        )
    require_sizes(hf, *keys)
    return {key: hf[key] for key in keys}


def decoder_sizes(hf: HfConfig, **keys: str) -> dict[str, Any]:
    """Return the sizes of a decoder whose queries, keys and values have as many heads each.

    `keys` are other names of sizes in the Hugging Face config, and further sizes. Errors are those of `required`.
    """
    own = {name: name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    names = {**own, **keys, "vocab_size": "vocab_size"}
    found = required(hf, *names.values())
    sizes = {name: found[key] for name, key in names.items()}
    heads, head_size = sizes["num_attention_heads"], sizes["hidden_size"] // sizes["num_attention_heads"]
    return {**sizes, "num_key_value_heads": heads, "head_size": head_size, "rotary_embedding_dim": head_size}


def require_sizes(config: Mapping[str, Any], *keys: str) -> None:
    """Raise UnsupportedModelError unless all `keys` are positive integers, and no absurd ones."""
    large = [f"{key} = {config[key]!r:.80}" for key in keys if is_size(config.get(key)) and config[key] > _most(key)]
    if large:
        raise WrongConfigError(f"config.json has {', '.join(large)}; no model is that large.")
    wrong = [f"{key} = {config.get(key)!r:.80}" for key in keys if not is_size(config.get(key))]
    if wrong:
        raise WrongConfigError(f"config.json has {', '.join(wrong)}; expected positive integers.")


def _most(key: str) -> int:
    """Return the largest value of a size: layers, experts and the numbers of a head are counted one by one."""
    if key.startswith(("num_", "n_")) and ("layer" in key or "expert" in key):
        return _MOST_PARTS
    if "head" in key:
        return _MOST_HEADS
    return INT32 if any(word in key for word in ("vocab", "position", "inter", "inner", "ffn")) else _MOST_IN_A_ROW


def require_numbers(config: Mapping[str, Any], *keys: str) -> None:
    """Raise UnsupportedModelError when one of `keys` is present but not a positive number."""
    given = {key: config[key] for key in keys if config.get(key) is not None}
    wrong = [f"{key} = {value!r:.80}" for key, value in given.items() if not is_number(value)]
    if wrong:
        raise WrongConfigError(f"config.json has {', '.join(wrong)}; expected positive numbers.")


def is_number(value: object) -> bool:
    """Return whether a value is a positive number of float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _FLOAT32_MAX


def is_size(value: object) -> bool:
    """Return whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def superset(*features: str) -> dict[str, Any]:
    """Return the key that marks a checkpoint which only our runtimes read (decision 21); empty without features.

    Features are words such as "yarn", which follow "TensorRT-LLM's checkpoint format lacks".
    """
    return {"superset": list(features)} if features else {}


def require_activation(name: str, *kinds: Activation) -> Activation:
    """Return the activation function called `name`.

    Raises UnsupportedModelError unless it is one of `kinds` (default: any).

    A family whose checkpoint does not record the activation passes the one kind that it implies.
    """
    allowed = [word for word, kind in _ACTIVATIONS.items() if not kinds or kind in kinds]
    if name not in allowed:
        raise UnsupportedModelError(f"Activation {name!r} is not supported; supported: {', '.join(allowed)}.")
    return _ACTIVATIONS[name]


def embedding_split(config: CheckpointConfig) -> Split:
    """Return how ranks share the embedding: replicated unless the config sets `use_parallel_embedding`."""
    if not config.use_parallel_embedding:
        return "replicated"
    return "row" if config.embedding_sharding_dim == 1 else "vocab"


def fused_qkv(config: CheckpointConfig) -> tuple[int, int, int]:
    """Return the row counts of q, k and v in the unsharded fused tensor."""
    keys = config.num_key_value_heads * config.head_size
    return config.num_attention_heads * config.head_size, keys, keys


def expert_size(config: CheckpointConfig) -> int:
    """Return the width of one expert: `moe_intermediate_size`, or `intermediate_size` (Mixtral)."""
    return int(config.moe_intermediate_size or config.intermediate_size)


def moe_object(
    *, num_experts: int = 0, top_k: int = 0, normalization_mode: int | None, shared_size: int = 0
) -> dict[str, Any]:
    """Return TensorRT-LLM's `moe` object (MoeConfig) with the keys of all releases."""
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": 0,
        "num_shared_experts": 0,
        "shared_expert_intermediate_size": shared_size,
        "top_k": top_k,
        "normalization_mode": normalization_mode,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }
