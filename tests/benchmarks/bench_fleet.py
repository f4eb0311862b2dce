"""The fleet simulation: against the real engine on 1, 2 and 4 replicas with bursts, and a day of 809 nodes.

The engines are real (scheduler, batches, cache, streaming), and the gateway's balancer chooses among them. Their model
sleeps for known times instead of computing, so that other programs on the machine disturb little.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from tests.support.executors import executors
from tests.support.fake_model import VOCAB, FakeModel
from trtserve.bench.statistics import percentile
from trtserve.executor.api import Executor, OutputConfig, Request, Response
from trtserve.executor.engine.model import StepInputs
from trtserve.gateway.balancing import Balancer, RequestShare
from trtserve.pipeline.fleet.content import read_fleet
from trtserve.pipeline.fleet.simulation import Arrivals, ReplicaSpeed, Simulation
from trtserve.pipeline.fleet.sizing import simulate, size

SPEED = ReplicaSpeed(step=0.04, sequence=0.002, prompt_token=0.0002, request=0.0, slots=8)
PROMPT, ANSWER = 60, 16
REQUESTS = 160  # for each replica
DAY = """\
goal: ttft p99 < 2 s, itl p99 < 100 ms
gpus: {h100: {nodes: 1000, per_node: 8, price: 2.5}}
shapes:
  tp8: {gpu: h100, gpus: 8, max_batch_size: 64, load_seconds: 180,
        speed: {step_ms: 20, sequence_ms: 0.2, prompt_token_ms: 0.05, request_ms: 10, error: 0.05}}
traffic:
  requests_per_second: RATE
  day: [0.5, 0.4, 0.4, 0.35, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9, 1, 1,
        0.95, 0.95, 1, 1, 0.95, 0.9, 0.85, 0.8, 0.8, 0.75, 0.65, 0.55]
  input_tokens: 1000
  output_tokens: 4000
  variation: 0.8
  burstiness: 20
  shared_prefix: 0.4
failures: {node_hours: 2000, repair_minutes: 30}
update: {hour: 11, at_once: 0.05, drain_seconds: 300}
"""


class SleepingModel(FakeModel):
    """Takes the times of SPEED for a step, and notes when steps began and what they had."""

    def __init__(self) -> None:
        super().__init__(tokens_per_block=32)
        self.log: list[tuple[float, float, int, int]] = []

    def forward(self, step: StepInputs) -> Any:
        began = time.perf_counter()
        found = super().forward(step)
        sequences = len(step.past_lens)
        prompts = len(step.token_ids) - int((step.past_lens > 0).sum())
        seconds = SPEED.step + SPEED.sequence * sequences + SPEED.prompt_token * prompts
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        self.log.append((began, time.perf_counter(), sequences, prompts))
        return found


def measured_speed(log: list[tuple[float, float, int, int]]) -> ReplicaSpeed:
    """Return the speed of steps that followed each other, with what the engine does between them."""
    pairs = [(one, after) for one, after in itertools.pairwise(log) if after[0] - one[1] < SPEED.step / 2]
    rows = np.array([[1.0, one[2], one[3]] for one, _ in pairs])
    step, sequence, token = np.linalg.lstsq(rows, np.array([after[0] - one[0] for one, after in pairs]), rcond=None)[0]
    return replace(SPEED, step=float(step), sequence=float(sequence), prompt_token=float(token))


def bursts(replicas: int) -> list[float]:
    """Moments of requests: quiet and busy times in turns."""
    random = np.random.default_rng(replicas)
    count = REQUESTS * replicas
    rates = replicas * np.where(np.arange(count) // (20 * replicas) % 2, 6.0, 3.0)
    return [float(moment) for moment in np.cumsum(random.exponential(1, count) / rates)]


class Client:
    """Sends requests to engines, which the gateway's balancer chooses, and notes their first tokens."""

    def __init__(self, engines: list[Executor]) -> None:
        self.engines, self.balancer = engines, Balancer(len(engines))
        self.lock, self.ended, self.done = threading.Lock(), threading.Semaphore(0), threading.Event()
        self.asked: dict[tuple[int, int], tuple[float, RequestShare]] = {}
        self.firsts: dict[tuple[int, int], float] = {}

    def send(self, prompt: list[int], moment: float) -> None:
        request = Request(prompt, ANSWER, streaming=True, output_config=OutputConfig())
        with self.lock:
            share = self.balancer.choose(prompt)
            number = self.engines[share.replica].enqueue_request(request)
            self.asked[share.replica, number] = moment, share

    def receive(self, replica: int) -> None:
        while not self.done.is_set():
            for response in self.engines[replica].await_responses(timeout=0.5):
                assert isinstance(response, Response)
                now, key = time.perf_counter(), (replica, response.request_id)
                with self.lock:
                    moment, share = self.asked[key]
                    self.firsts.setdefault(key, now - moment)
                    if response.result.is_final:
                        self.balancer.end(share)
                        self.ended.release()


def served(replicas: int, moments: list[float]) -> tuple[list[float], ReplicaSpeed]:
    """Return the seconds to the first token of real engines, shortest first, and how fast their steps were."""
    random = np.random.default_rng(1)
    with executors(SleepingModel) as start:
        started = [start(batch=SPEED.slots, seq_len=PROMPT + ANSWER, tokens=2048) for _ in range(replicas)]
        client = Client([executor for executor, _ in started])
        threads = [threading.Thread(target=client.receive, args=(number,)) for number in range(replicas)]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        for moment in moments:
            time.sleep(max(0.0, began + moment - time.perf_counter()))
            client.send(random.integers(0, VOCAB, PROMPT).tolist(), began + moment)
        for _ in moments:
            assert client.ended.acquire(timeout=120)
        client.done.set()
        for thread in threads:
            thread.join()
        log = [each for _, model in started if isinstance(model, SleepingModel) for each in model.log]
    return sorted(client.firsts.values()), measured_speed(log)


def main() -> None:
    """Measure, print the table and write fleet.json."""
    parser = benchmark_parser(__doc__)
    arguments = parser.parse_args()
    served(1, [0.0, 0.1])  # imports
    rows: list[Row] = []
    _, speed = served(1, bursts(1))  # the single replica from which the fleet is predicted
    print(f"A replica, with load {os.getloadavg()[0]:.1f}: {speed}", flush=True)
    for replicas in (1, 2, 4):
        moments = bursts(replicas)
        real, _ = served(replicas, moments)
        ones = np.ones(len(moments))
        arrivals = Arrivals(np.array(moments), PROMPT * ones, ANSWER * ones, 0 * ones)
        found = Simulation(replicas, speed).run([arrivals])
        for quantile in (0.5, 0.99):
            expected, measured = found.first.quantile(quantile) or 0.0, percentile(real, quantile)
            rows.append(
                Row(
                    case=f"{replicas} replicas, p{100 * quantile:.0f}: |simulated ÷ measured − 1|",
                    value=abs(expected / measured - 1),
                    target=0.15,
                    at_most=True,
                    measured=expected,
                    base=measured,
                )
            )
        print(table(rows, measured="Simulated (s)", base="Measured (s)", value="Error"), flush=True)
    seconds = {}
    for rate in (130, 260):
        file = Path(arguments.work) / "fleet.yaml"
        file.write_text(DAY.replace("RATE", str(rate)), encoding="utf-8")
        fleet = read_fleet(file)
        began = time.process_time()
        day = simulate(fleet, size(fleet)[0])
        seconds[rate] = time.process_time() - began
        print(f"{day.replicas} replicas, {day.found.events:,} events: {seconds[rate]:.1f} s of CPU", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows += [
        Row(case="a day of 1,000 nodes: CPU seconds", value=seconds[260], target=60, at_most=True),
        Row(case="memory (GiB)", value=memory, target=2, at_most=True),
        Row(case="half the requests on half the replicas: part of the time", value=seconds[130] / seconds[260]),
    ]
    print(table(rows, measured="Simulated (s)", base="Measured (s)", value="Value"))
    finish(arguments, "fleet", rows)


if __name__ == "__main__":
    main()
