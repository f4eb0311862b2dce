"""PEFT LoRA adapters: how their tensors map to rows of TensorRT-LLM's `lora_weights` and `lora_config`.

A row of the weights is the flattened in-weight [rank, inputs] followed by the out-weight [outputs, rank] times the
adapter's scale, zero-padded to the longest row. Its row of the config is (module id, layer, rank). Scale and patterns
follow PEFT's LoraConfig.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.checkpoint.tensor_files import LazyModule, TensorFile
from trtserve.errors import ConversionError, CorruptFileError, UnsupportedModelError
from trtserve.files import read_json_object
from trtserve.process.answering import first_matches

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

StorageType = Literal["float16", "float32", "bfloat16"]

MODULES: Mapping[str, tuple[str, int]] = {
    "qkv_proj": ("attn_qkv", 0),
    "query_key_value": ("attn_qkv", 0),
    "q_proj": ("attn_q", 1),
    "k_proj": ("attn_k", 2),
    "v_proj": ("attn_v", 3),
    "o_proj": ("attn_dense", 4),
    "dense": ("attn_dense", 4),
    "gate_proj": ("mlp_h_to_4h", 5),
    "gate_up_proj": ("mlp_h_to_4h", 5),
    "c_fc": ("mlp_h_to_4h", 5),
    "down_proj": ("mlp_4h_to_h", 6),
    "c_proj": ("mlp_4h_to_h", 6),
    "up_proj": ("mlp_gate", 7),
    "w1": ("moe_h_to_4h", 13),
    "w2": ("moe_4h_to_h", 14),
    "w3": ("moe_gate", 15),
    "gate": ("moe_router", 16),
}
"""Module of a Hugging Face layer → word of `--lora-target-modules` and number in `lora_config`."""

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"(?P<path>.*\.layers\.(?P<layer>[0-9]{1,6})\.(?:self_attn|mlp|block_sparse_moe)\.(?P<module>[a-z0-9_]+))"
    r"\.lora_(?P<part>[AB])\.weight"
)
# Names, with what cannot make a regular expression slow: repetitions and groups are what can.
_PLAIN_PATTERN = re.compile(r"[^*+?{}()]*")
PATTERN_SECONDS = 5  # seconds in which the patterns of an adapter must be matched with the names of its modules
_MOST_PATTERNS = 10_000
_LONGEST_PATTERN = 1000
_LONGEST_EXPRESSION = 1 << 16  # that chooses modules; trainers write one with the names of all layers
_LARGEST_ALPHA = 1e9
_LARGEST_RANK = 1 << 16
_EXPERT = re.compile(r".*\.experts\.\d+\..*")
# PEFT changes the base model's weights when it loads adapters with these settings.
_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga")
_REFUSED_VALUES: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "a bias in its matrices",
    "modules_to_save": "whole modules in addition to its matrices (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "target_parameters": "matrices for bare parameters (target_parameters)",
}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The settings in `adapter_config.json` that determine each module's scale."""

    alpha: float
    rslora: bool = False
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str = ""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Module → alpha, of the modules that `with_modules` was asked about."""

    def scale(self, path: str, rank: int) -> float:
        """Return alpha / rank, or alpha / √rank with rsLoRA; `path` is the module's name in the model."""
        alphas = self.alphas if path in self.alphas else self.with_modules([path]).alphas
        return alphas[path] / (math.sqrt(rank) if self.rslora else rank)

    def with_modules(self, paths: Sequence[str]) -> AdapterConfig:
        """Return the same settings with the alpha of each module: that of the first pattern that matches its name.

        Raises CorruptFileError for patterns that are invalid, and for those that take longer than PATTERN_SECONDS.
        """
        keys = list(self.alpha_pattern)
        patterns = [rf"(.*\.)?({key})$" for key in keys]
        try:
            if all(map(_PLAIN_PATTERN.fullmatch, keys)):
                compiled = [re.compile(pattern) for pattern in patterns]
                found = [next((n for n, each in enumerate(compiled) if each.match(path)), None) for path in paths]
            else:
                found = first_matches(patterns, paths, seconds=PATTERN_SECONDS)
        except TimeoutError:
            raise CorruptFileError(
                f"adapter_config.json has a regular expression in alpha_pattern that takes more than "
                f"{PATTERN_SECONDS} s for {len(paths)} modules.",
                hint="Write the modules' names instead.",
            ) from None
        except (re.error, ValueError) as error:
            raise CorruptFileError(f"adapter_config.json has an alpha_pattern that cannot be used: {error}.") from None
        alphas = [self.alpha if number is None else self.alpha_pattern[keys[number]] for number in found]
        return replace(self, alphas=dict(zip(paths, alphas, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Names of a module's two matrices: `first` [rank, inputs] and `second` [outputs, rank]; `path` is the module's."""

    module: str
    layer: int
    path: str
    first: str
    second: str

    @property
    def target(self) -> str:
        """Return TensorRT-LLM's name for the module."""
        return MODULES[self.module][0]


def adapter_config(content: Mapping[str, Any]) -> AdapterConfig:
    """Read adapter_config.json.

    Raises UnsupportedModelError for features that LoRA rows cannot express; for values see `require_plain`.
    """
    kind = str(content.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise UnsupportedModelError(f"The adapter has peft_type {kind:.100}; only LORA can be converted.")
    for key, words in _REFUSED_VALUES.items():
        if content.get(key):
            raise _unsupported(words)
    if content.get("bias", "none") != "none":
        raise _unsupported(f"biases (bias {content['bias']!r:.100})")
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_INITS):
        raise _unsupported(f"changed base weights (init_lora_weights {start!r:.100})")
    require_plain(content)
    patterns = content.get("alpha_pattern") or {}
    return AdapterConfig(
        alpha=_number("lora_alpha", content.get("lora_alpha")),
        rslora=bool(content.get("use_rslora")),
        alpha_pattern={key: _number(f"alpha_pattern {key!r}", value) for key, value in patterns.items()},
        base_model=str(content.get("base_model_name_or_path") or "")[:1000],
    )


def require_plain(content: Mapping[str, Any]) -> None:
    """Check ranks, scales and names in adapter_config.json. Raises CorruptFileError, which names the limit."""
    _number("lora_alpha", content.get("lora_alpha"))
    _rank("r", content.get("r", 1))
    for key, check in (("alpha_pattern", _number), ("rank_pattern", _rank)):
        patterns = content.get(key) or {}
        if not isinstance(patterns, Mapping):
            raise _wrong(key, patterns, f"an object of at most {_MOST_PATTERNS} patterns")
        _require_names(key, patterns)
        for pattern, value in patterns.items():
            check(f"{key} {pattern!r}", value)
    for key in ("target_modules", "exclude_modules"):  # names, or one regular expression
        names = content.get(key) or ()
        if not isinstance(names, str | list | tuple):
            raise _wrong(key, names, "names of modules")
        if isinstance(names, str):
            _require_names(key, [names], longest=_LONGEST_EXPRESSION)
        else:
            _require_names(key, names)


def _require_names(key: str, names: Collection[object], *, longest: int = _LONGEST_PATTERN) -> None:
    if len(names) > _MOST_PATTERNS:
        raise CorruptFileError(
            f"adapter_config.json has {len(names)} names in {key}; at most {_MOST_PATTERNS} are read."
        )
    for name in names:
        if not isinstance(name, str):
            raise _wrong(f"a name in {key}", name, "a text")
        if len(name) > longest:
            raise CorruptFileError(
                f"adapter_config.json has a pattern of {len(name)} characters in {key}; at most {longest} are read."
            )


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST_ALPHA < value < _LARGEST_ALPHA:
        raise _wrong(name, value, f"a number below {_LARGEST_ALPHA:g}")
    return value


def _rank(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= _LARGEST_RANK:
        raise _wrong(name, value, f"a rank from 1 to {_LARGEST_RANK}")


def _wrong(name: str, value: object, expected: str) -> CorruptFileError:
    return CorruptFileError(
        f"adapter_config.json has {name:.200} = {value!r:.100}; expected {expected}.", hint="Save it again with PEFT."
    )


def _unsupported(words: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The adapter has {words}, which TensorRT-LLM's LoRA tensors cannot hold.",
        hint="Train it without, or merge it into the model (PEFT's merge_and_unload) and import the result.",
    )


def match_names(names: Iterable[str]) -> list[Pair]:
    """Return an adapter's modules, layer by layer in the order of `names`.

    Raises UnsupportedModelError for tensors that belong to no module with a number, and for two modules of one layer
    with the same number; CorruptFileError when one of a module's matrices is missing.
    """
    halves: dict[int, dict[str, dict[str, str]]] = {}
    modules: dict[str, tuple[str, int]] = {}
    for name in names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            # NVIDIA's converter silently skips these or mixes them up.
            if "lora_magnitude_vector" in name:
                raise _unsupported("DoRA")
            if _EXPERT.fullmatch(name):
                raise _unsupported(f"LoRA for single experts ({name})")
            # Without it the adapter would give other answers than the trained one.
            raise _unsupported(f"{name:.200}")
        module = match["module"]
        if module not in MODULES:
            raise UnsupportedModelError(
                f"The adapter changes {module} ({name}), for which TensorRT-LLM has no LoRA module.",
                hint=f"Modules that can be converted: {', '.join(MODULES)}.",
            )
        modules[match["path"]] = match["module"], int(match["layer"])
        halves.setdefault(int(match["layer"]), {}).setdefault(match["path"], {})[match["part"]] = name
    pairs = [_pair(path, *modules[path], half) for layer in halves.values() for path, half in layer.items()]
    numbered: dict[tuple[int, int], str] = {}
    for pair in pairs:
        first = numbered.setdefault((pair.layer, MODULES[pair.module][1]), pair.path)
        if first != pair.path:
            raise _unsupported(f"both {first:.200} and {pair.path:.200}")
    if not pairs:
        raise CorruptFileError("The adapter has no tensors.", hint="Save it again with PEFT.")
    return pairs


def _pair(path: str, module: str, layer: int, half: Mapping[str, str]) -> Pair:
    if len(half) != 2:
        (name,) = half.values()
        raise CorruptFileError(f"The adapter has {name} but not the module's other matrix.")
    return Pair(module=module, layer=layer, path=path.removeprefix(_PREFIX), first=half["A"], second=half["B"])


def storage_dtype(storage: StorageType) -> np.dtype[Any]:
    """Return the NumPy type used to compute values for `storage`."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if storage == "bfloat16" else storage)


def module_row(
    pair: Pair, first: npt.NDArray[Any], second: npt.NDArray[Any], config: AdapterConfig, storage: StorageType
) -> tuple[npt.NDArray[Any], int]:
    """Return a module's 1-D row, without padding, and its rank.

    The scale is applied in the adapter's own type, as NVIDIA's converter does. Raises CorruptFileError when the
    matrices do not fit together and ConversionError when `storage` cannot hold a value.
    """
    if first.ndim != 2 or second.ndim != 2 or first.shape[0] != second.shape[1]:
        raise CorruptFileError(
            f"{pair.first} is {list(first.shape)} and {pair.second} is {list(second.shape)}; expected [rank, inputs] "
            "and [outputs, rank]."
        )
    rank = first.shape[0]
    if pair.module == "gate_up_proj":
        # The halves are gate and up; TensorRT-LLM's fused matrix stores up first.
        second = np.concatenate(np.array_split(second, 2)[::-1])
    with np.errstate(over="ignore"):
        scaled = (second.astype(np.float32) * np.float32(config.scale(pair.path, rank))).astype(second.dtype)
        row = np.concatenate([each.reshape(-1).astype(storage_dtype(storage)) for each in (first, scaled)])
    if not np.isfinite(row.astype(np.float32)).all():
        raise ConversionError(
            f"Values of {pair.path} exceed the range of {storage}.", hint="Use --storage-type bfloat16 or float32."
        )
    return row, rank


def peft_pairs(folder: Path) -> list[Pair]:
    """Return the modules of a PEFT folder in the order of their bytes, as NVIDIA's converter reads them."""
    entries = TensorFile(folder / PEFT_WEIGHTS).entries
    return match_names(sorted(entries, key=lambda name: entries[name].begin))


def peft_config(folder: Path) -> AdapterConfig:
    """Read the settings of a PEFT folder."""
    return adapter_config(read_json_object(folder / PEFT_CONFIG, CorruptFileError))


def peft_arrays(
    folder: Path, pairs: Sequence[Pair], config: AdapterConfig, storage: StorageType
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Return `lora_weights` and `lora_config` of the adapter in a PEFT folder, see `adapter_arrays`."""
    source, rows = TensorFile(folder / PEFT_WEIGHTS), []
    for pair in pairs:
        matrices = source.tensor(pair.first), source.tensor(pair.second)
        rows.append((pair, *module_row(pair, *matrices, config, storage)))
    return adapter_arrays(rows, storage)


def adapter_arrays(
    rows: list[tuple[Pair, npt.NDArray[Any], int]], storage: StorageType
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Return `lora_weights` [1, rows, longest row] in `storage` and `lora_config` i32[1, rows, 3].

    The .npy format has no name for bfloat16; it is stored as untyped two-byte values (V2), as NVIDIA's converter does.
    """
    width = max(row.size for _, row, _ in rows)
    weights = np.zeros((1, len(rows), width), dtype=storage_dtype(storage))
    for target, (_, row, _) in zip(weights[0], rows, strict=True):
        target[: row.size] = row
    config = [(MODULES[pair.module][1], pair.layer, rank) for pair, _, rank in rows]
    if storage == "bfloat16":
        weights = weights.view(np.dtype("V2"))
    return weights, np.array([config], dtype=np.int32)
