"""Compare every kernel with the same formula in float64 on the GPU: `python -m tests.gpu.kernels`.

Prints a line for each case and ends with 1 if one is outside its bound. Without a GPU, TRITON_INTERPRET=1 and `--only`
run a few cases on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from trtserve.checkpoint.architectures.base import Activation, Experts
from trtserve.executor.engine.guided import Guide
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import AdapterBatch, AdapterStack, LoraAdapter
from trtserve.executor.engine.model import Draws
from trtserve.executor.engine.sampling import SamplingParameters, SamplingRow, choose_tokens
from trtserve.executor.engine.shapes import LoraModule, LoraShape
from trtserve.executor.torch import kernels
from trtserve.executor.torch.adapters import Adapters, AdapterStore, spans_of
from trtserve.executor.torch.draw_words import DrawWriter
from trtserve.executor.torch.operations import ExpertWeights, HeadNorms, RotationTables, Scores
from trtserve.executor.torch.packed import FP8, Fp8Codes, join_packed, quantize
from trtserve.executor.torch.step_kernels import KernelSampler

Tensor = Any
PAGE = 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 3e-6}
"""Largest ‖result − reference‖ / ‖reference‖."""


def random(*shape: int, dtype: Any = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def error(result: Tensor, reference: Tensor) -> float:
    """Return the relative error; NaN counts as infinite."""
    difference = (result.double() - reference.double()).norm() / reference.double().norm()
    return float(difference) if torch.isfinite(difference) else float("inf")


# References in float64


def attended(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """Attention of the last len(query) tokens [t, H, D] over keys and values [n, KV, D]."""
    new, heads, _ = query.shape
    total, kv_heads, _ = keys.shape
    repeated = [each.double().repeat_interleave(heads // kv_heads, 1) * scores.cache_scale for each in (keys, values)]
    products = torch.einsum("thd,nhd->htn", query.double(), repeated[0]) * scores.scale
    if scores.soft_cap is not None:
        products = torch.tanh(products / scores.soft_cap) * scores.soft_cap
    place = torch.arange(total, device=DEVICE)
    if scores.slopes is not None:
        products += scores.slopes.double().view(-1, 1, 1) * place
    mine = place[total - new :, None]
    hidden = place > mine
    if scores.window is not None:
        hidden |= place <= mine - (mine % scores.window + 1 if scores.chunked else scores.window)
    products = products.masked_fill(hidden, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.double().view(-1, 1, 1).expand(-1, new, 1)
        products = torch.cat([products, sinks], -1)
    return torch.einsum("htn,nhd->thd", products.softmax(-1)[..., :total], repeated[1])


def cache_of(
    lengths: list[int], kv_heads: int, size: int, dtype: Any, turned: int = 0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a cache with random contents and the block tables of sequences of these lengths, blocks shuffled.

    With a scale it is one of FP8 codes.
    """
    counts = [-(-length // PAGE) for length in lengths]
    cache = random(sum(counts) + 1, 1 if turned else 2, PAGE, kv_heads, size, dtype=dtype)
    cache[-1] = torch.nan
    tables = torch.full((len(lengths), max(counts) + 1), sum(counts), dtype=torch.int32, device=DEVICE)
    blocks = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = blocks[first : first + count]
        first += count
    return cache if scale == 1.0 else (cache.float() / scale).to(FP8), tables


def sequence(cache: Tensor, table: Tensor, length: int, turned: int) -> tuple[Tensor, Tensor]:
    blocks = cache[table[: -(-length // PAGE)].long()]
    return blocks[:, 0].flatten(0, 1)[:length], blocks[:, -1].flatten(0, 1)[:length, :, turned:]


SHAPES = [(32, 8, 128), (32, 4, 64), (8, 8, 80), (12, 12, 96), (71, 1, 64), (8, 4, 256), (4, 4, 32), (16, 4, 512)]
LATENT = [(128, 1, 576), (16, 1, 576), (20, 1, 576), (6, 1, 48)]
"""Heads of latent attention: all but the first 64 numbers of a key (16 of 48) are the value."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "chunks": {"window": 100, "chunked": True},
    "alibi": {"slopes": True},
    "cap": {"soft_cap": 5.0},
    "sinks": {"window": 100, "sinks": True},
    "all": {"window": 37, "soft_cap": 20.0, "slopes": True, "sinks": True},
}


def cases() -> Iterator[tuple[str, tuple[int, int, int], Any, Scores]]:
    """Every shape and kind in bfloat16, the first shape of each kind in the other types."""
    for (heads, kv_heads, size), (kind, values) in itertools.product(SHAPES, KINDS.items()):
        for dtype, narrow in itertools.product(
            BOUNDS if (size == 128 or kind == "plain") else (torch.bfloat16,), (False, True)
        ):
            chosen = dict(values)
            if chosen.get("slopes"):
                chosen["slopes"] = torch.rand(heads, device=DEVICE) * 0.1
            if chosen.get("sinks"):
                chosen["sinks"] = torch.randn(heads, device=DEVICE)
            chosen["cache_scale"] = 0.02 if narrow else 1.0
            name = f"{kind} {heads}/{kv_heads}x{size} {str(dtype)[6:]}{' FP8 cache' * narrow}"
            yield name, (heads, kv_heads, size), dtype, Scores(scale=size**-0.5, **chosen)
    for (heads, kv_heads, size), dtype in itertools.product(LATENT, BOUNDS):
        scores = Scores(scale=192**-0.5, turned=64 if size > 64 else 16)
        yield f"latent {heads}x{size} {str(dtype)[6:]}", (heads, kv_heads, size), dtype, scores


def decode(shape: tuple[int, int, int], dtype: Any, scores: Scores, lengths: list[int]) -> float:
    heads, kv_heads, size = shape
    cache, tables = cache_of(lengths, kv_heads, size, dtype, scores.turned, scores.cache_scale)
    query = random(len(lengths), heads, size, dtype=dtype)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    result = kernels.decode_attention(query, cache, tables, counts, scores)
    wanted = [
        attended(query[row : row + 1], *sequence(cache, tables[row], length, scores.turned), scores)
        for row, length in enumerate(lengths)
    ]
    return error(result, torch.cat(wanted))


def decode_rounded(dtype: Any, lengths: list[int]) -> float:
    """The FP8 codes of attention; numbers at the middle between two may become either."""
    scores, scale = Scores(scale=128**-0.5), torch.tensor([0.01], device=DEVICE)
    cache, tables = cache_of(lengths, 8, 128, dtype)
    query = random(len(lengths), 32, 128, dtype=dtype)
    following = Fp8Codes(codes=random(1, 4096).to(FP8), scale=scale, input_scale=scale, dtype=dtype)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    result = kernels.decode_attention(query, cache, tables, counts, scores, rounding=following)
    wanted = torch.cat(
        [
            attended(query[row : row + 1], *sequence(cache, tables[row], each, 0), scores)
            for row, each in enumerate(lengths)
        ]
    )
    return error(result, (wanted / 0.01).clamp(-448, 448).float().to(FP8)) / 3


def prompt(shape: tuple[int, int, int], dtype: Any, scores: Scores, parts: list[tuple[int, int]]) -> float:
    heads, kv_heads, size = shape
    lengths = [past + new for past, new in parts]
    cache, tables = cache_of(lengths, kv_heads, size, dtype, scores.turned, scores.cache_scale)
    begins = np.cumsum([0, *(new for _, new in parts)])
    query = random(int(begins[-1]), heads, size, dtype=dtype)
    result = kernels.prompt_attention(
        query,
        cache,
        tables,
        torch.tensor([past for past, _ in parts], dtype=torch.int32, device=DEVICE),
        torch.tensor(begins, dtype=torch.int32, device=DEVICE),
        scores,
        most_new=max(new for _, new in parts),
    )
    wanted = [
        attended(query[begins[row] : begins[row + 1]], *sequence(cache, tables[row], length, scores.turned), scores)
        for row, length in enumerate(lengths)
    ]
    return error(result, torch.cat(wanted))


def rotate(
    dtype: Any,
    rotated: int,
    *,
    interleaved: bool,
    normed: bool,
    size: int = 96,
    parts: int = 2,
    scale: float | None = None,
) -> float:
    """Keys and queries are compared; values must be copied exactly, and other slots stay. With a scale, FP8 codes."""
    tokens, heads, kv_heads = 37, 8, 2
    qkv = random(tokens, (heads + parts * kv_heads) * size, dtype=dtype)
    positions = torch.randint(0, 1000, (tokens,), device=DEVICE)
    angles = torch.outer(
        torch.arange(1000, device=DEVICE).double(), 10000 ** -(torch.arange(rotated // 2, device=DEVICE) / 50)
    )
    table = torch.cat([angles.cos(), angles.sin()], -1).float()
    cache = torch.full((9, parts, PAGE, kv_heads, size), 7.0, device=DEVICE, dtype=FP8 if scale else dtype)
    slots = torch.randperm(9 * PAGE, device=DEVICE)[:tokens]
    norms = HeadNorms(query=random(size, dtype=dtype), key=random(size, dtype=dtype), epsilon=1e-6) if normed else None
    rotation = RotationTables(cos_sin=table, interleaved=interleaved) if rotated else None
    query = kernels.rotate_and_store(
        qkv, positions, cache, slots, heads=heads, rotation=rotation, norms=norms, cache_scale=scale or 1.0
    )
    wanted = [part.double() for part in qkv.view(tokens, -1, size).split([heads, *[kv_heads] * parts], 1)]
    if norms is not None:
        for number, weight in enumerate((norms.query, norms.key)):
            states = wanted[number]
            scaled = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norms.epsilon) * weight.double()
            wanted[number] = scaled.to(dtype).double()
    if rotated:
        cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)
        for number in range(2):
            turned, rest = wanted[number].tensor_split([rotated], -1)
            first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
            pair = first * cos - second * sin, second * cos + first * sin
            joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
            wanted[number] = torch.cat([joined, rest], -1)
    if scale:
        stored = [(each.to(dtype).float() * (1 / scale)).clamp(-448, 448).to(FP8).double() for each in wanted[1:]]
        wanted[1:], cache = stored, cache.float()
    keys, values = (cache[slots // PAGE, part, slots % PAGE] for part in (0, -1))
    untouched = torch.ones(9 * PAGE, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    exact = (parts == 1 or bool((values.double() == wanted[2]).all())) and bool(
        (cache.transpose(1, 2).flatten(0, 1)[untouched] == 7).all()
    )
    return max(error(query, wanted[0]), error(keys, wanted[1])) if exact else float("inf")


def norm(dtype: Any, columns: int) -> float:
    x, residual, weight = (random(5, columns, dtype=dtype) for _ in range(3))
    total = (x.double() + residual.double()).to(dtype).double()
    scaled = [
        each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-5) * weight[0].double()
        for each in (total, x.double())
    ]
    alone = kernels.rms_norm(x, weight[0].contiguous(), 1e-5)
    both, sum_ = kernels.add_rms_norm(x, residual.clone(), weight[0].contiguous(), 1e-5)
    return max(error(both, scaled[0]), error(sum_, total), error(alone, scaled[1]))


def gate(dtype: Any, activation: Any, *, factor_first: bool) -> float:
    joined = random(7, 2 * 1100, dtype=dtype)
    first, second = joined.double().chunk(2, -1)
    active, factor = (second, first) if factor_first else (first, second)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    result = kernels.gated(joined, activation, factor_first=factor_first)
    return error(result, functions[activation](active).to(dtype).double() * factor)


def product(dtype: Any, columns: int, outputs: int, rows: int) -> float:
    """Products of a few rows, alone and after a norm, with and without a gate."""
    x, residual, norm = (random(rows, columns, dtype=dtype) for _ in range(3))
    # Outputs near 1: products of two of them would exceed float16's range else.
    weight = random(2 * outputs, columns, dtype=dtype) / columns**0.5
    bias = random(2 * outputs, dtype=dtype)
    errors = [error(kernels.linear(x, weight), x.double() @ weight.double().T)]
    total = (x.double() + residual.double()).to(dtype).double()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * norm[0].double()
    wanted = normed @ weight.double().T + bias.double()
    found, sum_ = kernels.norm_linear(x, residual.clone(), norm[0], 1e-5, weight, bias)
    errors += [error(found, wanted), error(sum_, total)]
    first, second = wanted.chunk(2, -1)
    found, _ = kernels.norm_linear(x, residual.clone(), norm[0], 1e-5, weight, bias, "silu")
    errors.append(error(found, torch.nn.functional.silu(first) * second))
    found, _ = kernels.norm_linear(x, residual.clone(), norm[0], 1e-5, weight, bias, "gelu", factor_first=True)
    errors.append(error(found, first * torch.nn.functional.gelu(second)))
    return max(errors)


def routes(tokens: int, count: int) -> float:
    """Return the part of the experts that differ from those of float64, or the error of their weights."""
    kinds = (
        Experts(count=count, chosen=min(8, count), renormalized=True),
        Experts(count=count, chosen=2, renormalized=False, scores="sigmoid", scale=2.5),
    )
    errors = []
    for kind, correction in zip(kinds, (None, torch.rand(count, device=DEVICE)), strict=True):
        logits = random(tokens, count)
        chosen, shares = kernels.route(logits, correction, kind)
        wide = logits.double()
        scores = wide.softmax(-1) if kind.scores == "softmax" else wide.sigmoid()
        wanted = (scores if correction is None else scores + correction.double()).topk(kind.chosen).indices
        weights = scores.gather(-1, wanted)
        weights = (weights / weights.sum(-1, keepdim=True) if kind.renormalized else weights) * kind.scale
        errors += [float((chosen != wanted).float().mean()), error(shares, weights)]
    return max(errors)


def experts(dtype: Any, tokens: int, count: int = 8, *, gated: bool = True) -> float:
    hidden, inside, chosen_count = 192, 224, 2
    x = random(tokens, hidden, dtype=dtype)
    outer = random(count, (1 + gated) * inside, hidden, dtype=dtype)
    inner = random(count, hidden, inside, dtype=dtype)
    shares, chosen = torch.rand(tokens, count + 2, device=DEVICE).topk(chosen_count)  # the last two: another rank's
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
    for token, place in itertools.product(range(tokens), range(chosen_count)):
        expert = int(chosen[token, place])
        if expert < count:
            states = outer[expert].double() @ x[token].double()
            if gated:
                factor, active = states.chunk(2)
                states = torch.nn.functional.silu(active) * factor
            else:
                states = torch.relu(states).square()
            wanted[token] += shares[token, place].double() * (inner[expert].double() @ states)
    activation: Activation = "silu" if gated else "relu2"
    return error(kernels.expert_mlp(x, ExpertWeights(outer=outer, inner=inner), chosen, shares, activation), wanted)


class WholeMatrices:
    """`EngineWeights` of one rank with matrices of these inputs and outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._piece = SimpleNamespace(first_row=0, rows=outputs, first_column=0, columns=inputs)

    def split(self, name: str) -> str:
        return "replicated"

    def shard(self, name: str) -> Any:
        return SimpleNamespace(pieces=[self._piece])


def adapted(dtype: Any, inputs: int, rank: int, counts: list[int], *, beside: bool) -> float:
    """Adapters of fc and gate; of each adapter a step has `counts` tokens, and some have none."""
    outputs, generator = 1344, np.random.default_rng(0)
    modules = tuple(
        LoraModule(id=number, name=name, linear=name, inputs=inputs, outputs=outputs, width=outputs)
        for number, name in enumerate(("mlp.fc", "mlp.gate"))
    )
    shape, weights = LoraShape(modules=modules, layers=1, max_rank=64), WholeMatrices(inputs, outputs)
    made = [
        [generator.standard_normal((rank, size), np.float32) / size**0.5 for size in (inputs, outputs)]
        for _ in range(2 * len(counts))
    ]
    adapters = tuple(
        LoraAdapter(number, {(0, module): tuple(made[2 * number + module]) for module in (0, 1)}, content=number)
        for number in range(len(counts))
    )
    store = AdapterStore(shape, cast("Any", weights), range(1), most=len(counts), dtype=dtype, device=DEVICE)
    owner = np.repeat([*range(len(counts)), -1], [*counts, 5])
    spans = spans_of(store.places(AdapterBatch(AdapterStack(adapters, shape), owner)))
    x, product = random(len(owner), inputs, dtype=dtype), random(len(owner), 2 * outputs, dtype=dtype)
    wanted = product.double()
    for number, module in itertools.product(range(len(counts)), (0, 1)):
        a, b = (each.double() for each in store.held[number][0, module])
        mine = torch.from_numpy(owner == number).to(DEVICE)
        wanted[mine, module * outputs : (module + 1) * outputs] += x[mine].double() @ a.T @ b
    padded = torch.zeros((len(spans) + 3, 3), dtype=torch.int32, device=DEVICE)
    padded[: len(spans)] = torch.from_numpy(spans)
    kernels.begin_adapters(x, Adapters(store, padded, beside=beside), 0, 0, 2)(product)
    return error(product, wanted)


class HalfGuide:
    """Allows half of the tokens, others after every token."""

    failure = None

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary, self._state = vocabulary, seed

    def allowed(self) -> Any:
        return np.random.default_rng(self._state).integers(0, 2**32, -(-self._vocabulary // 32), np.uint32)

    def mask(self, row: Any) -> None:
        Guide.mask(self, row)  # type: ignore[arg-type]

    def accept(self, token: int) -> None:
        self._state += token + 1


def sampling(vocabulary: int) -> float:
    """Return the part of rows with another token than the host's sampler chooses, or log-probs that differ."""
    generator = np.random.default_rng(0)
    choices: list[dict[str, Any]] = [
        {},
        {"greedy": False, "top_k": 40, "temperature": 0.8},
        {"greedy": False, "top_k": 1000, "top_p": 0.9},
        {"greedy": False, "top_p": 0.95, "temperature": 1.7},
        {"greedy": False, "top_p": 1.0},
        {"greedy": False, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"greedy": False, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 9, "frequency_penalty": 0.3},
    ]
    rows, wrong, count = [], 0, 64
    sampler, writer = KernelSampler(count, vocabulary, DEVICE), DrawWriter(count)
    table = torch.zeros((count, vocabulary), dtype=torch.int16, device=DEVICE)
    for number in range(count):
        parameters = SamplingParameters(seed=number * 7919 + 2**40, **choices[number % len(choices)])
        prompt_tokens = generator.integers(0, vocabulary, 50)
        bad_words = [[int(generator.integers(vocabulary))] for _ in range(3)] if number % 3 == 0 else []
        guide: Any = HalfGuide(vocabulary, number) if number % 5 == 0 else None
        processor = LogitsProcessor(
            parameters, prompt_tokens, vocab_size=vocabulary, end_id=2, bad_words=bad_words, guide=guide
        )
        rows.append(SamplingRow(parameters, processor, [], log_prob=number % 2 == 0))
    tokens = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    log_probs = torch.zeros((count, 2), device=DEVICE)
    together = np.ones(count, bool)
    for step in range(12):
        logits = (generator.standard_normal((count, vocabulary)) * generator.choice([1, 3, 9])).astype(np.float32)
        if step % 4 == 3:
            logits = np.round(logits)  # thousands of equal numbers
        begins = step % 3 == 0  # what has occurred comes from the host; between, the device counts itself
        together |= begins
        draws = Draws(list(range(count)), rows, list(range(count)), [step] * count, [begins] * count)
        arrays = writer.write(draws)
        for entry, ids, numbers in arrays.new_rows:
            table[entry].zero_()
            table[entry, torch.from_numpy(ids).to(DEVICE)] = torch.from_numpy(numbers).to(DEVICE)
        allowed = np.stack([row.processor.guide.allowed() for row in rows if row.processor.guide])
        values, words, bits = (
            torch.from_numpy(each).to(DEVICE) for each in (logits, arrays.words, allowed.view(np.int32))
        )
        sampler.choose(values, words, table, bits, tokens, log_probs)
        found, numbers = tokens.tolist(), log_probs.cpu().numpy()
        for number, (row, choice) in enumerate(zip(rows, choose_tokens(logits, rows), strict=True)):
            same = found[number] == choice.token
            if row.log_prob and same:
                same = np.allclose(numbers[number], (choice.log_prob, choice.full_log_prob), atol=2e-4)
            if together[number] and not same:
                wrong += 1
                print("   ", step, number, choices[number % len(choices)], found[number], choice, numbers[number])
            together[number] &= same
            row.processor.accept(choice.token)
            row.generated.append(choice.token)  # type: ignore[attr-defined]
    return wrong / (12 * count)


def frequencies() -> float:
    """Return chi-square / degrees of freedom of 200,000 seeded samples of one distribution (about 1)."""
    vocabulary, count = 64, 4000
    weights = torch.rand(vocabulary, device=DEVICE).double() + 0.01
    shares = weights / weights.sum()
    sampler, writer = KernelSampler(count, vocabulary, DEVICE), DrawWriter(count)
    table = torch.zeros((1, vocabulary), dtype=torch.int16, device=DEVICE)
    found = torch.zeros(vocabulary, device=DEVICE)
    for step in range(50):
        rows = [
            SamplingRow(
                SamplingParameters(greedy=False, seed=n),
                LogitsProcessor(
                    SamplingParameters(greedy=False, seed=n), np.zeros(0, np.int64), vocab_size=vocabulary, end_id=-1
                ),
                [],
            )
            for n in range(count)
        ]
        draws = Draws(list(range(count)), rows, list(range(count)), [step] * count, [True] * count)
        words = torch.from_numpy(writer.write(draws).words).to(DEVICE)
        nothing = table[:0].int()
        tokens, log_probs = torch.zeros(count, dtype=torch.int32, device=DEVICE), torch.zeros((count, 2), device=DEVICE)
        sampler.choose(shares.log().float().repeat(count, 1), words, table, nothing, tokens, log_probs)
        found += tokens.bincount(minlength=vocabulary)
    expected = shares * 50 * count
    return float(((found - expected) ** 2 / expected).sum() / (vocabulary - 1))


def packed(dtype: Any, bits: Any, columns: int, rows: int) -> float:
    """A product with codes, and one with norm and gate; half of the zero points of int4 are not 8."""
    weight = quantize(random(2 * 301, columns, dtype=dtype) / columns**0.5, bits)
    if bits == 4:
        zeros = torch.randint(0, 17, weight.scales.shape, dtype=torch.uint8, device=DEVICE)
        weight = join_packed([replace(weight, zeros=zeros)])
    x, norm, bias = random(rows, columns, dtype=dtype), random(columns, dtype=dtype), random(602, dtype=dtype)
    wide = weight.floats(torch.float64)
    plain = error(kernels.linear(x, weight, bias), x.double() @ wide.T + bias.double())
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    first, second = (normed @ wide.T + bias.double()).chunk(2, -1)
    found, _ = kernels.norm_linear(x, None, norm, 1e-5, weight, bias, "silu")
    return max(plain, error(found, torch.nn.functional.silu(first) * second))


def fp8(dtype: Any, columns: int, rows: int) -> float:
    """A product with FP8 codes; one with norm, gate and rounding for the next matrix, whose codes must be near."""
    scales = [torch.tensor([value], device=DEVICE) for value in (0.004, 0.02, 0.05)]
    codes = (random(2 * 304, columns) * 20).to(FP8)
    weight = Fp8Codes(codes=codes, scale=scales[0], input_scale=scales[1], dtype=dtype)
    x, norm = random(rows, columns, dtype=dtype), random(columns, dtype=dtype)
    wide = codes.double() * scales[0]

    def exact(values: Tensor, scale: Tensor) -> Tensor:
        return (values / scale).clamp(-448, 448).float().to(FP8).double()

    found = error(kernels.linear(x, weight), (exact(x.double(), scales[1].double()) * scales[1]) @ wide.T)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    joined = (exact(normed, scales[1].double()) * scales[1]) @ wide.T
    first, second = joined.chunk(2, -1)
    gated = torch.nn.functional.silu(first) * second
    product, _ = kernels.norm_linear(x, None, norm, 1e-5, weight, None, "silu")
    following = replace(weight, input_scale=scales[2])
    after, _ = kernels.norm_linear(x, None, norm, 1e-5, weight, None, "silu", rounding=following)
    assert isinstance(product, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    nearest = error(exact(product.double(), scales[2].double()), after)
    # Numbers at the middle between two codes may become either: a part in 300 of them by a part in 16.
    return max(found, error(product, gated) / 2, nearest / 3)


def fp8_by_token(dtype: Any, columns: int, rows: int, *, blocks: bool) -> float:
    """A product with inputs that have scales of their own; one with norm, gate and rounding for the next matrix."""
    outputs = 768
    shape = (outputs // 128, -(-columns // 128)) if blocks else (outputs,)
    scale = torch.rand(shape, device=DEVICE) * 0.004 + 0.002
    weight = Fp8Codes(codes=(random(outputs, columns) * 20).to(FP8), scale=scale, dtype=dtype)
    x, norm = random(rows, columns, dtype=dtype), random(columns, dtype=dtype)
    wide = weight.floats(torch.float64)

    def exact(values: Tensor) -> Tensor:
        """Return the numbers that codes with scales of their own stand for."""
        groups = values.unflatten(1, (-1, 128)) if blocks else values.unsqueeze(1)
        scales = groups.abs().amax(-1, keepdim=True) / 448
        return ((groups / scales).float().to(FP8).double() * scales).flatten(1)

    found = error(kernels.linear(x, weight), exact(x.double()) @ wide.T)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    first, second = (exact(normed) @ wide.T).chunk(2, -1)
    gated = torch.nn.functional.silu(first) * second
    product, _ = kernels.norm_linear(x, None, norm, 1e-5, weight, None, "silu")
    after, _ = kernels.norm_linear(x, None, norm, 1e-5, weight, None, "silu", rounding=weight)
    assert isinstance(product, torch.Tensor)
    nearest = 0.0 if isinstance(after, torch.Tensor) else error(after.floats(), exact(product.double()))
    return max(found, error(product, gated) / 2, nearest / 3)


def matrices(dtype: Any, bound: float) -> Iterator[tuple[str, Callable[[], float], float]]:
    """Cases of matrices of codes."""
    kind = str(dtype)[6:]
    for bits, columns, rows in itertools.product((8, 4), (4096, 11_008, 896, 104), (1, 7, 40, 200, 300)):
        yield f"packed int{bits} {rows}x{columns} {kind}", partial(packed, dtype, bits, columns, rows), 2 * bound
    for lengths in ([512], [1, 5, 16, 17, 777, 100, 300], [512] * 31 + [100_000]):
        yield f"decode fp8 {len(lengths)} rows {kind}", partial(decode_rounded, dtype, lengths), max(bound, 4e-3)
    for columns, rows in itertools.product((4096, 14_336, 96), (1, 8, 200)):
        yield f"fp8 {rows}x{columns} {kind}", partial(fp8, dtype, columns, rows), max(2 * bound, 4e-3)
    for columns, rows, blocks in itertools.product((4096, 14_336, 896), (1, 8, 30, 50, 200), (False, True)):
        case = partial(fp8_by_token, dtype, columns, rows, blocks=blocks)
        yield f"fp8 {'blocks' if blocks else 'rows'} {rows}x{columns} {kind}", case, max(2 * bound, 4e-3)


def mixtures() -> Iterator[tuple[str, Callable[[], float], float]]:
    """Cases of experts and adapters."""
    for dtype, bound in BOUNDS.items():
        kind = str(dtype)[6:]
        for tokens in (1, 9, 150):
            yield f"experts {tokens} {kind}", partial(experts, dtype, tokens), 2 * bound
            yield f"experts without gates {tokens} {kind}", partial(experts, dtype, tokens, gated=False), 2 * bound
        yield f"experts 700 among 128 {kind}", partial(experts, dtype, 700, 128), 2 * bound
        for inputs, rank, counts in ((4096, 16, [4] * 16), (14_336, 64, [1, 300, 16]), (200, 3, [17])):
            for beside in (False, True):
                name = f"adapters{' beside' * beside} {inputs} {rank} {kind}"
                yield name, partial(adapted, dtype, inputs, rank, counts, beside=beside), bound
    for tokens, count in itertools.product((1, 700), (8, 60, 128, 256)):
        yield f"routes {tokens} among {count}", partial(routes, tokens, count), 1e-3


def checks() -> Iterator[tuple[str, Callable[[], float], float]]:
    """All cases: name, error, and its bound."""
    ragged, parts = [1, 5, 16, 17, 777, 100, 300], [(0, 130), (33, 1), (100, 65), (0, 1), (513, 40), (0, 16)]
    for name, shape, dtype, scores in cases():
        yield f"decode {name}", partial(decode, shape, dtype, scores, ragged), BOUNDS[dtype]
        yield f"prompt {name}", partial(prompt, shape, dtype, scores, parts), BOUNDS[dtype]
    usual = (32, 8, 128), torch.bfloat16, Scores(scale=128**-0.5)
    yield "decode one row of 20,000", partial(decode, *usual, [20_000]), 6e-3
    coded = *usual[:2], replace(usual[2], cache_scale=0.02)
    yield "decode one row of 20,000 FP8 cache", partial(decode, *coded, [20_000]), 6e-3
    yield "decode 31 rows of 512 and one of 100,000 FP8 cache", partial(decode, *coded, [512] * 31 + [100_000]), 6e-3
    yield "decode 300 rows FP8 cache", partial(decode, *coded, list(range(1, 601, 2))), 6e-3
    yield "prompt of 3,000 after 1,000 FP8 cache", partial(prompt, *coded, [(1000, 3000)]), 6e-3
    latent = (128, 1, 576), torch.bfloat16, Scores(scale=192**-0.5, turned=64)
    yield "latent decode of one row of 20,000", partial(decode, *latent, [20_000]), 6e-3
    yield "latent decode of 100 rows", partial(decode, *latent, list(range(1, 601, 6))), 6e-3
    yield "latent prompt of 700 after 300", partial(prompt, *latent, [(300, 700)]), 6e-3
    yield "decode 300 rows", partial(decode, *usual, list(range(1, 601, 2))), 6e-3
    yield "decode 31 rows of 512 and one of 100,000", partial(decode, *usual, [512] * 31 + [100_000]), 6e-3
    yield "decode 300 rows and one of 50,000", partial(decode, *usual, [*range(1, 301), 50_000]), 6e-3
    yield "prompt of 3,000 after 1,000", partial(prompt, *usual, [(1000, 3000)]), 6e-3
    for dtype, bound in BOUNDS.items():
        kind = str(dtype)[6:]
        for rotated, interleaved, normed in itertools.product((0, 24, 96), (False, True), (False, True)):
            name = f"rotate {rotated} interleaved={interleaved} norms={normed} {kind}"
            yield name, partial(rotate, dtype, rotated, interleaved=interleaved, normed=normed), bound
            narrow = partial(rotate, dtype, rotated, interleaved=interleaved, normed=normed, scale=0.006)
            yield f"{name} FP8 cache", narrow, max(bound, 4e-3)
        once = partial(rotate, dtype, 64, interleaved=False, normed=False, size=576, parts=1)
        yield f"rotate 64 of 576 {kind}", once, bound
        for columns in (64, 2048, 5120):
            yield f"norm {columns} {kind}", partial(norm, dtype, columns), bound
        for activation, first in itertools.product(("silu", "relu", "gelu", "gelu_tanh"), (False, True)):
            yield f"gated {activation} {first} {kind}", partial(gate, dtype, activation, factor_first=first), bound
        for columns, rows in itertools.product((2048, 5632, 100), (1, 5, 16, 30, 50)):
            yield f"linear {rows}x{columns} {kind}", partial(product, dtype, columns, 301, rows), 2 * bound
        for rows in (8, 32, 64):
            yield f"linear {rows}x4096 to 28672 {kind}", partial(product, dtype, 4096, 14_336, rows), 2 * bound
        yield from matrices(dtype, bound)
    yield from mixtures()
    for vocabulary in (50, 32_000, 128_256):
        yield f"sampling {vocabulary}", partial(sampling, vocabulary), 2e-3
    yield "chi-square / degrees of freedom", frequencies, 1.6


def main() -> int:
    """Run all cases, shared among processes because most of the time goes to the compiler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is None:
        count = min(os.cpu_count() or 1, 14)
        command = [sys.executable, "-m", "tests.gpu.kernels", "--only", options.only, "--share"]
        shares = [subprocess.Popen([*command, str(number), str(count)]) for number in range(count)]
        return max(share.wait() for share in shares)
    torch.manual_seed(0)
    number, count = options.share
    chosen = [case for case in checks() if options.only in case[0]]
    failures = 0
    for name, compute, bound in chosen[number::count]:
        try:
            value = compute()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:  # noqa: BLE001 - the other cases run too
            value = float("inf")
            print(f"FAILED {name}: {type(problem).__name__}: {str(problem)[-1500:]}", flush=True)
        good = value <= bound
        failures += not good
        print(f"{'ok    ' if good else 'WRONG '} {name}: {value:.2e} (bound {bound:.0e})", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
