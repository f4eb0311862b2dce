"""An engine with adapters compared with one built without: decode of 8 streams, with 4 adapters and without, mixed.

Run as `python -m tests.benchmarks.bench_lora --work FOLDER --out FOLDER`; the models are random Llamas of 135 M and
1.1 B parameters, the adapters random ones of rank 8 on q, k and v.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bench_executor import ExecutorSide
from tests.benchmarks.comparison import Comparison, compare, figures, table
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.results import benchmark_parser, finish

STREAMS = 8
PROMPT = 64
NEW = 65
ADAPTERS = 4
RANK = 8
MODULES = ("attn_q", "attn_k", "attn_v")


class AdapterSide(ExecutorSide):
    """Streams whose requests use the adapters 1, 2, 3, 4 and none in turn, when `adapted`."""

    adapted = True

    def send_adapters(self) -> None:
        """Let the executor cache the adapters; every request after this gives a task id only."""
        from tests.support.adapters import random_adapter
        from trtserve.executor.engine.shapes import LoraShape, lora_shape
        from trtserve.executor.loaders import read_engine_config

        shape = lora_shape(read_engine_config(self.engine))
        assert isinstance(shape, LoraShape)
        for task in range(1, ADAPTERS + 1):
            weights, config = random_adapter(shape, seed=task, rank=RANK, dtype=np.float16)
            sent = self._api.LoraConfig(task, (0.01 * weights).astype(np.float16), config)
            self.run([self._api.Request([1], 1, streaming=True, lora_config=sent)])

    def requests(self, prompts: list[list[int]], new: int) -> list[Any]:
        if not self.adapted:
            return super().requests(prompts, new)
        tasks = [
            None if number % (ADAPTERS + 1) == ADAPTERS else number % (ADAPTERS + 1) + 1 for number in range(STREAMS)
        ]
        return [
            self._api.Request(
                prompt, new, streaming=True, lora_config=None if task is None else self._api.LoraConfig(task)
            )
            for prompt, task in zip(prompts, tasks, strict=True)
        ]


def compare_model(work: Path, model: str, *, pairs: int) -> list[Comparison]:
    """Measure both cases of one model: adapters in use, and an engine for adapters without any in use."""
    plain = ExecutorSide(make_engine(work, model))
    built = make_engine(
        work, model, name="engine-lora", lora_plugin="auto", lora_target_modules=MODULES, max_lora_rank=RANK
    )
    with_adapters = AdapterSide(built)
    with_adapters.send_adapters()

    def rate(side: ExecutorSide, *, adapted: bool = False) -> Any:
        def measure(number: int) -> float:
            random = np.random.default_rng(number)
            prompts = random.integers(3, SIZES[model]["vocab_size"], size=(STREAMS, PROMPT)).tolist()
            if isinstance(side, AdapterSide):
                side.adapted = adapted
            return STREAMS * (NEW - 1) / side.seconds(prompts, NEW)

        return measure

    rows = [
        compare(
            f"{model}, {case}",
            rate(with_adapters, adapted=adapted),
            rate(plain),
            pairs=pairs,
            unit="tokens/s",
            target=target,
        )
        for case, adapted, target in (
            (f"{ADAPTERS} adapters and none", True, 0.8 if model == "llama-1b" else None),
            ("built for adapters, none in use", False, None),
        )
    ]
    plain.executor.shutdown()
    with_adapters.executor.shutdown()
    return rows


def main() -> None:
    parser = benchmark_parser("lora", __doc__)
    parser.add_argument("--model", choices=SIZES, action="append", help="only these; may be repeated")
    arguments = parser.parse_args()
    rows: list[Comparison] = []
    for model in arguments.model or SIZES:
        rows += compare_model(arguments.work.absolute(), model, pairs=arguments.pairs)
    print(table(rows))
    finish(arguments.out or arguments.work, "lora", {"cpus": os.cpu_count(), "rows": rows}, figures(rows))


if __name__ == "__main__":
    main()
