"""Compare what logits of short prompts hardly reveal: constants, and tables of which prompts touch few rows.

Constants are epsilons, rotary embeddings, windows and soft-caps. The original's values come from its modules,
preferably from their behaviour rather than their names: the rotation of position 1 gives a rotary embedding's
frequencies. Tables (embeddings, positions, head) are compared row by row, by their products with a few random vectors,
so that neither side copies the other's table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.unified import HEAD, CheckpointReader
from trtserve.pipeline.parity.comparison import BOUNDS, Judgement, Precision

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trtserve.checkpoint.architectures.base import Decoder

    Products = npt.NDArray[np.float32]

# transformers rounds frequencies in another order; a wrong base, factor or size changes them far more.
_CLOSE = 1e-5
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A rotary embedding: inverse `frequencies`, and the scale of sines and cosines.

    Sequences of more than `beyond` tokens use the frequencies `long`, if any.
    """

    frequencies: tuple[float, ...]
    scale: float
    long: tuple[float, ...] | None = None
    beyond: int | None = None


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of a model, besides its weights.

    `rotation` applies to layers with full attention, `local` to layers with a window, or None without rotary
    embeddings. `windows` has one entry per layer, None for full attention.
    """

    epsilons: frozenset[float]
    rotation: Rotation | None
    local: Rotation | None
    windows: tuple[int | None, ...]
    attention_softcap: float | None
    logits_softcap: float | None
    growth: tuple[float, float] = (0.0, 0.0)  # `Decoder.query_growth`: beta and every


def constants_of(model: Any) -> Constants:
    config = model.config.get_text_config()
    rotations = {} if getattr(config, "alibi", False) else dict(_rotations(model, config))
    full = rotations.get(_FULL)
    caps = [getattr(module, "attn_logit_softcapping", None) for module in model.modules()]
    # Norms call it `eps` in torch, sometimes `variance_epsilon` in transformers.
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    found = [getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms]
    return Constants(
        epsilons=frozenset(float(epsilon) for epsilon in found if epsilon is not None),
        rotation=full,
        local=rotations.get(_SLIDING, full),
        windows=_windows(model, config),
        attention_softcap=next((float(cap) for cap in caps if cap is not None), None),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
        growth=_growth(config, getattr(config, "rope_parameters", None) or {}),
    )


def _growth(config: Any, parameters: Mapping[str, Any]) -> tuple[float, float]:
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4
        return float(config.attn_scale), float(config.floor_scale)
    beta = float(parameters.get("llama_4_scaling_beta") or 0)
    return beta, float(parameters["original_max_position_embeddings"]) if beta else 0.0


def _windows(model: Any, config: Any) -> tuple[int | None, ...]:
    """Return the windows or chunks in the model's masks; many configs have the key, but few models use it."""
    layers = int(config.num_hidden_layers)
    if chunk := getattr(config, "attention_chunk_size", None):
        return tuple(int(chunk) if kind == "chunked_attention" else None for kind in config.layer_types)
    code = vars(sys.modules[type(model).__module__])
    heeded = "create_sliding_window_causal_mask" in code or any(hasattr(m, "sliding_window") for m in model.modules())
    window = getattr(config, "sliding_window", None) if heeded else None
    if not window:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or [_SLIDING] * layers
    return tuple(int(window) if kind == _SLIDING else None for kind in kinds)


def _rotations(model: Any, config: Any) -> Iterator[tuple[str, Rotation]]:
    """Return a model's rotary embeddings, each with its kind of layer."""
    import torch

    longest = int(getattr(config, "max_position_embeddings", None) or 2)
    for name, module in model.named_modules():
        if isinstance(table := getattr(module, "embed_positions", None), torch.Tensor):  # GPT-J
            sine, cosine = table[1].float().chunk(2)
            yield _FULL, Rotation(frequencies=_angles(sine, cosine), scale=float((sine**2 + cosine**2).sqrt()[0]))
        elif type(module).__name__.endswith("RotaryEmbedding"):
            for kind in getattr(module, "layer_types", None) or [_SLIDING if name.endswith("_local") else _FULL]:
                yield kind, _rotation(module, longest, kind)


def _rotation(module: Any, longest: int, kind: str) -> Rotation:
    """Measure short sequences first: a module remembers the longest sequence until a short one comes."""
    short, scale = _turned(module, 2, kind)
    long, _ = _turned(module, longest, kind)
    if long == short:
        return Rotation(frequencies=short, scale=scale)
    low, high = 2, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _turned(module, middle, kind)[0] == short else (low, middle)
    _turned(module, 2, kind)
    return Rotation(frequencies=short, scale=scale, long=long, beyond=low)


def _turned(module: Any, length: int, kind: str) -> tuple[tuple[float, ...], float]:
    """Return frequencies and scale for a sequence of `length` tokens."""
    import torch

    positions = torch.tensor([[1, length - 1]])
    several = {"layer_type": kind} if getattr(module, "layer_types", None) else {}
    with torch.inference_mode():
        turns = module(torch.zeros(1, 2, 1), positions, **several)
        # DeepSeek V2 has complex numbers.
        pair = (turns.real, turns.imag) if isinstance(turns, torch.Tensor) else turns
        cosine, sine = (values[0, 0].float() for values in pair)
    half = len(cosine) // 2
    one = slice(half)
    if torch.equal(sine[::2], sine[1::2]):  # the values of a pair are neighbours in Cohere's
        one = slice(None, None, 2)
    elif not torch.equal(cosine[:half], cosine[half:]):  # gpt-oss has each pair once
        one = slice(None)
    return _angles(sine[one], cosine[one]), float((sine**2 + cosine**2).sqrt()[0])


def _angles(sine: Any, cosine: Any) -> tuple[float, ...]:
    import torch

    return tuple(torch.atan2(sine.double(), cosine.double()).tolist())


def judged_constants(
    config: CheckpointConfig, decoder: Decoder, original: Constants, *, windows: bool = True
) -> list[Judgement]:
    """Compare the constants of a checkpoint `config` and its `decoder` with the original's.

    Without `windows`, a checkpoint with no windows at all passes.
    """
    return [
        *_judged_epsilon(config, original),
        *_judged_rotation("rotary", _own(decoder), original.rotation),
        *_judged_local(decoder, original),
        *(_judged_windows(config, decoder, original) if windows or any(decoder.windows) else ()),
        *_judged_cap("attention soft-cap", decoder.attention_softcap, original.attention_softcap),
        *_judged_growth(decoder, original),
        *_judged_cap("logits soft-cap", decoder.logits_softcap, original.logits_softcap),
    ]


def _judged_epsilon(config: CheckpointConfig, original: Constants) -> Iterator[Judgement]:
    """Compare the norms' epsilon with the closest of the original's."""
    value = float(config.norm_epsilon)
    nearest = min(original.epsilons, key=lambda epsilon: abs(epsilon - value), default=None)
    if nearest is not None:
        yield Judgement(name="norm epsilon", value=value, relation="exactly", bound=nearest)


def _own(decoder: Decoder) -> Rotation | None:
    if decoder.rope_inv_freq is None:
        return None
    long = decoder.long_rope
    return Rotation(
        frequencies=decoder.rope_inv_freq,
        scale=decoder.rope_scale,
        long=long.inv_freq if long else None,
        beyond=long.beyond if long else None,
    )


def _judged_local(decoder: Decoder, original: Constants) -> Iterator[Judgement]:
    """Compare the rotation of layers with a window, if it differs from the other layers'."""
    if decoder.local_rope_inv_freq is not None:
        own = Rotation(frequencies=decoder.local_rope_inv_freq, scale=1.0)
        yield from _judged_rotation("local rotary", own, original.local)
    elif original.local != original.rotation:
        yield from _judged_rotation("local rotary", _own(decoder), original.local)


def _judged_rotation(name: str, own: Rotation | None, original: Rotation | None) -> Iterator[Judgement]:
    if own is None and original is None:
        return
    if own is None or original is None:
        yield _nearly(f"{name} frequencies", math.inf)
        return
    yield _nearly(f"{name} frequencies", _apart(own.frequencies, original.frequencies))
    yield _nearly(f"{name} scale", _apart([own.scale], [original.scale]))
    if own.long is not None or original.long is not None:
        yield _nearly(f"{name} frequencies of long sequences", _apart(own.long or (), original.long or ()))
        yield Judgement(
            name=f"{name}: tokens of the longest short sequence",
            value=float(own.beyond or 0),
            relation="exactly",
            bound=float(original.beyond or 0),
        )


def _nearly(name: str, value: float) -> Judgement:
    return Judgement(name=name, value=value, relation="at most", bound=_CLOSE)


def _apart(own: Sequence[float], original: Sequence[float]) -> float:
    """Return the largest difference as a share of the original's value; infinite when counts differ."""
    if len(own) != len(original):
        return math.inf
    pairs = [pair for pair in zip(own, original, strict=True) if pair[0] != pair[1]]
    return max((abs(one - other) / abs(other) if other else math.inf for one, other in pairs), default=0.0)


def _judged_windows(config: CheckpointConfig, decoder: Decoder, original: Constants) -> Iterator[Judgement]:
    """Count layers with a different window; a window longer than any sequence counts as none."""
    longest = config.max_position_embeddings or math.inf

    def effective(window: int | None) -> int | None:
        return window if window is not None and window < longest else None

    theirs = [effective(window) for window in original.windows]
    ours = [effective(decoder.window(layer)) for layer in range(config.num_hidden_layers)]
    if any(ours) or any(theirs):
        others = sum(one != other for one, other in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
        yield Judgement(name="layers with another window", value=float(others), relation="exactly", bound=0.0)


def _judged_growth(decoder: Decoder, original: Constants) -> Iterator[Judgement]:
    growth = decoder.query_growth
    own = (0.0, 0.0) if growth is None else (growth.beta, float(growth.every))
    if own != (0.0, 0.0) or original.growth != (0.0, 0.0):
        for name, one, other in zip(("beta", "positions"), own, original.growth, strict=True):
            yield Judgement(name=f"growth of queries: {name}", value=one, relation="exactly", bound=other)


def _judged_cap(name: str, own: float | None, original: float | None) -> Iterator[Judgement]:
    """0 means none."""
    if own or original:
        yield Judgement(name=name, value=float(own or 0), relation="exactly", bound=float(original or 0))


# Checkpoint name → name of the figure.
_TABLES: Mapping[str, str] = {
    "transformer.vocab_embedding.weight": "rows of the embedding",
    "transformer.position_embedding.weight": "rows of the positions",
    HEAD: "rows of the head",
}
_POSITIONS = ("wpe.weight", "embed_positions.weight")
_SEED, _VECTORS = 20240301, 4
_ROWS = 4096  # rows converted to float32 at a time


def products_of(model: Any) -> dict[str, Products]:
    """Return the products f32[rows, 4] of every table of a transformers model, keyed by checkpoint name."""
    vocabulary, positions, head = _TABLES
    parameters = dict(model.named_parameters())
    tables = {vocabulary: model.get_input_embeddings().weight, head: model.get_output_embeddings().weight}
    learned = next((values for name, values in parameters.items() if name.endswith(_POSITIONS)), None)
    if learned is not None:
        tables[positions] = learned
    inward = next((values for name, values in parameters.items() if name.endswith("project_in.weight")), None)
    outward = next((values for name, values in parameters.items() if name.endswith("project_out.weight")), None)
    # OPT-350m's embeddings are narrower than its layers; a checkpoint stores the products.
    through = {vocabulary: None if inward is None else inward.T, head: outward}
    return {name: _products(table.detach(), through.get(name)) for name, table in tables.items()}


def _products(table: Any, through: Any) -> Products:
    import torch

    with torch.inference_mode():
        size = table.shape[1] if through is None else through.shape[1]
        vectors = torch.from_numpy(_vectors(size))
        products: Products = (table @ (vectors if through is None else through.detach() @ vectors)).numpy()
    return products


def _vectors(size: int) -> Products:
    import numpy as np

    return np.random.default_rng(_SEED).standard_normal((size, _VECTORS), dtype=np.float32)


def judged_rows(reader: CheckpointReader, originals: Mapping[str, Products], bounds: Precision) -> Iterator[Judgement]:
    """Return each table's row farthest from the original's, as a share of the products' root mean square."""
    import numpy as np

    held = set(reader.names())
    for name, figure in _TABLES.items():
        if name not in held or name not in originals:
            continue
        table = reader.merged(name)
        vectors = _vectors(table.shape[1])
        parts = [table[row : row + _ROWS].astype(np.float32) @ vectors for row in range(0, len(table), _ROWS)]
        own, original = np.concatenate(parts), originals[name]
        # OPT's position table starts with two unused rows.
        gaps = np.abs(own - original[-len(own) :]) if len(own) <= len(original) else np.array([np.inf])
        root = float(np.sqrt(np.square(original).mean()))
        value = float(gaps.max()) / root if root else float(gaps.max())
        yield Judgement(name=figure, value=value, relation="at most", bound=BOUNDS[bounds].largest)
