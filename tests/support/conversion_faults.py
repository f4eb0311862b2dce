"""Faults that a wrong converter would write, put into a good checkpoint of any family, size and type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.tiny_models import read_safetensors, write_safetensors
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets, family

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Edit = Callable[[Tensors, CheckpointConfig], Tensors]
Fault = Callable[[Path], None]


def faults_of(checkpoint: Path) -> dict[str, Fault]:
    """The faults that this checkpoint can have, by name."""
    config = _config(checkpoint)
    found: dict[str, Fault] = {name: _in_config(key, change) for name, (key, change) in config_faults(config).items()}
    names = [name for rank in _ranks(checkpoint) for name in read_safetensors(rank)]
    first = "attention.kv_b.weight"  # of latent attention, which has no queries and keys in one tensor
    if not any(name.endswith(first) for name in names):
        first = "attention.qkv.weight"
        found["q and k swapped"] = _in_files(_swap_query_and_key)
    for kind in sorted({_kind(name) for name in names if name.endswith(".bias")}):
        found[f"dropped bias, {kind}"] = _in_files(_mapped(kind, np.zeros_like))
    found |= _norm_faults(config, names)
    found |= _mlp_faults(config)
    for kind in ("attention.dense.weight", first, "mlp.fc.weight", "mlp.proj.weight"):
        found[f"transposed, {kind}"] = _in_files(_mapped(kind, lambda values: values.T.reshape(values.shape)))
    if config.mapping.pp_size == 1:
        found["layers swapped"] = _in_files(_swap_layers)
    found["norm epsilon × 0.1"] = _in_config("norm_epsilon", lambda epsilon: epsilon * 0.1)
    return found | _shard_faults(checkpoint, config, first)


def _dropped(_: Any) -> None:
    return None


def _changed(key: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change one key of an object."""
    return lambda values: values | {key: change(values[key])}


# Name → key of config.json, and what a faulty converter would write there.
_CONFIG_FAULTS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("wrong rope base", "rotary_base", lambda base: base * 10),
    ("wrong rope base", "rotary_emb_base", lambda base: base * 10),
    ("rope base by a hundredth", "rotary_base", lambda base: base * 1.01),
    ("wrong rope size", "rotary_pct", lambda part: part / 2),
    ("wrong rope size", "rotary_dim", lambda size: size // 2),
    ("rope scaling dropped", "rotary_scaling", _dropped),
    ("rope scaling dropped", "full_attention_rotary_scaling", _dropped),
    ("wrong rope factor", "rotary_scaling", _changed("factor", lambda factor: factor * 2)),
    ("wrong local rope base", "rope_local_base_freq", lambda base: base * 10),
    ("wrong short factors", "longrope_scaling_short_factors", lambda factors: factors[::-1]),
    ("wrong long factors", "longrope_scaling_long_factors", lambda factors: factors[::-1]),
    ("wrong original positions", "original_max_position_embeddings", lambda positions: positions * 2),
    ("windows dropped", "max_attention_window", _dropped),
    ("windows by one", "max_attention_window", lambda windows: [window and window + 1 for window in windows]),
    ("windows by one", "sliding_window", lambda window: window + 1),
    ("windows in other layers", "max_attention_window", lambda windows: [*windows[1:], windows[0]]),
    ("windows in other layers", "_sliding_window_pattern", lambda pattern: pattern + 1),
    ("attention soft-cap dropped", "attn_logit_softcapping", _dropped),
    ("wrong attention soft-cap", "attn_logit_softcapping", lambda cap: cap * 2),
    ("logits soft-cap dropped", "final_logit_softcapping", _dropped),
    ("wrong scale of scores", "query_pre_attn_scalar", lambda scalar: scalar * 2),
    ("wrong scale of scores", "q_scaling", lambda scale: scale * 2),
    ("probabilities of experts", "moe", _changed("normalization_mode", lambda mode: 1 - mode)),
)


def config_faults(config: CheckpointConfig) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """The faults of config.json that change the decoder of this family."""
    made = family(config.architecture)
    right = made.decoder(config)
    found = {}
    for name, key, change in _CONFIG_FAULTS:
        # `moe` of dense models has no experts, and LongRoPE's factors fit one size alone.
        dense = key == "moe" and not config.moe.num_experts
        if config.content.get(key) is None or dense or (key == "rotary_pct" and config.longrope_scaling_long_factors):
            continue
        if made.decoder(config.changed(**{key: change(config.content[key])})) != right:
            found[name] = (key, change)
    return found


def _norm_faults(config: CheckpointConfig, names: list[str]) -> dict[str, Fault]:
    """Norms without their offset, in families that have one, and swapped norms."""
    targets = checkpoint_targets(config)
    shifted = sorted({_kind(target.name) for target in targets if target.offset})
    found = {
        f"missing norm + 1, {kind}": _in_files(_mapped(kind, lambda v: (v - 1).astype(v.dtype))) for kind in shifted
    }
    kinds = {_kind(name) for name in names}
    if {"input_layernorm.weight", "post_layernorm.weight"} <= kinds:
        found["norms swapped"] = _in_files(_renamed("input_layernorm.weight", "post_layernorm.weight"))
    return found


def _mlp_faults(config: CheckpointConfig) -> dict[str, Fault]:
    decoder = family(config.architecture).decoder(config)
    mlp = decoder.mlp
    if mlp == "gated":
        return {"gate and up swapped": _in_files(_renamed("mlp.fc.weight", "mlp.gate.weight"))}
    if mlp == "fused":
        halves = _mapped("mlp.fc.weight", lambda values: np.concatenate(np.split(values, 2)[::-1]))
        return {"gate and up swapped": _in_files(halves)}
    if mlp == "experts":
        assert decoder.experts is not None
        halves = _mapped("mlp.fc.weight", lambda values: np.concatenate(np.split(values, 2, axis=1)[::-1], axis=1))
        order = {"experts in another order": _in_files(_mapped("mlp.proj.weight", lambda values: values[::-1]))}
        return order | ({"gate and up swapped": _in_files(halves)} if decoder.experts.gated else {})
    return {}


def _shard_faults(checkpoint: Path, config: CheckpointConfig, first: str) -> dict[str, Fault]:
    """Swapped ranks, completely or for one kind of tensor; needs two pipeline stages or tensor-parallel ranks."""
    if config.mapping.pp_size == 2:
        return {"stages swapped": _swap_layers_of_stages}
    if config.mapping.tp_size != 2:
        return {}
    found: dict[str, Fault] = {"ranks swapped": _swap_ranks}
    for kind in (first, "mlp.proj.weight", "lm_head.weight"):
        found[f"shards swapped, {kind}"] = _swap_shards(kind)
    if config.vocab_size % 2:
        found["vocabulary padded in front"] = _pad_in_front
    return found


def _config(checkpoint: Path) -> CheckpointConfig:
    return CheckpointConfig.of(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))


def _ranks(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("rank*.safetensors"))


def _kind(name: str) -> str:
    """`transformer.layers.1.mlp.fc.bias` → `mlp.fc.bias`."""
    parts = name.removeprefix("transformer.").split(".")
    return ".".join(parts[2:] if parts[0] == "layers" else parts)


def _in_config(key: str, change: Callable[[Any], Any]) -> Fault:
    def fault(checkpoint: Path) -> None:
        config = _config(checkpoint)
        changed = config.changed(**{key: change(config.content[key])})
        (checkpoint / "config.json").write_text(json.dumps(changed.content), encoding="utf-8")

    return fault


def _in_files(edit: Edit) -> Fault:
    def fault(checkpoint: Path) -> None:
        config = _config(checkpoint)
        for path in _ranks(checkpoint):
            write_safetensors(path, edit(read_safetensors(path), config))

    return fault


def _mapped(kind: str, change: Callable[[Array], Array]) -> Edit:
    """Change every tensor of a kind."""
    return lambda tensors, _: {
        name: change(values) if _kind(name) == kind else values for name, values in tensors.items()
    }


def _renamed(one: str, other: str) -> Edit:
    """Exchange the tensors of two kinds, in every layer."""

    def partner(name: str) -> str:
        kind = _kind(name)
        return name.replace(one, other) if kind == one else name.replace(other, one) if kind == other else name

    return lambda tensors, _: {name: tensors[partner(name)] for name in tensors}


def _swap_query_and_key(tensors: Tensors, config: CheckpointConfig) -> Tensors:
    """[q; k; v] → [k; q; v]."""
    tp = config.mapping.tp_size
    queries = config.num_attention_heads * config.head_size // tp
    keys = max(1, config.num_key_value_heads // tp) * config.head_size

    def swap(values: Array) -> Array:
        query, key, value = np.split(values, [queries, queries + keys])
        return np.concatenate([key, query, value])

    return {name: swap(values) if ".attention.qkv." in name else values for name, values in tensors.items()}


def _swap_layers(tensors: Tensors, config: CheckpointConfig) -> Tensors:
    def partner(name: str) -> str:
        first, second = ".layers.0.", ".layers.1."
        return name.replace(first, second) if first in name else name.replace(second, first)

    def other(name: str) -> Array:
        """Return the other layer's tensor; a layer without experts keeps what the other has not, or not like this."""
        found = tensors.get(partner(name), tensors[name])
        return found if found.shape == tensors[name].shape else tensors[name]

    return {name: other(name) for name in tensors}


def _swap_ranks(checkpoint: Path) -> None:
    first, second = _pair(checkpoint)
    aside = checkpoint / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _swap_layers_of_stages(checkpoint: Path) -> None:
    """The layers of two stages in each other's place; embedding and head stay where they are."""
    paths = _pair(checkpoint)
    one, other = (read_safetensors(path) for path in paths)
    for path, own, foreign in zip(paths, (one, other), (other, one), strict=True):
        write_safetensors(path, {name: (foreign if ".layers." in name else own)[name] for name in own})


def _swap_shards(kind: str) -> Fault:
    def fault(checkpoint: Path) -> None:
        paths = _pair(checkpoint)
        one, other = (read_safetensors(path) for path in paths)
        for path, own, foreign in zip(paths, (one, other), (other, one), strict=True):
            write_safetensors(path, {name: foreign[name] if _kind(name) == kind else own[name] for name in own})

    return fault


def _pad_in_front(checkpoint: Path) -> None:
    """Put the padding row of the last rank's head before its rows, not after them."""
    _, last = _pair(checkpoint)
    write_safetensors(
        last,
        _mapped("lm_head.weight", lambda values: np.roll(values, 1, axis=0))(
            read_safetensors(last), CheckpointConfig()
        ),
    )


def _pair(checkpoint: Path) -> tuple[Path, Path]:
    first, second = _ranks(checkpoint)
    return first, second


def faulty_copies(checkpoint: Path, folder: Path, *, but: Set[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """A copy of `checkpoint` for each fault that it can have, with its name; none for those in `but`."""
    for number, (name, fault) in enumerate(faults_of(checkpoint).items()):
        if name not in but:
            copy = copied(checkpoint, folder / str(number))
            fault(copy)
            yield name, copy


def copied(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint's own files in a new folder."""
    folder.mkdir(parents=True)
    for path in [checkpoint / "config.json", *_ranks(checkpoint)]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
