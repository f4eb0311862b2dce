"""The in-process executor compared with openvino_genai's ContinuousBatchingPipeline: same graph, weights and hints.

The model is a random Llama of 135 M parameters, made once in the work folder.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tests.benchmarks.engines import MAX_NUM_TOKENS, SIZES, make_engine
from tests.benchmarks.frame import benchmark_parser, compare, finish, table
from trtserve.executor.engine.model import StepInputs
from trtserve.executor.engine.shapes import LoraShape
from trtserve.host.machine import free_memory

KV_TOKENS = 16 * 1024
WAIT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One measurement; a rate counts new tokens after the first, or prompt tokens when `new` is 1."""

    streams: int
    prompt: int
    new: int

    @property
    def counted(self) -> int:
        """Tokens that the measured time produced."""
        return self.streams * (self.prompt if self.new == 1 else self.new - 1)


SHAPES = {
    "decode, 1 stream": Shape(streams=1, prompt=64, new=129),
    "decode, 8 streams": Shape(streams=8, prompt=64, new=65),
    "prefill, 1024 tokens": Shape(streams=1, prompt=1024, new=1),
}


class Side(Protocol):
    """One of the implementations that are compared."""

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first tokens to the last, or from the request to the first when `new` is 1."""
        ...


def rate(side: Side, shape: Shape, model: str = "llama-135m") -> Callable[[int], float]:
    """Tokens per second on the random prompts of a pair."""

    def measure(number: int) -> float:
        random = np.random.default_rng(number)
        prompts = random.integers(3, SIZES[model]["vocab_size"], size=(shape.streams, shape.prompt)).tolist()
        return shape.counted / side.seconds(prompts, shape.new)

    return measure


class ExecutorSide:
    """Ours, streaming, as a server uses it."""

    def __init__(self, engine: Path, config: Any = None) -> None:
        from trtserve.executor import api

        self._api = api
        self.engine = engine
        config = config or api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=KV_TOKENS))
        self.executor = api.Executor(engine, api.ModelType.DECODER_ONLY, config)

    def requests(self, prompts: list[list[int]], new: int) -> list[Any]:
        """The requests of one measurement."""
        return [self._api.Request(prompt, new, streaming=True) for prompt in prompts]

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        begin = time.perf_counter()
        first, silent = begin, len(prompts)
        seen: set[int] = set()
        for response in self.responses(self.requests(prompts, new)):
            if len(seen) < silent:
                first = time.perf_counter()
                seen.add(response.request_id)
        return time.perf_counter() - (begin if new == 1 else first)

    def run(self, requests: list[Any]) -> None:
        """Let `requests` run to their end."""
        for _ in self.responses(requests):
            pass

    def responses(self, requests: list[Any]) -> Iterator[Any]:
        """Yield every response of `requests` until all have ended; RuntimeError for an error response."""
        return responses(self.executor, requests)


AnySide = TypeVar("AnySide", bound=ExecutorSide)


@contextmanager
def ended(side: AnySide) -> Iterator[AnySide]:
    """Shut the executor down in the end and free its weights: those of one model at a time."""
    try:
        yield side
    finally:
        side.executor.shutdown()
        del side
        gc.collect()


def responses(executor: Any, requests: list[Any]) -> Iterator[Any]:
    """Yield every response of `requests` until all have ended; RuntimeError for an error response."""
    running = set(executor.enqueue_requests(requests))
    while running:
        for response in executor.await_responses(WAIT):
            if response.has_error():
                raise RuntimeError(response.error_msg)
            if response.result.is_final:
                running.discard(response.request_id)
            yield response


class GenaiSide:
    """openvino_genai's continuous batching, driven step by step in this thread."""

    def __init__(self, folder: Path, hints: dict[str, str]) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = MAX_NUM_TOKENS
        scheduler.max_num_seqs = 8
        scheduler.dynamic_split_fuse = True
        scheduler.num_kv_blocks = KV_TOKENS // 32
        self._genai = genai
        self.pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", hints)
        self._next = 0

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        import openvino as ov

        config = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        begin = time.perf_counter()
        handles = []
        for prompt in prompts:
            handles.append(self.pipeline.add_request(self._next, ov.Tensor(np.array([prompt], np.int64)), config))
            self._next += 1
        self.pipeline.step()
        first = time.perf_counter()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        assert all(len(handle.read_all()[0].generated_ids) == new for handle in handles)
        return time.perf_counter() - (begin if new == 1 else first)


class _ZeroWork:
    """A model whose step costs nothing, to measure the executor's own time."""

    vocab_size: int = SIZES["llama-135m"]["vocab_size"]
    hidden_size: int = SIZES["llama-135m"]["hidden_size"]
    max_prompt_table = 0
    lora: LoraShape | None = None
    max_position = 4096
    tokens_per_block = 32
    bytes_per_block = 1
    kv_memory_fraction = 0.3
    step_costs: tuple[float, ...] = ()

    def free_memory(self) -> int:
        return free_memory()

    def allocate(self, num_blocks: int) -> None:
        self._logits = np.random.default_rng(0).standard_normal((8, self.vocab_size)).astype(np.float32)

    def warm_up(self) -> None:
        """There is nothing to make."""

    def forward(self, step: StepInputs) -> npt.NDArray[np.float32]:
        return self._logits[: len(step.rows)]

    def copy_block(self, source: int, target: int) -> None:
        """Blocks hold nothing."""


def loop_microseconds(streams: int, *, steps: int = 500) -> float:
    """Microseconds per step of planning, filling, choosing and delivering, streaming client included."""
    from trtserve.executor import api
    from trtserve.executor.engine.limits import EngineLimits

    limits = EngineLimits(max_batch_size=8, max_seq_len=4096, max_num_tokens=2048, vocab_size=_ZeroWork.vocab_size)
    config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=8 * 4096))
    with api.Executor.from_model(_ZeroWork(), limits, config) as executor:
        begin = time.perf_counter()
        for _ in responses(executor, [api.Request([1] * 64, steps, streaming=True) for _ in range(streams)]):
            pass
        return (time.perf_counter() - begin) / steps * 1e6


def export_for_genai(engine: Path, model: Path, folder: Path) -> dict[str, str]:
    """Write the engine's graph in openvino_genai's layout and return the engine's precision hints."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("xml", "bin"):
        (folder / f"openvino_model.{suffix}").unlink(missing_ok=True)
        os.link(engine / f"rank0.{suffix}", folder / f"openvino_model.{suffix}")
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    own = json.loads((engine / "config.json").read_text(encoding="utf-8"))["trtserve"]
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": own["compute_precision"],
        "KV_CACHE_PRECISION": own["kv_precision"],
    }


def main(name: str = "executor", targets: Sequence[float] = (0.90, 0.95, 0.90)) -> None:
    """Compare each of `SHAPES`; `targets` are the lowest ratios that will do. Another `name` has its own engine."""
    arguments = benchmark_parser(__doc__).parse_args()
    own = "" if name == "executor" else f"-{name}"
    engine, folder = make_engine(arguments.work, name=f"engine{own}"), arguments.work / "llama-135m"
    hints = export_for_genai(engine, folder / "model", folder / f"genai{own}")
    theirs = GenaiSide(folder / f"genai{own}", hints)
    with ended(ExecutorSide(engine)) as ours:
        rows = [
            compare(case, rate(ours, shape), rate(theirs, shape), pairs=arguments.pairs, target=target)
            for (case, shape), target in zip(SHAPES.items(), targets, strict=True)
        ]
    print(table(rows, measured="Executor, tokens/s", base="openvino_genai, tokens/s"))
    overhead = {streams: statistics.median(loop_microseconds(streams) for _ in range(5)) for streams in (1, 8)}
    for streams, microseconds in overhead.items():
        print(f"Executor's own time per step at {streams} streams, without the model: {microseconds:.0f} µs")
    finish(arguments, name, rows, hints=hints, loop_microseconds=overhead)


if __name__ == "__main__":
    main()
