"""How fast a configuration should be: a roofline of bytes and operations, with the overheads that a machine has.

The figures of a machine are measured once (`trtserve doctor --measure`). A prediction is a sum of five terms, seconds
per request; trials correct the weight of each, and what remains of the times to the first and next tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

from trtserve.errors import UsageError
from trtserve.files import read_as, write_json
from trtserve.store import Store

_FILE = "speed-{runtime}.json"
_PRIOR = 0.3
"""How many trials the measured figures of the machine count for."""
_LATE = {"mean": 1.0, "p50": 0.9, "p75": 1.2, "p90": 1.6, "p95": 1.9, "p99": 2.5}
"""How much a figure exceeds the mean, before a trial has shown it."""


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
    """Of each request: transport, tokenising, scheduling."""
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
class Offered:
    """What is asked: mean lengths, and requests in flight or per second."""

    input_tokens: float
    output_tokens: float
    concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Expected figures of a trial."""

    requests_per_second: float
    tokens_per_second: float
    times_ms: Mapping[str, float]
    """Means: ttft, itl, tpot, latency."""

    def figure(self, name: str) -> float:
        """Return a figure by the name of its limit, such as ttft_p99 or tokens_per_second."""
        if name in ("requests_per_second", "tokens_per_second"):
            return float(getattr(self, name))
        measure, _, figure = name.rpartition("_")
        return self.times_ms[measure] * _LATE[figure] if measure in self.times_ms else 1.0


@dataclass
class SpeedModel:
    """Predicts trials, and learns from them."""

    speed: MachineSpeed
    _rows: list[list[float]] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _ratios: dict[str, list[float]] = field(default_factory=dict)
    errors: list[dict[str, float]] = field(default_factory=list)
    """Of each trial, predicted before it ran: figure → |predicted / measured − 1|."""
    _weights: Sequence[float] = (1.0,) * 5

    def predict(self, shape: ModelShape, offered: Offered) -> Prediction:
        """Return the expected figures."""
        batch, in_flight = self._batch(shape, offered)
        terms = self._terms(shape, offered, batch)
        each = _dot(self._weights, terms)
        # A step of the whole batch; a prompt delays the first token and, as a part of a step, those of others.
        step = _dot(self._weights, [self.speed.step_seconds, *self._decode(shape, offered, batch)[1:], 0.0])
        prompt = self._weights[3] * 2 * shape.parameters * offered.input_tokens / self.speed.operations_per_second
        rate = shape.replicas / each if offered.rate is None else min(offered.rate, shape.replicas / each)
        if offered.rate is None and in_flight < batch * shape.replicas:
            rate = in_flight / batch / each
        waiting = max(0.0, in_flight / shape.replicas - batch) * each
        first = waiting + prompt + 1.5 * step + self._weights[4] * self.speed.request_seconds
        gap = step + prompt * (batch - 1) / max(1.0, offered.output_tokens)
        times = {"ttft": first, "itl": gap, "tpot": gap, "latency": first + gap * offered.output_tokens}
        return Prediction(
            requests_per_second=rate,
            tokens_per_second=rate * offered.output_tokens,
            times_ms={name: 1000 * value for name, value in times.items()},
        )

    def expected(self, name: str, prediction: Prediction) -> float:
        """Return a figure, corrected by what trials have shown of it."""
        ratios = self._ratios.get(name, ())
        # One trial says as much as what was assumed.
        return (
            prediction.figure(name) * math.exp(sum(ratios) / (len(ratios) + 1)) if ratios else prediction.figure(name)
        )

    def learn(self, shape: ModelShape, offered: Offered, measured: Mapping[str, float]) -> None:
        """Count a trial. `measured` are figures by the names of limits, requests_per_second among them."""
        prediction = self.predict(shape, offered)
        found = {name: value for name, value in measured.items() if 0 < value < math.inf}
        self.errors.append({name: abs(self.expected(name, prediction) / value - 1) for name, value in found.items()})
        for name, value in found.items():
            if name not in ("requests_per_second", "tokens_per_second"):
                self._ratios.setdefault(name, []).append(math.log(value / prediction.figure(name)))
        rate, batch = found.get("requests_per_second"), self._batch(shape, offered)[0]
        if rate is None or (offered.rate is not None and rate >= 0.95 * offered.rate):
            return  # as fast as the requests came: nothing about the machine's limit
        terms = self._terms(shape, offered, batch)
        self._rows.append(terms)
        self._seconds.append(shape.replicas / rate)
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

    def _batch(self, shape: ModelShape, offered: Offered) -> tuple[int, float]:
        """Return sequences in a step of each replica, and requests in flight; of a rate, by Little's law."""
        if offered.rate is None:
            in_flight = float(offered.concurrency or 1)
            return max(1, min(shape.max_batch_size, round(in_flight / shape.replicas))), in_flight
        rate, batch = offered.rate / shape.replicas, 1
        while batch < shape.max_batch_size and _dot(self._weights, self._terms(shape, offered, batch)) > 1 / rate:
            batch += 1
        return batch, float(batch * shape.replicas)

    def _decode(self, shape: ModelShape, offered: Offered, batch: int) -> list[float]:
        """Return the seconds of a step that computes one token of each sequence, by what they are spent on."""
        speed, context = self.speed, offered.input_tokens + offered.output_tokens / 2
        read = (shape.weight_bytes + batch * context * shape.kv_bytes) / speed.bytes_per_second
        computed = 2 * shape.parameters * batch / speed.operations_per_second
        # The roofline: reading and computing overlap.
        return [
            speed.step_seconds,
            batch * speed.sequence_seconds,
            *((read, 0.0) if read > computed else (0.0, computed)),
        ]

    def _terms(self, shape: ModelShape, offered: Offered, batch: int) -> list[float]:
        """Return seconds of one replica for each request: steps, sequences, bytes, operations, requests."""
        share = offered.output_tokens / batch
        terms = [value * share for value in self._decode(shape, offered, batch)]
        terms[0] += self.speed.step_seconds * offered.input_tokens / shape.max_num_tokens
        terms[3] += 2 * shape.parameters * offered.input_tokens / self.speed.operations_per_second
        return [*terms, self.speed.request_seconds / batch]

    def _fit(self) -> None:
        """Choose the weights of the terms: least squares of relative errors, drawn to 1, none below a tenth."""
        import numpy as np

        rows = np.array(self._rows) / np.array(self._seconds)[:, None]
        system = np.vstack([rows, math.sqrt(_PRIOR) * np.diag(rows.max(axis=0))])
        target = np.concatenate([1 - rows.sum(axis=1), np.zeros(rows.shape[1])])
        found = 1 + np.linalg.lstsq(system, target, rcond=None)[0]
        # What the overlap of reading and computing hides leaves a common factor.
        self._weights = [max(0.1, float(value)) for value in found]
        common = float(np.median(rows @ np.array(self._weights)))
        self._weights = [weight / common for weight in self._weights]


def _dot(weights: Sequence[float], terms: Sequence[float]) -> float:
    return sum(weight * term for weight, term in zip(weights, terms, strict=True))
