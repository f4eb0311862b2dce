"""How the next token is chosen from logits: greedy, temperature, top-k and nucleus, as TensorRT-LLM does it.

Reference: executor-api sections 2.3 and 2.4. All rows of a step are handled together; what a row yields depends
on its own logits, its parameters and its position alone, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.requests import SamplingConfig

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

MAX_TOP_K = 1024
UNDEFINED = -1
"""The token of a row whose logits are not numbers."""
_TEMPERATURE_EPSILON = 1e-6
# Candidates sorted at first for a nucleus over the whole vocabulary; nearly always enough.
_FIRST_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParameters:
    """The choice of one sequence with every default resolved; `top_k` 0 is the whole vocabulary."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_tokens: int = 0

    @property
    def plain(self) -> bool:
        """True when the largest logit is the answer."""
        return self.greedy and self.min_tokens == 0

    @classmethod
    def of(cls, config: SamplingConfig) -> SamplingParameters:
        """Resolve the defaults and combinations of reference section 2.3."""
        top_k = min(config.top_k or 0, MAX_TOP_K)
        top_p = config.top_p
        temperature = 1.0 if config.temperature is None else config.temperature
        return cls(
            greedy=temperature == 0.0 or top_k == 1 or (top_k == 0 and top_p is None),
            temperature=temperature,
            top_k=top_k,
            top_p=1.0 if top_p is None else top_p,
            seed=config.seed or 0,
            min_tokens=config.min_tokens or 0,
        )


def choose_tokens(
    logits: npt.NDArray[Any],
    parameters: SequenceOf[SamplingParameters],
    positions: SequenceOf[int],
    end_ids: SequenceOf[int],
) -> list[int]:
    """The next token of each row of `logits` f32[r, vocab].

    `positions` counts the tokens that each row's sequence has generated, `end_ids` holds its end token or −1. A row
    with NaN or +∞, or with −∞ alone, yields UNDEFINED.
    """
    if all(each.plain for each in parameters):
        return _largest(logits)
    logits = _without_early_ends(logits, parameters, positions, end_ids)
    tokens = _largest(logits)
    rows = [row for row, each in enumerate(parameters) if not each.greedy and tokens[row] != UNDEFINED]
    if rows:
        sampled = _sample(logits[rows], [parameters[row] for row in rows], [positions[row] for row in rows])
        for row, token in zip(rows, sampled, strict=True):
            tokens[row] = token
    return tokens


def _largest(logits: npt.NDArray[Any]) -> list[int]:
    """The index of each row's largest logit. NumPy takes the first NaN for the largest, so that one look finds it."""
    indices = logits.argmax(axis=1)
    tokens: list[int] = indices.tolist()
    finite = np.isfinite(logits[np.arange(len(tokens)), indices])
    if not finite.all():
        tokens = [token if good else UNDEFINED for token, good in zip(tokens, finite.tolist(), strict=True)]
    return tokens


def _without_early_ends(
    logits: npt.NDArray[Any],
    parameters: SequenceOf[SamplingParameters],
    positions: SequenceOf[int],
    end_ids: SequenceOf[int],
) -> npt.NDArray[Any]:
    """Logits in which the end token cannot be chosen before `min_tokens` tokens; a copy when anything changes."""
    rows = [
        row
        for row, (each, position, end_id) in enumerate(zip(parameters, positions, end_ids, strict=True))
        if end_id >= 0 and position < each.min_tokens
    ]
    if rows:
        logits = logits.copy()
        logits[rows, [end_ids[row] for row in rows]] = -np.inf
    return logits


def _sample(logits: npt.NDArray[Any], parameters: list[SamplingParameters], positions: list[int]) -> list[int]:
    scaled = logits / _divisors(parameters)
    seeds = np.array([each.seed for each in parameters], dtype=np.uint64)
    random = uniform(seeds, np.array(positions, dtype=np.uint64)).tolist()
    return [_pick(row, each, u) for row, each, u in zip(scaled, parameters, random, strict=True)]


def _divisors(parameters: list[SamplingParameters]) -> Floats:
    """Temperature + 1e-6, and exactly 1 where the temperature is 1, f32[r, 1]."""
    values = [each.temperature for each in parameters]
    divisors = [1.0 if value == 1.0 else value + _TEMPERATURE_EPSILON for value in values]
    return np.array(divisors, dtype=np.float32)[:, None]


def _pick(logits: Floats, parameters: SamplingParameters, u: float) -> int:
    """Sort by probability and take the first token whose running sum reaches u · p, of the `top_k` best if given."""
    weights = np.exp(logits - logits.max())
    if parameters.top_k:
        order = _best(weights, parameters.top_k)
        sums = np.cumsum(weights[order], dtype=np.float64)
        target = u * parameters.top_p * sums[-1]
    else:
        target = u * parameters.top_p * float(weights.sum(dtype=np.float64))
        order = _best(weights, _FIRST_CANDIDATES)
        sums = np.cumsum(weights[order], dtype=np.float64)
        if sums[-1] < target:
            order = _best(weights, len(weights))
            sums = np.cumsum(weights[order], dtype=np.float64)
    return int(order[min(int(np.searchsorted(sums, target)), len(order) - 1)])


def _best(weights: Floats, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest weights, largest first, the lower index first among equals."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    candidates = np.flatnonzero(weights >= threshold)
    order: npt.NDArray[np.intp] = candidates[np.argsort(-weights[candidates], kind="stable")][:count]
    return order


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Doubles:
    """Numbers in [0, 1) that depend on seed and position alone: SplitMix64 from mix(seed), counted by position."""
    with np.errstate(over="ignore"):
        state = _mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
