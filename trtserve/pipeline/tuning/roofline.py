"""How fast a configuration should be: a roofline of bytes and operations, with the overheads that a machine has.

The figures of a machine are measured once (`trtserve doctor --measure`). A prediction is a run of an engine in virtual
time whose steps cost a sum of terms; trials correct the weight of each, and what remains of the times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from trtserve.errors import UsageError
from trtserve.files import read_as, write_json
from trtserve.pipeline.tuning.virtual_engine import Offered, VirtualRun, serve
from trtserve.store import Store

_FILE = "speed-{runtime}.json"
_PRIOR = 0.3
"""How many trials the measured figures of the machine count for."""
_PASSES = 2
"""Fits after a trial: other weights make other waves."""
_TIMES = ("ttft", "itl", "tpot", "latency")


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """What a runtime reaches on this machine."""

    bytes_per_second: float
    """At which weights are read when one token is computed."""
    operations_per_second: float
    """In matrices of many tokens."""
    step_seconds: float
    """Of a step of the engine besides its matrices."""
    sequence_seconds: float
    """Of each sequence in a step: choosing, streaming and counting its token."""
    request_seconds: float
    """Of each request before the engine has it: transport, tokenising."""
    device: str = ""
    measured: str = ""
    """UTC, ISO 8601."""

    @classmethod
    def read(cls, runtime: str, store: Store) -> MachineSpeed | None:
        """Return what `doctor --measure` wrote, or None."""
        try:
            return read_as(
                store.root / _FILE.format(runtime=runtime),
                cls,
                "the speed of this machine",
                UsageError,
                hint="Measure again: trtserve doctor --measure",
            )
        except FileNotFoundError:
            return None

    def write(self, runtime: str, store: Store) -> None:
        """Keep it in the store."""
        write_json(store.root / _FILE.format(runtime=runtime), asdict(self))


ASSUMED = MachineSpeed(
    bytes_per_second=10e9,
    operations_per_second=100e9,
    step_seconds=0.002,
    sequence_seconds=0.0005,
    request_seconds=0.01,
    device="assumed",
)
"""Orders the trials of a machine that was not measured."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a configuration has to read and compute, on each rank."""

    weight_bytes: float
    kv_bytes: float
    """Of a token in the KV cache."""
    parameters: float
    max_batch_size: int
    max_num_tokens: int
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Expected figures of a trial."""

    requests_per_second: float
    tokens_per_second: float
    run: VirtualRun
    """Of one replica."""

    def figure(self, name: str) -> float:
        """Return a figure by the name of its limit, such as ttft_p99 or tokens_per_second; times in milliseconds."""
        if name in ("requests_per_second", "tokens_per_second"):
            return float(getattr(self, name))
        measure, _, figure = name.rpartition("_")
        if measure not in _TIMES:
            return 1.0
        return 1000 * self.run.figure(measure, None if figure == "mean" else float(figure[1:]) / 100)


@dataclass
class SpeedModel:
    """Predicts trials, and learns from them."""

    speed: MachineSpeed
    errors: list[dict[str, float]] = field(default_factory=list)
    """Of each trial, predicted before it ran: figure → |predicted / measured − 1|."""
    _trials: list[tuple[ModelShape, Offered, float]] = field(default_factory=list)
    """Shape, load, and requests per second."""
    _ratios: dict[str, list[float]] = field(default_factory=dict)
    _weights: npt.NDArray[np.float64] = field(default_factory=lambda: np.ones(5))
    _predictions: dict[tuple[ModelShape, Offered], Prediction] = field(default_factory=dict)

    def predict(self, shape: ModelShape, offered: Offered) -> Prediction:
        """Return the expected figures."""
        if (shape, offered) not in self._predictions:
            self._predictions[shape, offered] = self._predict(shape, offered)
        return self._predictions[shape, offered]

    def _predict(self, shape: ModelShape, offered: Offered) -> Prediction:
        replicas = shape.replicas if offered.rate else min(shape.replicas, offered.concurrency or 1)
        each = replace(
            offered,
            concurrency=math.ceil((offered.concurrency or 1) / replicas),
            rate=offered.rate and offered.rate / replicas,
            requests=math.ceil(offered.requests / replicas),
        )
        run = serve(
            each,
            lambda *step: self._weights * self._terms(shape, *step),
            slots=shape.max_batch_size,
            step_tokens=shape.max_num_tokens,
            overhead=float(self._weights[4]) * self.speed.request_seconds,
        )
        tokens = replicas * run.tokens / float(run.terms.sum())
        rate = tokens / max(1.0, offered.output_tokens)
        if offered.rate is not None and rate > offered.rate:
            rate, tokens = offered.rate, offered.rate * offered.output_tokens
        return Prediction(requests_per_second=rate, tokens_per_second=tokens, run=run)

    def _terms(self, shape: ModelShape, sequences: int, prompt_tokens: int, context: float) -> npt.NDArray[np.float64]:
        """Return the seconds of a step: its own, its sequences', bytes, operations, and none of waiting."""
        speed = self.speed
        read = (shape.weight_bytes + context * shape.kv_bytes) / speed.bytes_per_second
        computed = 2 * shape.parameters * (sequences + prompt_tokens) / speed.operations_per_second
        # The roofline: reading and computing overlap.
        longer = (read, 0.0) if read > computed else (0.0, computed)
        return np.array([speed.step_seconds, sequences * speed.sequence_seconds, *longer, 0.0])

    def expected(self, name: str, prediction: Prediction) -> float:
        """Return a figure, corrected by what trials have shown of it."""
        ratios = self._ratios.get(name, ())
        # One trial says as much as what was assumed.
        return prediction.figure(name) * math.exp(sum(ratios) / (len(ratios) + 1))

    def learn(self, shape: ModelShape, offered: Offered, measured: Mapping[str, float]) -> None:
        """Count a trial. `measured` are figures by the names of limits, requests_per_second among them."""
        prediction = self.predict(shape, offered)
        found = {name: value for name, value in measured.items() if 0 < value < math.inf}
        self.errors.append({name: abs(self.expected(name, prediction) / value - 1) for name, value in found.items()})
        for name, value in found.items():
            predicted = prediction.figure(name)  # answers of one token have no time between tokens
            if predicted and name not in ("requests_per_second", "tokens_per_second"):
                self._ratios.setdefault(name, []).append(math.log(value / predicted))
        rate = found.get("requests_per_second")
        if rate is None or (offered.rate is not None and rate >= 0.95 * offered.rate):
            return  # as fast as the requests came: nothing about the machine's limit
        self._trials.append((shape, offered, rate))
        for _ in range(_PASSES):
            self._fit()

    def error(self, name: str, *, after: int = 0) -> float | None:
        """Return the median error of a figure over the trials that were predicted after this many others."""
        found = [each[name] for each in self.errors[after:] if name in each]
        return median(found) if found else None

    @property
    def margin(self) -> float:
        """How much better than expected a configuration may turn out, by the errors so far."""
        recent = [each["requests_per_second"] for each in self.errors[-4:] if "requests_per_second" in each]
        return 1.0 if len(self.errors) < 2 else max(0.05, 1.5 * fmean(recent)) if recent else 1.0

    def _fit(self) -> None:
        """Choose the weights of the terms: least squares of relative errors, drawn to 1, none below a tenth."""
        # Of each trial: the seconds of a request by what they are spent on, not weighted, ÷ the measured ones.
        parts = []
        for shape, offered, rate in self._trials:
            expected = self.predict(shape, offered)
            share = expected.run.terms / expected.run.terms.sum() / self._weights
            parts.append(share * rate / expected.requests_per_second)
        rows = np.array(parts)
        system = np.vstack([rows, math.sqrt(_PRIOR) * np.diag(rows.max(axis=0))])
        target = np.concatenate([1 - rows.sum(axis=1), np.zeros(rows.shape[1])])
        found = 1 + np.linalg.lstsq(system, target, rcond=None)[0]
        # What the overlap of reading and computing hides leaves a common factor.
        weights = np.maximum(0.1, found)
        self._weights = weights / np.median(rows @ weights)
        self._predictions.clear()
