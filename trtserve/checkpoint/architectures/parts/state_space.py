"""State spaces (Mamba-2) in a checkpoint's config, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import HfConfig, WrongConfigError, require_sizes, required
from trtserve.checkpoint.architectures.parts.mixers import MixerTensor, StateSpace
from trtserve.checkpoint.architectures.parts.positions import layer_kinds
from trtserve.errors import UnsupportedModelError

FACTORS = ("gate", "input", "b", "c", "step")  # see `StateSpace.factors`
MAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": None,
}  # fmt: skip
"""transformers' for the keys that `mamba_keys` reads."""
_SIZES = ("heads", "head", "groups", "state", "taps")


def state_space_keys(
    *,
    heads: int,
    head: int,
    groups: int,
    state: int,
    taps: int,
    norm_groups: int,
    norm_first: bool = False,
    conv_bias: object,
    biased: object,
    time_limit: object,
) -> dict[str, Any]:
    """Return a checkpoint's keys of its state spaces; see `StateSpace`, and the model's config for the rest.

    Raises UnsupportedModelError for sizes that do not fit each other.
    """
    sizes = dict(zip(_SIZES, (heads, head, groups, state, taps), strict=True))
    require_sizes(sizes, *_SIZES)
    if heads % groups or (norm_groups and heads * head % norm_groups):
        raise WrongConfigError(
            f"config.json has {heads} heads of state spaces in {groups} groups; expected a multiple."
        )
    low, high = _limits(time_limit)
    limits = {} if (low, high) == (0.0, math.inf) else {"ssm_time_floor": low, "ssm_time_ceiling": min(high, 1e30)}
    return {
        **{f"ssm_{key}": size for key, size in sizes.items()},
        "ssm_norm_groups": norm_groups,
        "ssm_norm_first": norm_first,
        "ssm_conv_bias": bool(conv_bias),
        "ssm_bias": bool(biased),
        **limits,
    }


def mamba_keys(hf: HfConfig, inner: int, *, norm_groups: int, norm_first: bool = False) -> dict[str, Any]:
    """Return the same for a config.json that names the sizes `mamba_…`, all present; `inner` is their width.

    Raises UnsupportedModelError for sizes that do not fit each other.
    """
    heads = required(hf, "mamba_n_heads")["mamba_n_heads"]
    head = inner // heads if hf["mamba_d_head"] == "auto" else required(hf, "mamba_d_head")["mamba_d_head"]
    if head * heads != inner:
        raise WrongConfigError(
            f"config.json has mamba_n_heads = {heads} and mamba_d_head = {hf['mamba_d_head']!r}; "
            f"expected a product of {inner!r:.40}, the width of the state spaces."
        )
    return state_space_keys(
        heads=heads,
        head=head,
        groups=hf["mamba_n_groups"],
        state=hf["mamba_d_state"],
        taps=hf["mamba_d_conv"],
        norm_groups=norm_groups,
        norm_first=norm_first,
        conv_bias=hf["mamba_conv_bias"],
        biased=hf["mamba_proj_bias"],
        time_limit=hf["time_step_limit"],
    )


def _limits(time_limit: object) -> tuple[float, float]:
    """Return the least and the greatest time step; None: any."""
    if time_limit is None:
        return 0.0, math.inf
    if isinstance(time_limit, list | tuple) and len(time_limit) == 2:
        low, high = time_limit
        # JSON has no infinity; transformers writes it as a word or an object.
        high = math.inf if isinstance(high, str | dict) and "inf" in str(high).lower() else high
        if (
            all(isinstance(each, int | float) and not isinstance(each, bool) for each in (low, high))
            and 0 <= low <= high
        ):
            return float(low), float(high)
    raise WrongConfigError(f"config.json has the limits {time_limit!r} of time steps; expected two ascending numbers.")


def state_space(config: CheckpointConfig) -> StateSpace:
    """Describe the state spaces of a checkpoint."""
    sizes = {key: config.own(f"ssm_{key}", 0) for key in _SIZES}
    factors = [config.own_or_none(f"ssm_{part}_factor", float) for part in FACTORS]
    floor, ceiling = config.own("ssm_time_floor", 0.0), config.own("ssm_time_ceiling", math.inf)
    return StateSpace(
        **sizes,
        norm_groups=config.own("ssm_norm_groups", 0),
        norm_first=config.own("ssm_norm_first", False),
        time_limit=(floor, ceiling) if floor or ceiling != math.inf else None,
        factors=tuple(each for each in factors if each is not None),
        factor=config.own("ssm_out_multiplier", 1.0),
    )


def state_space_tensors(config: CheckpointConfig, prefix: str) -> list[MixerTensor]:
    """Return the tensors, whose names in the model begin with `prefix` inside a layer."""
    space, hidden = state_space(config), config.hidden_size
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "in_proj.weight": ("in_proj.weight", (space.inner + space.channels + space.heads, hidden)),
        "out_proj.weight": ("out_proj.weight", (hidden, space.inner)),
        "conv.weight": ("conv1d.weight", (space.channels, space.taps)),
    }
    if config.own("ssm_conv_bias", True):
        shapes["conv.bias"] = ("conv1d.bias", (space.channels,))
    if config.own("ssm_bias", False):
        shapes["in_proj.bias"] = ("in_proj.bias", shapes["in_proj.weight"][1][:1])
        shapes["out_proj.bias"] = ("out_proj.bias", (hidden,))
    if space.norm_groups:
        shapes["norm.weight"] = ("norm.weight", (space.inner,))
    shapes |= {name: (source, (space.heads,)) for name, source in _WIDE.items()}
    return [
        MixerTensor(name=name, sources=(prefix + source,), shape=shape, wide=name in _WIDE)
        for name, (source, shape) in shapes.items()
    ]


_WIDE = {"decay": "A_log", "time_bias": "dt_bias", "skip": "D"}


def mixer_keys(hf: HfConfig, kind: str, *, default: Sequence[str] | None) -> dict[str, Any]:
    """Return the layers whose kind in `layer_types` is `kind`; the others attend.

    `default` has the kinds where config.json has no `layer_types`; None: all layers attend. Raises
    UnsupportedModelError for other kinds, and for a model without attention, whose cache has no blocks.
    """
    layers = int(hf["num_hidden_layers"])
    kinds = layer_kinds(hf, ("full_attention", kind)) or default or ["full_attention"] * layers
    if "full_attention" not in kinds:
        raise UnsupportedModelError(
            f"None of this model's {layers} layers has attention; our runtimes need one that has.",
            hint="The vllm runtime reads the model itself and may run it.",
        )
    return {"mixer_layers": [layer for layer, each in enumerate(kinds) if each == kind]}
