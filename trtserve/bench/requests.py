"""What is sent: the requests of a run, and the limits of the engine that they respect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import RepositoryError
from trtserve.files import read_json_object
from trtserve.specs import BenchSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the engine, or None where unknown."""

    vocab_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    special_ids: frozenset[int] = frozenset()
    """Special tokens, which random prompts never contain."""


@dataclass(frozen=True, kw_only=True)
class TrafficRequest:
    """One request."""

    token_ids: npt.NDArray[np.int32]
    """The prompt [n]; for a text model the ids into which the server encodes `text`."""
    output_len: int
    """Number of tokens to generate."""
    text: str | None = None
    end_id: int | None = None
    """Token that ends the answer early; -1: none; None: the model's default (core models have none)."""
    session: int | None = None
    """Conversation that this is a turn of; its turns follow each other, and each continues the answers before it."""
    cancel_after: int | None = None
    """Responses after which the client cancels the request."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All requests of a run."""

    requests: tuple[TrafficRequest, ...]
    clipped_inputs: int = 0
    """Number of prompts that were cut to the engine's limits."""
    clipped_outputs: int = 0
    """Number of answers that were shortened to the engine's limits."""
    offsets: tuple[float, ...] | None = None
    """Send times of a recorded trace, in seconds after the start."""
    notes: tuple[str, ...] = ()


def limits_of_repository(repository: Path, model: str) -> Limits:
    """Read the limits from the engine's config.json in a model repository.

    Raises RepositoryError for a damaged file.
    """
    config = _read_json(repository / model / "1" / "config.json")
    pretrained, build = config.get("pretrained_config", {}), config.get("build_config", {})
    added = _read_json(repository / "preprocessing" / "1" / "tokenizer" / "tokenizer.json").get("added_tokens", [])
    return Limits(
        vocab_size=pretrained.get("vocab_size"),
        max_input_len=build.get("max_input_len"),
        max_seq_len=build.get("max_seq_len"),
        special_ids=frozenset(int(token["id"]) for token in added if token.get("special")),
    )


def precision_of_repository(repository: Path, model: str) -> dict[str, str]:
    """Return compute and KV cache precision, as far as the engine's config.json in a model repository has them."""
    own = _read_json(repository / model / "1" / "config.json").get("trtserve", {})
    return {key: own[key] for key in ("compute_precision", "kv_precision") if own.get(key)}


def override_limits(limits: Limits, spec: BenchSpec) -> Limits:
    """Replace limits by those that the user gave."""
    given = {name: getattr(spec, name) for name in ("vocab_size", "max_input_len", "max_seq_len")}
    return replace(limits, **{name: value for name, value in given.items() if value is not None})


def clip(input_len: int, output_len: int, limits: Limits) -> tuple[int, int]:
    """Cut both lengths to the limits: the prompt leaves room for one token, the answer for the prompt."""
    if limits.max_seq_len is not None:
        input_len = min(input_len, limits.max_seq_len - 1)
    if limits.max_input_len is not None:
        input_len = min(input_len, limits.max_input_len)
    if limits.max_seq_len is not None:
        output_len = min(output_len, limits.max_seq_len - input_len)
    return input_len, output_len


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, RepositoryError)
    except FileNotFoundError:
        return {}
