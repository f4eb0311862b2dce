"""Measure models with random weights through the executor, next to transformers: `python -m tests.gpu.bench_decode`.

Decoding is measured over the middle of the answers: the mean context is CONTEXT tokens. Lines that begin with `figure:`
are results as JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from tests.gpu.random_models import HF_SIZES, MAX_NUM_TOKENS, Codes, random_model
from trtserve.executor import api
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.model import Draws, StepInputs
from trtserve.executor.engine.sampling import SamplingParameters, SamplingRow
from trtserve.executor.torch.step_kernels import FIRST_BLOCK, LENGTH, POSITION, STEP_WORDS
from trtserve.pipeline.gpu_fit import RESERVE

CONTEXT = 512
NEW = 128
SEQ_LEN = 2304
PARTS = (
    "prefill", "decode", "replay", "sampled", "guided", "adapters", "drafts", "idle", "mixed", "ragged", "beside",
    "first", "peer",
)  # fmt: skip
WHOLE = {"adapters", "drafts", "ragged", "beside", "first", "peer"}
"""Parts that make models of their own."""
SAMPLED: dict[str, dict[str, Any]] = {
    "top-k and top-p": {"top_k": 50, "top_p": 0.9},
    "top-p": {"top_p": 0.95, "temperature": 0.8},
}
ADAPTERS, RANK = 16, 16
# An answer of 128 tokens does not reach its end.
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "fit": {"type": "boolean"}},
        "required": ["name", "age", "fit"],
        "additionalProperties": False,
    },
}


def figure(name: str, value: float) -> None:
    print("figure: " + json.dumps({name: value}), flush=True)


def start(
    model: Any,
    *,
    batch: int,
    seq_len: int = SEQ_LEN,
    tokens: int = MAX_NUM_TOKENS,
    guides: bool = False,
    cache: int | None = None,
    made: type[api.ExecutorConfig] = api.ExecutorConfig,
) -> api.Executor:
    """Return an executor that keeps its iteration records; its KV cache holds `cache` tokens, or all sequences."""
    limits = EngineLimits(
        max_batch_size=batch, max_seq_len=seq_len, max_num_tokens=tokens, vocab_size=model.vocab_size, chunked=True
    )
    backend = api.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE
    guiding = api.GuidedDecodingConfig(backend, words(model.vocab_size), None, [0]) if guides else None
    config = made(
        enable_chunked_context=True,
        iter_stats_max_iterations=1_000_000,
        kv_cache_config=api.KvCacheConfig(enable_block_reuse=False, max_tokens=cache or batch * seq_len),
        guided_decoding_config=guiding,
        peft_cache_config=api.PeftCacheConfig(device_cache_percent=0.2, host_cache_size=8 << 30),
    )
    return api.Executor.from_model(model, limits, config)


def words(count: int) -> list[str]:
    """Return a vocabulary: an end token, the printable characters, and words of two to seven of them."""
    generator, characters = np.random.default_rng(2), [chr(code) for code in range(32, 127)]
    found = dict.fromkeys(["<end>", *characters])
    while len(found) < count:
        letters = generator.integers(0, len(characters), int(generator.integers(2, 8)))
        # Half of them are of letters alone, as in most vocabularies.
        found["".join(characters[65 + each % 26 if len(found) % 2 else each] for each in letters)] = None
    return list(found)


def requests(
    count: int, vocabulary: int, *, length: int = CONTEXT - NEW // 2, new: int = NEW, adapters: int = 0, **options: Any
) -> list[api.Request]:
    """Return requests with other prompts and, of `adapters`, other adapters."""
    prompts = np.random.default_rng(0).integers(0, vocabulary, (count, length)).tolist()
    own = [{"lora_config": api.LoraConfig(1 + number % adapters)} if adapters else {} for number in range(count)]
    return [api.Request(prompt, new, **options, **each) for prompt, each in zip(prompts, own, strict=True)]


def run(executor: api.Executor, batch: list[api.Request]) -> None:
    """Run requests to their end."""
    left = set(executor.enqueue_requests(batch))
    while left:
        for response in executor.await_responses(timeout=60.0):
            assert isinstance(response, api.Response)
            assert not response.has_error(), response.error_msg
            left -= {response.request_id} if response.result.is_final else set()


def decode(name: str, model: Any, executor: api.Executor, streams: int, kind: str = "", **options: Any) -> None:
    """Tokens per second of the steps in which all streams decode."""
    run(executor, requests(streams, model.vocab_size, new=8, **options))
    executor.get_latest_iteration_stats()
    run(executor, requests(streams, model.vocab_size, **options))
    steps = [
        record.iter_latency_ms
        for record in executor.get_latest_iteration_stats()
        if (batch := record.inflight_batching_stats)
        and batch.num_gen_requests == streams
        and not batch.num_context_requests
    ]
    figure(f"{name}, {streams} streams{kind}: tokens/s", round(streams / statistics.fmean(steps[3:-1]) * 1000))


def guided(name: str, model: Any, streams_of: list[int]) -> None:
    """`decode` without and with a guide, in turn."""
    schema = api.GuidedDecodingParams(api.GuidedDecodingParams.GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
    with start(model, batch=max(streams_of), guides=True) as executor:
        for streams, kind in itertools.product(streams_of, ("free", "JSON", "free again", "JSON again")):
            guide = schema if kind.startswith("JSON") else None
            decode(name, model, executor, streams, f", {kind}", guided_decoding_params=guide)
        memory(f"{name}, guided", model, max(streams_of) * SEQ_LEN)


def adapted(name: str, streams_of: list[int]) -> None:
    """`decode` without adapters and with ADAPTERS of RANK on all matrices, in turn."""
    model = random_model(name, batch=max(streams_of), seq_len=SEQ_LEN, rank=RANK)
    assert model.lora is not None
    modules = model.lora.modules
    rows = [(module.id, layer, RANK) for layer in range(model.lora.layers) for module in modules]
    weights = np.zeros((len(rows), max(module.numbers(RANK) for module in modules)), np.float16)
    weights[:] = np.random.default_rng(4).standard_normal(weights.shape[1], np.float32) / 300
    with start(model, batch=max(streams_of)) as executor:
        for task in range(1, ADAPTERS + 1):
            weights[:, 0] = task / 1000
            sent = api.LoraConfig(task, weights, np.array(rows, np.int32))
            run(executor, requests(1, model.vocab_size, new=2, lora_config=sent))
        for streams, kind in itertools.product(streams_of, ("no", ADAPTERS, "again no", f"again {ADAPTERS}")):
            count = 0 if str(kind).endswith("no") else ADAPTERS
            decode(name, model, executor, streams, f", {kind} adapters of rank {RANK}", adapters=count)
        memory(f"{name}, adapters", model, max(streams_of) * SEQ_LEN)


class _Drafting(api.ExecutorConfig):
    ngram_max_draft_len = 11


def drafted(name: str, streams_of: list[int]) -> None:
    """Tokens per second of answers with and without drafts from n-grams, in turn, of which the second half repeats.

    The next token is a function of the last: it goes round in cycles of half an answer, or much longer ones.
    """
    new, batch = 256, max(32, *streams_of)
    model = random_model(name, batch=batch, seq_len=SEQ_LEN)
    decoder: Any = model.decoder
    for layer in decoder._layers:
        for matrix in (layer.dense.matrix, layer.mlp._proj.matrix):
            matrix.weight.zero_()
    ids = torch.arange(model.vocab_size, device="cuda")
    for kind, cycle in (("half repeated", new // 2), ("new", 64 * new)):
        following = torch.where((ids + 1) % cycle == 0, ids + 1 - cycle, ids + 1).clamp(max=model.vocab_size - 1)
        decoder._head.matrix.weight[following] = decoder._tokens.weight
        for streams in streams_of:
            rates: dict[str, list[float]] = defaultdict(list)
            for made in (api.ExecutorConfig, _Drafting) * 2:
                with start(model, batch=batch, cache=max(streams_of) * SEQ_LEN, made=made) as executor:
                    run(executor, requests(streams, model.vocab_size, new=8))
                    executor.get_latest_iteration_stats()
                    run(executor, requests(streams, model.vocab_size, new=new))
                    records = executor.get_latest_iteration_stats()
                batches = [(each.iter_latency_ms, each.inflight_batching_stats) for each in records]
                spent = sum(ms for ms, batch in batches if batch and not batch.num_context_requests) / 1000
                rates[made.__name__].append(streams * (new - 1) / spent)
                print(
                    f"{kind}, {streams}, {made.__name__}: {rates[made.__name__][-1]:.0f}, {len(records)} steps",
                    flush=True,
                )
            plain, drafts = (statistics.fmean(rates[each]) for each in ("ExecutorConfig", "_Drafting"))
            figure(f"{name}, {streams} streams, {kind} text: with drafts ÷ without", round(drafts / plain, 3))
    print(
        "ms of steps without and with drafts:",
        *([round(1000 * each, 2) for each in costs[:12]] for costs in (model.plain_costs, model.step_costs)),
        flush=True,
    )


def replay(name: str, model: Any, lengths: list[int]) -> float:
    """Milliseconds of a captured step alone, which is the bound of `decode`; its rows have these contexts."""
    graphs = model._graphs
    size = next(size for size in sorted(graphs._captured[False]) if size >= len(lengths))
    graph = graphs._captured[False][size]
    contexts = torch.tensor([*lengths, *[1] * (size - len(lengths))], dtype=torch.int32, device="cuda")
    blocks = -(-contexts // model.tokens_per_block)
    with torch.inference_mode():
        words = graphs._packed[: size * STEP_WORDS].view(size, STEP_WORDS)
        words.zero_()
        words[:, LENGTH] = contexts
        words[:, POSITION] = contexts - 1
        words[:, FIRST_BLOCK] = blocks.cumsum(0) - blocks
        used = int(blocks.sum())
        graphs._packed[size * STEP_WORDS : size * STEP_WORDS + used] = torch.arange(used, device="cuda")
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 20)
    milliseconds = statistics.median(times)
    figure(f"{name}, captured step of {size} rows: ms", round(milliseconds, 3))
    return milliseconds


def ragged(name: str) -> None:
    """A step of many short contexts and a long one ÷ the time in which its bytes could be copied."""
    lengths = [512] * 31 + [131_072]
    held, longest = sum(lengths) + 16, max(lengths) + 32
    model = random_model(name, batch=len(lengths), seq_len=longest)
    sizes, item = HF_SIZES[name], 2
    hidden, kv = sizes["hidden_size"], sizes["num_key_value_heads"] / sizes["num_attention_heads"]
    layer = hidden * (2 * hidden * (1 + kv) + 3 * sizes["intermediate_size"])
    matrices = sizes["num_hidden_layers"] * layer + hidden * sizes["vocab_size"]
    with start(model, batch=len(lengths), seq_len=longest, cache=held):
        spent = replay(f"{name}, 31 contexts of 512 and one of 131,072", model, lengths)
        least = item * matrices + sum(lengths) * model.bytes_per_block / model.tokens_per_block
        memory(f"{name}, ragged", model, held)
        rate = copied()
        what = f"{name}, ragged step: copy of its bytes at {rate / 1e12:.2f} TB/s ÷ step"
        figure(what, round(least / rate * 1e3 / spent, 2))


def copied() -> float:
    """Return the bytes per second that a copy on the GPU reads and writes."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target, times = torch.empty_like(source), []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return 2 * len(source) / min(times)


def memory(name: str, model: Any, tokens: int) -> None:
    """Memory of the GPU in use ÷ what is planned: the sum of context, weights, largest step, keys and values."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    parts = {
        "context": RESERVE,
        "weights": model.weight_bytes,
        "step": model._step_bytes,
        "keys and values": (-(-tokens // model.tokens_per_block) + 1) * model.bytes_per_block,
    }
    print(
        f"{name}: GiB in use {(total - free) / 2**30:.2f}; planned",
        {key: round(each / 2**30, 2) for key, each in parts.items()},
    )
    figure(f"{name}: memory in use ÷ planned", round((total - free) / sum(parts.values()), 3))


def step_of(model: Any, parts: list[tuple[int, int]]) -> StepInputs:
    """Return a step of sequences with so many tokens before, and new ones; the last token of each is needed."""
    past, new = (np.array(each, np.int32) for each in zip(*parts, strict=True))
    begins = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    blocks = -(-(past + new) // model.tokens_per_block)
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(0, model.vocab_size, begins[-1]),
        positions=np.concatenate([before + np.arange(count) for before, count in parts]),
        past_lens=past,
        subsequence_begins=begins,
        block_indices=np.arange(blocks.sum(), dtype=np.int32),
        block_indices_begins=np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32),
        max_context_len=int((past + new).max()),
        rows=begins[1:] - 1,
    )


def stepped(model: Any, parts: list[tuple[int, int]]) -> float:
    """Milliseconds of a step from its start until its greedy tokens are on the host."""
    step, count = step_of(model, parts), len(parts)
    greedy = SamplingParameters()
    processor = LogitsProcessor(greedy, np.zeros(0, np.int64), vocab_size=model.vocab_size, end_id=-1)
    row, numbers = SamplingRow(greedy, processor, []), list(range(count))
    times = []
    for number in range(8):
        begin = time.perf_counter()
        model.start(Draws(numbers, [row] * count, numbers, [number] * count, [number == 0] * count), step).result()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[2:])


def beside(name: str, *, layers: int, context: int) -> None:
    """A step of 512 prompt tokens and 63 streams with long contexts, and both alone."""
    prompt, streams = [(0, 512)], [(context, 1)] * 63
    held = 63 * (context + 16) + 512
    model = random_model(name, batch=64, seq_len=context + 32, layers=layers)
    with start(model, batch=64, seq_len=context + 32, cache=held):
        spent = [stepped(model, parts) for parts in (prompt, streams, [*prompt, *streams])]
        what = f"{name} with {layers} layers, 512 prompt tokens, 63 streams at {context}, both"
        print(f"{what}: {', '.join(f'{each:.2f}' for each in spent)} ms", flush=True)
        figure(f"{what}: ms above the sum", round(spent[2] - spent[0] - spent[1], 2))
        memory(what, model, held)


def first(name: str, *, streams: int, length: int, cache: int) -> None:
    """Seconds until the first token of many prompts that come at once, in a KV cache of `cache` tokens."""
    model = random_model(name, batch=streams, seq_len=SEQ_LEN)
    with start(model, batch=streams, cache=cache) as executor:
        run(executor, requests(2, model.vocab_size, length=length, new=8))
        batch, times = requests(streams, model.vocab_size, length=length, new=32, streaming=True), dict[int, float]()
        begin = time.perf_counter()
        left = set(executor.enqueue_requests(batch))
        while left:
            for response in executor.await_responses(timeout=60.0):
                assert isinstance(response, api.Response)
                assert not response.has_error(), response.error_msg
                times.setdefault(response.request_id, time.perf_counter() - begin)
                left -= {response.request_id} if response.result.is_final else set()
        whole = time.perf_counter() - begin
        what = f"{name}, {streams} prompts of {length}"
        figure(f"{what}: first token p50, s", round(statistics.median(times.values()), 2))
        figure(f"{what}: all answers, s", round(whole, 2))
        memory(what, model, cache)


def prefill(name: str, sizes: dict[str, Any], model: Any, tokens: int, sequences: int) -> None:
    """TFLOP/s of a step of whole prompts: matrices and causal attention, without the head."""
    each = tokens // sequences
    step = step_of(model, [(0, each)] * sequences)
    inputs = model.inputs(step)
    times = []
    with torch.inference_mode():
        for _ in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.compute(inputs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    hidden, heads, kv_heads = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    matrices = hidden * (2 * hidden + 2 * hidden * kv_heads // heads + 3 * sizes["intermediate_size"])
    operations = sizes["num_hidden_layers"] * (2 * matrices * tokens + 2 * each * tokens * hidden)
    seconds = statistics.median(times[2:])
    rate = operations / seconds / 1e12
    figure(f"{name}, prompts of {tokens} tokens in {sequences}: tokens/s", round(tokens / seconds))
    figure(f"{name}, prompts of {tokens} tokens in {sequences}: TFLOP/s", round(rate, 1))


def idle(name: str, model: Any, executor: api.Executor, streams: int, traces: Path | None) -> None:
    """Part of the time in which the GPU runs no kernel, in steady decoding; the trace is kept in `traces`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # the first one takes seconds to start
        torch.zeros(1, device="cuda")
    thread = threading.Thread(target=run, args=(executor, requests(streams, model.vocab_size, new=1000)))
    thread.start()
    time.sleep(1.5)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        time.sleep(0.15)
    thread.join()
    if traces:
        traces.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(traces / f"{name}-{streams}.json.gz"))
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    assert spans, "the profiler saw no kernels"
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    share = 1 - busy / (reached - spans[0][0])
    figure(f"{name}, {streams} streams: GPU idle, percent of {len(spans)} kernels' time", round(100 * share, 1))


def mixed(name: str, model: Any, *, rate: float, seconds: float, tokens: int) -> None:
    """Time between tokens of all streams while prompts arrive as a Poisson process."""
    generator = np.random.default_rng(1)
    times: dict[int, list[float]] = defaultdict(list)
    left: set[int] = set()
    with start(model, batch=64, tokens=tokens) as executor:
        run(executor, requests(2, model.vocab_size, length=1000, new=8))
        begin, arrival = time.perf_counter(), 0.0
        while left or arrival < seconds:
            while arrival < seconds and time.perf_counter() - begin >= arrival:
                length = int(generator.integers(64, 2049))
                (request,) = requests(1, model.vocab_size, length=length, new=128, streaming=True)
                left.add(executor.enqueue_request(request))
                arrival += generator.exponential(1 / rate)
            for response in executor.await_responses(timeout=0.002):
                assert isinstance(response, api.Response)
                assert not response.has_error(), response.error_msg
                times[response.request_id].append(time.perf_counter())
                left -= {response.request_id} if response.result.is_final else set()
        records = executor.get_latest_iteration_stats()
    gaps = np.concatenate([np.diff(each) for each in times.values()]) * 1000
    batches = [record.inflight_batching_stats for record in records]
    share = sum(1 for batch in batches if batch and batch.num_context_requests) / len(records)
    what = f"{name}, {rate:g} prompts/s of 64 – 2,048, {tokens} tokens per step"
    figure(f"{what}: median between tokens, ms", round(float(np.median(gaps)), 2))
    figure(f"{what}: p99 between tokens ÷ median", round(float(np.percentile(gaps, 99) / np.median(gaps)), 2))
    figure(f"{what}: percent of steps with prompts", round(100 * share))


def peer(name: str) -> None:
    """Transformers on the same machine: static cache with torch.compile, and continuous batching with CUDA graphs."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    config = LlamaConfig(**{key: value for key, value in HF_SIZES[name].items() if key != "model_type"})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (1, CONTEXT), device="cuda")
    new = 96

    def seconds(function: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    with torch.inference_mode():
        model(ids)
        prompt = seconds(lambda: model(ids))
    settings = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
    static = GenerationConfig(**settings, eos_token_id=-1, pad_token_id=0)
    for _ in range(2):
        model.generate(ids, generation_config=static)  # compiles
    whole = seconds(lambda: model.generate(ids, generation_config=static))
    figure(f"transformers {name}, static cache and compile, 1 stream: tokens/s", round((new - 1) / (whole - prompt), 1))
    sizes = {"use_cuda_graph": True, "num_blocks": 256, "max_batch_tokens": 1024}
    prompts = torch.randint(0, config.vocab_size, (64, CONTEXT)).tolist()

    def batch(count: int) -> float:
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        try:
            from transformers.generation.configuration_utils import ContinuousBatchingConfig

            extra = {"continuous_batching_config": ContinuousBatchingConfig(**sizes)}
        except ImportError:
            options, extra = options | sizes, {}
        return seconds(lambda: model.generate_batch(prompts, GenerationConfig(**options), progress_bar=False, **extra))

    batch(8)
    less, more = batch(16), batch(64)
    rate = 64 * 48 / (more - less)
    figure(f"transformers {name}, generate_batch with CUDA graphs, 64 streams: tokens/s", round(rate, 1))


def measure(
    size: str, streams_of: list[int], parts: list[str], traces: Path | None, codes: Any, kv_precision: str
) -> None:
    """Measure the parts of one model that run in its executor."""
    begin = time.perf_counter()
    name = " ".join([size, *([codes] if codes else []), *([f"{kv_precision} cache"] if kv_precision else [])])
    model = random_model(size, batch=max(streams_of), seq_len=SEQ_LEN, codes=codes, kv_precision=kv_precision)
    with start(model, batch=max(streams_of)) as executor:
        print(f"{name}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
        if "prefill" in parts:
            prefill(name, HF_SIZES[size], model, 2048, 1)
            prefill(name, HF_SIZES[size], model, 8192, 16)
        for streams in streams_of:
            if "decode" in parts:
                decode(name, model, executor, streams)
            if "replay" in parts:
                replay(name, model, [CONTEXT] * streams)
        for kind, options in SAMPLED.items() if "sampled" in parts else ():
            decode(name, model, executor, 64, f", {kind}", sampling_config=api.SamplingConfig(**options))
        if "idle" in parts:
            for streams in streams_of:
                idle(name, model, executor, streams, traces)
        memory(name, model, max(streams_of) * SEQ_LEN)
    if "guided" in parts:
        guided(name, model, streams_of)
    if "mixed" in parts:
        mixed(name, model, rate=8, seconds=6, tokens=192)
        mixed(name, model, rate=8, seconds=6, tokens=MAX_NUM_TOKENS)


def whole(part: str, name: str, streams_of: list[int]) -> None:
    """Measure a part that makes a model of its own."""
    if part == "drafts":
        with torch.inference_mode():
            drafted(name, streams_of)
    elif part == "adapters":
        adapted(name, streams_of)
    elif part == "ragged":
        ragged(name)
    elif part == "beside":
        beside(name, layers=24, context=16_384)
    else:
        first(name, streams=512, length=2000, cache=360_000)


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", choices=list(HF_SIZES), default=["8B", "1.1B"])
    parser.add_argument("--memory", type=float, help="GiB that PyTorch may take of the GPU, as on a smaller one")
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--codes", nargs="*", choices=["none", *get_args(Codes)], default=["none"])
    parser.add_argument("--kv-precision", choices=["fp8"], default="", help="of the parts without models of their own")
    parser.add_argument("--traces", type=Path, help="where the part idle keeps the profiler's traces")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if options.memory:
        torch.cuda.set_per_process_memory_fraction(options.memory * 2**30 / torch.cuda.mem_get_info()[1])
    for name in options.models:
        for codes in options.codes if set(options.parts) - WHOLE else ():
            kept = None if codes == "none" else codes
            measure(name, options.streams, options.parts, options.traces, kept, options.kv_precision)
            figure(f"{name} {codes}: GiB that PyTorch took", round(torch.cuda.max_memory_reserved() / 2**30, 1))
            torch.cuda.reset_peak_memory_stats()
            gc.collect()
            torch.cuda.empty_cache()
        for part in options.parts:
            if part in WHOLE - {"peer"}:
                whole(part, name, options.streams)
                gc.collect()
                torch.cuda.empty_cache()
    for name in options.models if "peer" in options.parts else ():
        peer(name)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
