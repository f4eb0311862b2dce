"""Measure an engine in process, one process for each rank: `mpirun -n N python -m tests.gpu.ranked_decode ENGINE`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.gpu.bench_decode import NEW, SEQ_LEN, figure, requests, run
from trtserve.executor import api
from trtserve.executor.engine.limits import resolve_limits
from trtserve.executor.engine.loop import RequestEngine
from trtserve.executor.engine.model import Follower
from trtserve.executor.interface.convert import engine_options
from trtserve.executor.loaders import load_model, read_engine_config

SHORT = 8


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    options = parser.parse_args()
    cache = api.KvCacheConfig(enable_block_reuse=False, max_tokens=max(options.streams) * SEQ_LEN)
    config = api.ExecutorConfig(enable_chunked_context=True, iter_stats_max_iterations=1_000_000, kv_cache_config=cache)
    content = read_engine_config(options.engine)
    settings = engine_options(config)
    model = load_model(options.engine, settings)
    if isinstance(model, Follower):
        model.follow()
        return
    assert not isinstance(model, RequestEngine)
    name = f"tp{content.mapping.tp_size} pp{content.mapping.pp_size}"
    with api.Executor.from_model(model, resolve_limits(content, settings), config) as executor:
        for streams in options.streams:
            spent: dict[int, list[float]] = {SHORT: [], SHORT + NEW: []}
            for new in 2 * (SHORT, SHORT + NEW):
                begin = time.perf_counter()
                run(executor, requests(streams, model.vocab_size, new=new))
                spent[new].append(time.perf_counter() - begin)
            # Stages have other sequences at the same time, so that no step has all: answers differ in length instead.
            less, more = map(min, spent.values())
            figure(f"{name}, {streams} streams: tokens/s", round(streams * NEW / (more - less)))
            figure(f"{name}, {streams} streams with their prompts: tokens/s", round(streams * (SHORT + NEW) / more))


if __name__ == "__main__":
    main()
