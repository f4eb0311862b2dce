"""An engine with adapters compared with one built without: decode of 8 streams, with 4 adapters and without, mixed.

The models are random Llamas of 135 M and 1.1 B parameters, the adapters random ones of rank 8 on q, k and v.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bench_executor import ExecutorSide, Shape, rate
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table

SHAPE = Shape(streams=8, prompt=64, new=65)
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
            None if number % (ADAPTERS + 1) == ADAPTERS else number % (ADAPTERS + 1) + 1
            for number in range(SHAPE.streams)
        ]
        return [
            self._api.Request(
                prompt, new, streaming=True, lora_config=None if task is None else self._api.LoraConfig(task)
            )
            for prompt, task in zip(prompts, tasks, strict=True)
        ]


def compare_model(work: Path, model: str, *, pairs: int) -> list[Row]:
    """Measure both cases of one model: adapters in use, and an engine for adapters without any in use."""
    plain = ExecutorSide(make_engine(work, model))
    built = make_engine(
        work, model, name="engine-lora", lora_plugin="auto", lora_target_modules=MODULES, max_lora_rank=RANK
    )
    with_adapters = AdapterSide(built)
    with_adapters.send_adapters()

    rows = []
    for case, adapted, target in (
        (f"{ADAPTERS} adapters and none", True, 0.8 if model == "llama-1b" else None),
        ("built for adapters, none in use", False, None),
    ):
        with_adapters.adapted = adapted
        measured, base = rate(with_adapters, SHAPE, model), rate(plain, SHAPE, model)
        rows.append(compare(f"{model}, {case}", measured, base, pairs=pairs, target=target))
    plain.executor.shutdown()
    with_adapters.executor.shutdown()
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", choices=SIZES, action="append", help="only these; may be repeated")
    arguments = parser.parse_args()
    models = arguments.model or SIZES
    rows = [row for model in models for row in compare_model(arguments.work, model, pairs=arguments.pairs)]
    print(table(rows, measured="With, tokens/s", base="Without, tokens/s"))
    finish(arguments, "lora", rows)


if __name__ == "__main__":
    main()
