"""Tensors in a model's files that nothing is taken from: which are passed over, and which end the conversion.

TensorRT-LLM's converters pass over whatever they do not know, and so over the biases of a Llama whose config does not
name them. Here every tensor is used, known to be of no use (the family's `unused`), no part of the model by the index
of its files, or left out because the user says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtserve.architectures.base import Target
from trtserve.architectures.placement import excused, unknown_sources
from trtserve.architectures.source import SourceTensor
from trtserve.errors import UsageError, listing


def without_leftovers(
    targets: Sequence[Target], sources: Mapping[str, SourceTensor], unused: Sequence[str], ignored: Sequence[str]
) -> tuple[dict[str, SourceTensor], list[str]]:
    """The sources but for those that are left out, and the names of these.

    Left out is what no target takes when it is not in the index, or matches one of the patterns `ignored` (fnmatch).
    UsageError for a pattern that matches nothing of the kind.
    """
    unknown = unknown_sources(targets, sources, unused)
    _require_matches(ignored, unknown)
    left_out = dict.fromkeys(name for name in unknown if not sources[name].indexed or excused(name, ignored))
    return {name: tensor for name, tensor in sources.items() if name not in left_out}, list(left_out)


def _require_matches(patterns: Sequence[str], unknown: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(excused(name, [pattern]) for name in unknown):
            others = f"tensors that are left over: {listing(unknown)}" if unknown else "no tensor is left over"
            raise UsageError(
                f"--ignore-tensors {pattern} matches no tensor that the conversion would leave over ({others}).",
                hint="Give the name of such a tensor, or a pattern (v_head.*); what the model needs is always taken.",
            )
