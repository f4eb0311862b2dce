"""Choose the next token from logits: greedy, top-k and nucleus sampling, and log-probabilities.

All rows of a step are processed together. The result of a row depends only on its own logits, its parameters and its
position, never on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.logits_processing import LogitsProcessor

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

UNDEFINED = -1  # token of a row whose logits are not finite
EXHAUSTED = -2  # token of a row in which every token is banned by bans, bias or guide
_DISTANCES = (4, 8, 16)
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class SamplingParameters:
    """The sampling parameters of one sequence with all defaults resolved."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0: the whole vocabulary
    top_p: float = 1.0
    top_p_min: float = 1e-6
    top_p_decay: float = 1.0
    top_p_reset_ids: int = -1  # -1: no token
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    no_repeat_ngram_size: int = 0
    beam_width: int = 1
    num_return_sequences: int = 1  # number of beams to return, if there are several
    beam_search_diversity_rate: float = 0.0
    length_penalty: float = 0.0
    early_stopping: int = 1

    @property
    def penalised(self) -> bool:
        """True when tokens that have occurred are penalised."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(slots=True)
class SamplingRow:
    """The sampling state of a row of logits."""

    parameters: SamplingParameters
    processor: LogitsProcessor
    generated: SequenceOf[int]  # the tokens generated so far
    log_prob: bool = False  # whether the log-probability is needed
    argmax_only: bool = field(init=False)  # whether the token with the largest logit is the whole result

    def __post_init__(self) -> None:
        self.argmax_only = self.parameters.greedy and self.processor.keeps_order and not self.log_prob


@dataclass(slots=True)
class Choice:
    """The chosen token of a row."""

    token: int  # a token id, UNDEFINED or EXHAUSTED
    log_prob: float = math.nan
    """Among the tokens it was chosen from, which are fewer when top-k log-probs are normalised; NaN if not needed."""
    full_log_prob: float = math.nan  # among the whole vocabulary; summed up in cum_log_probs. NaN if not needed.


def choose_tokens(
    logits: npt.NDArray[Any], rows: SequenceOf[SamplingRow], *, normalize_log_probs: bool = True
) -> list[Choice]:
    """Choose the next token of each row of `logits` f32[r, V].

    A row with NaN or +∞, or with only −∞, yields UNDEFINED; a row in which every token is banned yields EXHAUSTED.
    """
    choices = [Choice(token) for token in _largest(logits)]
    busy = [number for number, row in enumerate(rows) if not row.argmax_only and choices[number].token != UNDEFINED]
    if busy:
        randoms = _randoms([rows[number] for number in busy])
        for number, random in zip(busy, randoms, strict=True):
            choices[number] = _choose(logits[number], rows[number], random, normalize_log_probs)
    return choices


def log_softmax(rows: npt.NDArray[Any]) -> Floats:
    """Return the natural logarithms of each row's probabilities, f32[r, V]; rows of −∞ stay so, NaN and +∞ give NaN."""
    highest = rows.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        shifted = rows - np.where(np.isfinite(highest), highest, 0)
        totals = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
        result: Floats = shifted - np.log(np.maximum(totals, _TINY)).astype(np.float32)
    return result


def _largest(logits: npt.NDArray[Any]) -> list[int]:
    """Return the index of each row's largest logit. NumPy treats the first NaN as the largest, so one look finds it."""
    indices = logits.argmax(axis=1)
    tokens: list[int] = indices.tolist()
    finite = np.isfinite(logits[np.arange(len(tokens)), indices])
    if not finite.all():
        tokens = [token if good else UNDEFINED for token, good in zip(tokens, finite.tolist(), strict=True)]
    return tokens


def _randoms(rows: list[SamplingRow]) -> list[float]:
    """Return a random number for each row, which depends only on its seed and position."""
    if all(row.parameters.greedy for row in rows):
        return [0.0] * len(rows)
    seeds = np.array([row.parameters.seed for row in rows], dtype=np.uint64)
    positions = np.array([len(row.generated) for row in rows], dtype=np.uint64)
    numbers: list[float] = uniform(seeds, positions).tolist()
    return numbers


def _choose(logits: Floats, row: SamplingRow, random: float, normalize: bool) -> Choice:
    processed = logits if row.processor.neutral else row.processor.process(logits, row.generated)
    token = int(processed.argmax())
    highest = float(processed[token])
    if not math.isfinite(highest):
        return Choice(EXHAUSTED if highest == -math.inf else UNDEFINED)
    kept: float | None = None
    if not row.parameters.greedy:
        token, kept = _pick(processed, row, random)
    if not row.log_prob:
        return Choice(token)
    offset = float(processed[token]) - highest
    full = offset - math.log(np.exp(processed - processed.max()).sum(dtype=np.float64))
    return Choice(token, offset - math.log(kept) if kept is not None and normalize else full, full)


def _pick(logits: Floats, row: SamplingRow, u: float) -> tuple[int, float | None]:
    """Sort by probability and take the first token whose cumulative sum reaches u * p, among the `top_k` best if given.

    Returns the token and, for top-k, the mass of the k best relative to the best one.
    """
    top_k, top_p = row.parameters.top_k, row.processor.top_p
    if top_k:
        order = _best(logits, top_k)
        sums = _running_sums(logits[order])
        return _first_to_reach(order, sums, u * top_p * float(sums[-1])), float(sums[-1])
    weights = np.exp(logits - logits.max())
    target = u * top_p * float(weights.sum(dtype=np.float64))
    order = _sorted(logits, _nearest(logits, lambda candidates: bool(weights[candidates].sum() >= target)))
    return _first_to_reach(order, _running_sums(logits[order]), target), None


def _running_sums(descending: Floats) -> Doubles:
    sums: Doubles = np.cumsum(np.exp(descending - descending[0]), dtype=np.float64)
    return sums


def _first_to_reach(order: Indices, sums: Doubles, target: float) -> int:
    """Return the first token whose sum is at least `target`; tokens of weight zero are never reached."""
    return int(order[np.searchsorted(sums, min(target, float(sums[-1])))])


def _best(logits: Floats, count: int) -> Indices:
    """Return the `count` largest logits, largest first; the lower index comes first among equals."""
    candidates = _nearest(logits, lambda found: len(found) >= count)
    if len(candidates) > 4 * count:
        values = logits[candidates]
        candidates = candidates[values >= np.partition(values, -count)[-count]]
    return _sorted(logits, candidates)[:count]


def _nearest(logits: Floats, enough: Callable[[Indices], bool]) -> Indices:
    """Return all tokens within some distance of the largest logit, such that there are enough: usually few."""
    highest = logits.max()
    for distance in _DISTANCES:
        candidates = np.flatnonzero(logits >= highest - distance)
        if enough(candidates):
            return candidates
    return np.arange(len(logits))


def _sorted(logits: Floats, candidates: Indices) -> Indices:
    """Sort the candidates, largest logit first; the lower index comes first among equals."""
    order: Indices = candidates[np.argsort(-logits[candidates], kind="stable")]
    return order


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Doubles:
    """Return numbers in [0, 1) that depend only on seed and position: SplitMix64 started at mix(seed)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
