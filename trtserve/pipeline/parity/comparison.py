"""Compare two sets of logits for the same tokens, and judge the difference by the precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]

Precision = Literal["float32", "float16", "bfloat16", "int8", "int4"]

# Two tokens are tied when their original logits differ by less than this many allowed differences: rounding may pick
# either. Four standard deviations of the allowed difference.
_TIE = 4.0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Allowed differences for a precision, as shares of the standard deviation of the original's logits.

    `difference` bounds the root mean square, `largest` the maximum, `divergence` the mean Kullback-Leibler divergence
    in nats; `top1` and `greedy` are minimum shares of equal choices, not counting ties.

    With experts, rounding routes a few tokens to other experts, whose logits are unrelated to the original's. Then
    `difference` bounds the median token, and `far` the share of tokens whose root mean square exceeds `far_beyond`.
    """

    difference: float
    largest: float
    divergence: float
    top1: float
    greedy: float
    far_beyond: float
    far: float


# docs/how-to/check-numbers.md explains these values.
BOUNDS: Mapping[Precision, Bounds] = {
    "float32": Bounds(difference=5e-4, largest=1e-2, divergence=1e-5, top1=1.0, greedy=1.0, far_beyond=1e-3, far=0.0),
    "float16": Bounds(difference=0.04, largest=0.6, divergence=0.01, top1=0.98, greedy=0.93, far_beyond=0.2, far=0.03),
    "bfloat16": Bounds(difference=0.06, largest=0.8, divergence=0.03, top1=0.97, greedy=0.9, far_beyond=0.4, far=0.1),
    "int8": Bounds(difference=0.2, largest=4.0, divergence=0.15, top1=0.93, greedy=0.75, far_beyond=0.4, far=0.15),
    "int4": Bounds(difference=0.6, largest=8.0, divergence=0.7, top1=0.8, greedy=0.5, far_beyond=1.0, far=0.2),
}


@dataclass(frozen=True, kw_only=True)
class PromptLogits:
    """A model's answer to one prompt: `tokens` are prompt and answer without its last token.

    `logits` f32[tokens, vocab]; rows from `prompt_length` − 1 on chose the answer.
    """

    tokens: Sequence[int]
    prompt_length: int
    logits: Logits


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a difference; prompts, positions and token ids count from 0."""

    prompt: int
    position: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Differences between two models' logits over a set of prompts.

    `maximum` and `mean` are absolute. `deviation` is the standard deviation of the original's logits around their row's
    mean; `relative` (root mean square) and `relative_maximum` are shares of it. `divergence` is the mean KL(original ‖
    converted) in nats, `worst_divergence` the worst position's. `top1` counts equal most likely tokens, `greedy` the
    tokens of greedy answers before the first difference; `…_ties` count a tie as equal. `worst` is the place of the
    largest difference. `median` is the median token's root mean square, and `far` the share of tokens beyond the
    precision's `far_beyond`.
    """

    positions: int
    maximum: float
    mean: float
    deviation: float
    relative: float
    relative_maximum: float
    divergence: float
    worst_divergence: float
    top1: float
    top1_ties: float
    greedy: float
    greedy_ties: float
    worst: Place
    median: float
    far: float


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A figure, its bound, and the side of the bound it must be on."""

    name: str
    value: float
    relation: Literal["at most", "at least", "exactly"]
    bound: float

    @property
    def passed(self) -> bool:
        """False for NaN."""
        if self.relation == "exactly":
            return self.value == self.bound
        return self.value <= self.bound if self.relation == "at most" else self.value >= self.bound


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Figures of one prompt."""

    absolute: npt.NDArray[np.float64]  # per position: largest absolute difference
    total: float
    squares: npt.NDArray[np.float64]  # per position: mean squared difference
    divergence: npt.NDArray[np.float64]
    same: npt.NDArray[np.bool_]
    tied: npt.NDArray[np.bool_]
    answer: int  # first position that chose a token of the answer
    token: int  # of the largest difference


def compare(originals: Sequence[PromptLogits], converted: Sequence[Logits], precision: Precision) -> Differences:
    """Compare the logits of the same tokens, prompt by prompt; `precision` determines what counts as a tie."""
    import numpy as np

    squares = sum(float(np.square(a.logits - a.logits.mean(1, keepdims=True)).sum(dtype=np.float64)) for a in originals)
    deviation = float(np.sqrt(squares / sum(a.logits.size for a in originals)))
    tolerance = _TIE * BOUNDS[precision].difference * deviation
    parts = [_compare_one(answer, logits, tolerance) for answer, logits in zip(originals, converted, strict=True)]
    return _summary(parts, sum(answer.logits.size for answer in originals), deviation, BOUNDS[precision].far_beyond)


def _compare_one(answer: PromptLogits, converted: Logits, tolerance: float) -> _Part:
    import numpy as np

    original = answer.logits
    gaps = np.abs(converted - original)
    ours, rows = converted.argmax(1), np.arange(len(original))
    lost = original.max(1) - original[rows, ours]
    return _Part(
        absolute=gaps.max(1).astype(np.float64),
        total=float(gaps.sum(dtype=np.float64)),
        squares=np.square(gaps).mean(1, dtype=np.float64),
        divergence=_divergence(original, converted),
        same=ours == original.argmax(1),
        tied=lost <= tolerance,
        answer=answer.prompt_length - 1,
        token=int(gaps[gaps.max(1).argmax()].argmax()),
    )


def _divergence(original: Logits, converted: Logits) -> npt.NDArray[np.float64]:
    """Return KL(original ‖ converted) per position in nats."""
    import numpy as np

    expected, actual = _log_softmax(original), _log_softmax(converted)
    divergence: npt.NDArray[np.float64] = (np.exp(expected) * (expected - actual)).sum(1)
    return divergence


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    import numpy as np

    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _summary(parts: Sequence[_Part], count: int, deviation: float, far_beyond: float) -> Differences:
    """Combine the figures of all prompts; `count` is the number of logits."""
    import numpy as np

    prompt = int(np.argmax([part.absolute.max() for part in parts]))
    worst = Place(prompt=prompt, position=int(parts[prompt].absolute.argmax()), token=parts[prompt].token)
    maximum = float(parts[prompt].absolute.max())
    divergence = np.concatenate([part.divergence for part in parts])
    squares = np.concatenate([part.squares for part in parts])
    same, tied = (np.concatenate([getattr(part, name) for part in parts]) for name in ("same", "tied"))
    return Differences(
        positions=len(divergence),
        maximum=maximum,
        mean=sum(part.total for part in parts) / count,
        deviation=deviation,
        relative=_share(float(np.sqrt(squares.mean())), deviation),
        relative_maximum=_share(maximum, deviation),
        divergence=float(divergence.mean()),
        worst_divergence=float(divergence.max()),
        top1=float(same.mean()),
        top1_ties=float((same | tied).mean()),
        greedy=_greedy([part.same[part.answer :] for part in parts]),
        greedy_ties=_greedy([(part.same | part.tied)[part.answer :] for part in parts]),
        worst=worst,
        median=_share(float(np.sqrt(np.median(squares))), deviation),
        # NaN is far from everything.
        far=float(1 - (np.sqrt(squares) <= far_beyond * deviation).mean()),
    )


def _share(value: float, deviation: float) -> float:
    """Return `value` as a share; if all logits of a model are equal, any difference is infinite."""
    if deviation == 0:
        return 0.0 if value == 0 else float("inf")
    return value / deviation


def _greedy(equal: Sequence[npt.NDArray[np.bool_]]) -> float:
    """Return the share of the answers' tokens before the first different choice."""
    import numpy as np

    return float(sum(np.logical_and.accumulate(row).sum() for row in equal) / sum(len(row) for row in equal))


def verdicts(differences: Differences, precision: Precision, *, experts: bool = False) -> list[Judgement]:
    """Judge every figure that has a bound; `experts` marks a model with routed experts."""
    bounds = BOUNDS[precision]
    top1 = Judgement(name="top-1 agreement", value=differences.top1_ties, relation="at least", bound=bounds.top1)
    if experts:
        found = [
            Judgement(name="median token", value=differences.median, relation="at most", bound=bounds.difference),
            Judgement(name="far tokens", value=differences.far, relation="at most", bound=bounds.far),
        ]
        # Without rounding, no token is routed differently.
        return [*found, top1] if precision == "float32" else found
    return [
        Judgement(name="difference", value=differences.relative, relation="at most", bound=bounds.difference),
        Judgement(
            name="largest difference", value=differences.relative_maximum, relation="at most", bound=bounds.largest
        ),
        Judgement(name="KL divergence", value=differences.divergence, relation="at most", bound=bounds.divergence),
        top1,
        Judgement(name="greedy match", value=differences.greedy_ties, relation="at least", bound=bounds.greedy),
    ]
