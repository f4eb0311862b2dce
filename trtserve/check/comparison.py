"""Two sets of logits for the same tokens: how far they are apart, and how far they may be for a precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]

Precision = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Relation = Literal["at most", "at least", "exactly"]

# Two tokens whose logits in the original lie closer together than this many allowed differences are a tie: rounding
# may choose either. Four standard deviations of the allowed difference.
_TIE = 4.0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a precision may change. All differences are shares of the standard deviation of the original's logits.

    `difference` bounds the root mean square, `largest` the largest one, `divergence` the mean Kullback-Leibler
    divergence in nats; `top1` and `greedy` are the least shares of equal choices, ties aside.

    With experts, rounding sends a few tokens to other experts, and their logits have nothing to do with the
    original's. There `difference` bounds the median token, and `far` the share of tokens whose root mean square is
    beyond `far_beyond`.
    """

    difference: float
    largest: float
    divergence: float
    top1: float
    greedy: float
    far_beyond: float
    far: float


# docs/check.md says where these come from.
BOUNDS: Mapping[Precision, Bounds] = {
    "float32": Bounds(difference=5e-4, largest=1e-2, divergence=1e-5, top1=1.0, greedy=1.0, far_beyond=1e-3, far=0.0),
    "float16": Bounds(difference=0.04, largest=0.6, divergence=0.01, top1=0.98, greedy=0.93, far_beyond=0.2, far=0.03),
    "bfloat16": Bounds(difference=0.06, largest=0.8, divergence=0.03, top1=0.97, greedy=0.9, far_beyond=0.4, far=0.1),
    "int8": Bounds(difference=0.2, largest=4.0, divergence=0.15, top1=0.93, greedy=0.75, far_beyond=0.4, far=0.15),
    "int4": Bounds(difference=0.6, largest=8.0, divergence=0.7, top1=0.8, greedy=0.5, far_beyond=1.0, far=0.2),
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model made of one prompt: `tokens` are the prompt and what it went on with, without the last token.

    `logits` f32[tokens, vocab]; those from row `prompt_length` − 1 on chose what follows the prompt.
    """

    tokens: Sequence[int]
    prompt_length: int
    logits: Logits


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a difference is: prompts, positions and tokens of the vocabulary are counted from 0."""

    prompt: int
    position: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How far one model's logits are from another's over a set of prompts.

    `maximum` and `mean` are absolute, `deviation` is the standard deviation of the original's logits around the mean
    of their row, `relative` the root mean square of the difference and `relative_maximum` the largest one, as shares
    of it. `divergence` is the mean of KL(original ‖ converted) in nats, `worst_divergence` that of the worst position.
    `top1` counts equal most likely tokens, `greedy` the tokens of greedy answers up to the first other one; `…_ties`
    count a tie as equal. `worst` is where the largest difference is. `median` is the root mean square of the median
    token, and `far` the share of tokens whose own is beyond the precision's `far_beyond`.
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
class Verdict:
    """One figure beside its bound, and on which side of it the figure has to be."""

    name: str
    value: float
    relation: Relation
    bound: float

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        if self.relation == "exactly":
            return self.value == self.bound
        return self.value <= self.bound if self.relation == "at most" else self.value >= self.bound


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Figures of one prompt."""

    absolute: npt.NDArray[np.float64]  # per position: largest absolute difference
    total: float
    squares: npt.NDArray[np.float64]  # per position: mean square difference
    divergence: npt.NDArray[np.float64]
    same: npt.NDArray[np.bool_]
    tied: npt.NDArray[np.bool_]
    answer: int  # first position that chose a token of the answer
    token: int  # of the largest difference


def compare(originals: Sequence[Answer], converted: Sequence[Logits], precision: Precision) -> Differences:
    """Compare the logits of the same tokens, prompt by prompt; `precision` decides what counts as a tie."""
    deviation = _deviation(originals)
    tolerance = _TIE * BOUNDS[precision].difference * deviation
    parts = [_compare_one(answer, logits, tolerance) for answer, logits in zip(originals, converted, strict=True)]
    return _summary(parts, sum(answer.logits.size for answer in originals), deviation, BOUNDS[precision].far_beyond)


def _deviation(originals: Sequence[Answer]) -> float:
    import numpy as np

    squares = sum(float(np.square(a.logits - a.logits.mean(1, keepdims=True)).sum(dtype=np.float64)) for a in originals)
    return float(np.sqrt(squares / sum(a.logits.size for a in originals)))


def _compare_one(answer: Answer, converted: Logits, tolerance: float) -> _Part:
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
    """KL(original ‖ converted) of each position in nats."""
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
    """Figures of all prompts; `count` is the number of logits."""
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
    """`value` as a share; of a model whose logits are all equal, any difference is infinitely many."""
    if deviation == 0:
        return 0.0 if value == 0 else float("inf")
    return value / deviation


def _greedy(equal: Sequence[npt.NDArray[np.bool_]]) -> float:
    """Share of the answers' tokens in front of the first one that is chosen differently."""
    import numpy as np

    return float(sum(np.logical_and.accumulate(row).sum() for row in equal) / sum(len(row) for row in equal))


def verdicts(differences: Differences, precision: Precision, *, experts: bool = False) -> list[Verdict]:
    """Every figure that has a bound, beside it; `experts` tells a model whose tokens choose some."""
    bounds = BOUNDS[precision]
    top1 = Verdict(name="top-1 agreement", value=differences.top1_ties, relation="at least", bound=bounds.top1)
    if experts:
        found = [
            Verdict(name="median token", value=differences.median, relation="at most", bound=bounds.difference),
            Verdict(name="far tokens", value=differences.far, relation="at most", bound=bounds.far),
        ]
        # Where nothing is rounded, no token is sent to another expert.
        return [*found, top1] if precision == "float32" else found
    return [
        Verdict(name="difference", value=differences.relative, relation="at most", bound=bounds.difference),
        Verdict(
            name="largest difference", value=differences.relative_maximum, relation="at most", bound=bounds.largest
        ),
        Verdict(name="KL divergence", value=differences.divergence, relation="at most", bound=bounds.divergence),
        top1,
        Verdict(name="greedy match", value=differences.greedy_ties, relation="at least", bound=bounds.greedy),
    ]


def described(verdict: Verdict) -> dict[str, object]:
    """A verdict as JSON."""
    return {**asdict(verdict), "passed": verdict.passed}
