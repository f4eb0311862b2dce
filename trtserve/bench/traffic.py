"""What is sent: prompts whose lengths follow a distribution, within the limits of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import RepositoryError, UsageError
from trtserve.files import read_json_object
from trtserve.specs import BenchSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine accepts; None where it is not known. `special_ids` are never sent as prompt tokens."""

    vocab_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    special_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TrafficRequest:
    """One request: prompt token ids (int32[n]) and how many tokens to generate.

    `text` is what a text model gets; `token_ids` are then those that the server makes of it. `end_id` ends the answer
    early, -1 never; None leaves it to the model, which for a core model is never.
    """

    token_ids: npt.NDArray[np.int32]
    output_len: int
    text: str | None = None
    end_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All requests of a run, and how many of them were shortened to the engine's limits.

    `notes` say what else a reader of the figures must know of them.
    """

    requests: tuple[TrafficRequest, ...]
    clipped_inputs: int
    clipped_outputs: int
    notes: tuple[str, ...] = ()


Prompt = tuple["npt.NDArray[np.int32]", str | None]
"""Token ids of a prompt, and its text for a text model."""


def limits_of_repository(repository: Path, model: str) -> Limits:
    """Limits written in the engine's config.json of a model repository; unknown ones stay None.

    RepositoryError for a file that is damaged.
    """
    config = _read_json(repository / model / "1" / "config.json")
    pretrained, build = config.get("pretrained_config", {}), config.get("build_config", {})
    return Limits(
        vocab_size=pretrained.get("vocab_size"),
        max_input_len=build.get("max_input_len"),
        max_seq_len=build.get("max_seq_len"),
        special_ids=_special_ids(repository / "preprocessing" / "1" / "tokenizer"),
    )


def precision_of_repository(repository: Path, model: str) -> dict[str, str]:
    """Compute and KV precision, as far as the engine's config.json of a model repository names them."""
    own = _read_json(repository / model / "1" / "config.json").get("trtserve", {})
    return {key: own[key] for key in ("compute_precision", "kv_precision") if own.get(key)}


def override_limits(limits: Limits, spec: BenchSpec) -> Limits:
    """`limits` with what the user said in their place."""
    said = {name: getattr(spec, name) for name in ("vocab_size", "max_input_len", "max_seq_len")}
    return replace(limits, **{name: value for name, value in said.items() if value is not None})


def _special_ids(tokenizer: Path) -> frozenset[int]:
    added = _read_json(tokenizer / "tokenizer.json").get("added_tokens", [])
    return frozenset(int(token["id"]) for token in added if token.get("special"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, RepositoryError)
    except FileNotFoundError:
        return {}


def token_norm_dist(
    spec: BenchSpec, limits: Limits, *, write: Callable[[int], Prompt] | None = None, end_id: int | None = None
) -> Traffic:
    """Requests with normally distributed lengths, max(1, ceil(x)) as upstream's benchmark, and uniform token ids.

    Unlike upstream's, ids lie inside the vocabulary, lengths above a limit are cut to it instead of dropped, and the
    same seed gives the same requests. `write` makes a prompt of a length in place of random ids; the lengths are those
    of the same seed without it.
    """
    import numpy as np

    generator = np.random.default_rng([spec.seed, 0])
    inputs = _lengths(generator.normal(spec.input_mean, spec.input_stdev, spec.num_requests))
    outputs = _lengths(generator.normal(spec.output_mean, spec.output_stdev, spec.num_requests))
    pairs = [clip(*wanted, limits) for wanted in zip(inputs, outputs, strict=True)]
    write = write or _random_ids(generator, limits)
    requests = []
    for input_len, output_len in pairs:
        ids, text = write(input_len)
        requests.append(TrafficRequest(token_ids=ids, output_len=output_len, text=text, end_id=end_id))
    missed = sum(len(request.token_ids) != length for request, (length, _) in zip(requests, pairs, strict=True))
    note = f"{missed} prompts do not have the drawn length: the tokenizer makes no text of exactly that many tokens."
    return Traffic(
        requests=tuple(requests),
        clipped_inputs=sum(length < wanted for (length, _), wanted in zip(pairs, inputs, strict=True)),
        clipped_outputs=sum(length < wanted for (_, length), wanted in zip(pairs, outputs, strict=True)),
        notes=(note,) if missed else (),
    )


def _random_ids(generator: np.random.Generator, limits: Limits) -> Callable[[int], Prompt]:
    import numpy as np

    vocabulary = _usable_ids(limits)
    return lambda length: (generator.choice(vocabulary, length).astype(np.int32), None)


def clip(input_len: int, output_len: int, limits: Limits) -> tuple[int, int]:
    """Lengths within the limits: the prompt leaves room for one token, the answer takes what the prompt leaves."""
    if limits.max_seq_len is not None:
        input_len = min(input_len, limits.max_seq_len - 1)
    if limits.max_input_len is not None:
        input_len = min(input_len, limits.max_input_len)
    if limits.max_seq_len is not None:
        output_len = min(output_len, limits.max_seq_len - input_len)
    return input_len, output_len


def _lengths(values: Iterable[float]) -> list[int]:
    return [max(1, math.ceil(value)) for value in values]


def _usable_ids(limits: Limits) -> npt.NDArray[np.int64]:
    import numpy as np

    if limits.vocab_size is None:
        raise UsageError(
            "The vocabulary size of the served engine is not known here.",
            hint="Give it with --vocab-size (and --max-input-len, --max-seq-len to keep within the engine's limits).",
        )
    special = [token for token in limits.special_ids if token < limits.vocab_size]
    return np.setdiff1d(np.arange(limits.vocab_size), np.array(special, np.int64))
