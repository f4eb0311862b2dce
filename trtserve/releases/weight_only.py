"""Whether `trtllm-build` of a release quantises the float weights of a checkpoint that says W8A16 or W4A16.

Read in the public sources, per release. The way of a weight: `build_model` (commands/build.py) calls the model's
`from_checkpoint`, which hands all tensors of the rank's file to `preprocess_weights` (models/modeling_utils.py) before
the model is filled; for both algorithms that calls `weight_only_quantize_dict` (models/convert_utils.py), which
replaces every weight that is not int8 yet, and whose name ends in one of `QUANTISED`, by codes and adds
`per_channel_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.releases import normalize_release, order

WEIGHT_ONLY = ("W8A16", "W4A16")
"""The algorithms that the loader quantises with; every other one needs weights that are quantised already."""

QUANTISED = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight", "gate.weight")
"""Ends of the names of the weights that are quantised; embeddings, lm_head, routers and norms have others."""

LEFT_OUT = "shared_expert_gate.weight"
"""Ends like one of them, and is left out (0.12 by a list of its own, from 0.13 on where exclude_modules is null)."""

How = Literal["tag", "development", "between"]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was read for a release: whether its loader quantises, and where.

    `how`: at the `tag`, at commits of its `development`, or `between` two releases that do the same. `commits` are
    those of the repository NVIDIA/TensorRT-LLM that were read.
    """

    release: str
    quantises: bool
    how: How
    commits: tuple[str, ...]


_BEFORE_0_17 = "42a7b0922"
_FROM_0_20 = "0.20.0"
_LATE = ("1.1.0rc6", "008b2b8d")

_FIRST_QUANTISED_EXPERTS = "1.0"

PROOFS: tuple[Proof, ...] = (
    Proof(release="0.12", quantises=True, how="development", commits=("d2ff97fde (2024-07-23)",)),
    Proof(release="0.13", quantises=True, how="development", commits=("bde712717 (2024-08-20)",)),
    Proof(release="0.14", quantises=True, how="development", commits=("48686bca3 (2024-09-29)",)),
    Proof(release="0.15", quantises=True, how="development", commits=("6b25e1e04 (2024-11-02)", "c629546ce")),
    Proof(release="0.16", quantises=True, how="tag", commits=(_BEFORE_0_17,)),
    Proof(release="0.17", quantises=True, how="between", commits=(_BEFORE_0_17, _FROM_0_20)),
    Proof(release="0.18", quantises=True, how="between", commits=(_BEFORE_0_17, _FROM_0_20)),
    Proof(release="0.19", quantises=True, how="between", commits=(_BEFORE_0_17, _FROM_0_20)),
    Proof(release="0.20", quantises=True, how="tag", commits=(_FROM_0_20,)),
    Proof(release="0.21", quantises=True, how="between", commits=(_FROM_0_20, *_LATE)),
    Proof(release="1.0", quantises=True, how="between", commits=(_FROM_0_20, *_LATE)),
    Proof(release="1.1", quantises=True, how="development", commits=_LATE),
    Proof(release="1.2", quantises=True, how="development", commits=_LATE),
)
"""One row for each release. `0.20.0` and `1.1.0rc6` were read in a fork that merges the one into the other."""


def proof(release: str) -> Proof:
    """The row of a release; UsageError for one that the tables lack."""
    wanted = normalize_release(release, option="--trtllm-version")
    return next(row for row in PROOFS if row.release == wanted)


def require_loader_quantises(release: str, algorithm: str | None) -> None:
    """UsageError when float weights recorded as `algorithm` would stay floats in `release`, and so not load.

    Only weight-only algorithms are recorded over float weights; None and the others pass.
    """
    if algorithm not in WEIGHT_ONLY:
        return
    if not proof(release).quantises:
        covered = [row.release for row in PROOFS if row.quantises]
        raise UsageError(
            f"TensorRT-LLM {proof(release).release} does not quantise float weights when it loads a {algorithm} "
            f"checkpoint; {covered[0]} … {covered[-1]} do.",
            hint="Let NVIDIA's converter write quantised weights: --converter upstream.",
        )


def require_quantised_experts(release: str) -> None:
    """UnsupportedModelError for a release whose loader is not known to have groups of 4-bit weights in experts.

    `MOEWeightWrapper` had none in 0.17 (development snapshot of 2024-12-17), and has them in 1.x.
    """
    if order(release) < order(_FIRST_QUANTISED_EXPERTS):
        raise UnsupportedModelError(
            f"4-bit experts with scales for groups (AWQ, GPTQ) are not known to load in TensorRT-LLM {release}; "
            f"{_FIRST_QUANTISED_EXPERTS} and later have a place for them.",
            hint=f"Use --trtllm-version {_FIRST_QUANTISED_EXPERTS} or later, or the original model.",
        )
