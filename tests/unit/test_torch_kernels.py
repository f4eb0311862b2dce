"""Kernels in the Triton language, run by its interpreter on the CPU, equal the plain operations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_decoders import DECODERS
from trtserve.checkpoint.architectures.base import ClampedGate, Experts
from trtserve.executor.engine.guided import Guide
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.lora import AdapterBatch, AdapterStack, LoraAdapter
from trtserve.executor.engine.model import Draws
from trtserve.executor.engine.sampling import SamplingParameters, SamplingRow, choose_tokens
from trtserve.executor.engine.shapes import MODULE_IDS, LoraModule, LoraShape

pytestmark = [
    pytest.mark.needs("torch"),
    # The interpreter's own.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow encountered|All-NaN slice encountered):RuntimeWarning"),
]
PAGE = 16
USUAL, OTHER = (8, 2, 32, 0), (6, 6, 48, 0)
"""Heads, key/value heads, numbers of a key, and how many of them a value lacks."""
LATENT, WIDE, WIDE_LATENT = (20, 1, 48, 16), (3, 1, 272, 0), (20, 1, 270, 6)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    import torch

    torch.manual_seed(0)


def _scores(kind: str, heads: int) -> Any:
    import torch

    from trtserve.executor.torch.operations import Scores

    scores = Scores(scale=0.2)
    if kind in ("window", "chunks", "all"):
        scores = replace(scores, window=21, chunked=kind == "chunks")
    if kind in ("alibi", "all"):
        scores = replace(scores, slopes=torch.rand(heads) * 0.1)
    if kind in ("sinks", "all"):
        scores = replace(scores, sinks=torch.randn(heads))
    return replace(scores, soft_cap=5.0) if kind in ("cap", "all") else scores


def _cache(lengths: list[int], kv_heads: int, size: int, parts: int = 2) -> tuple[Any, Any]:
    """Return a cache and the block tables of sequences of these lengths; the blocks are in no order."""
    import torch

    counts = [-(-length // PAGE) for length in lengths]
    tables = torch.full((len(lengths), max(counts) + 1), sum(counts), dtype=torch.int32)
    blocks = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    for row, mine in enumerate(blocks):
        tables[row, : len(mine)] = mine
    cache = torch.randn(sum(counts) + 1, parts, PAGE, kv_heads, size)
    cache[-1] = torch.nan  # nobody's block
    return cache, tables


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *itertools.product(["window", "chunks", "alibi", "cap", "sinks"], [USUAL]),
        *itertools.product(["plain", "all"], [USUAL, OTHER, LATENT, WIDE]),
        ("plain", WIDE_LATENT),
        *itertools.product(["plain, FP8 cache", "all, FP8 cache"], [USUAL, OTHER, WIDE]),
    ],
)
def test_attention(kind: str, shape: tuple[int, int, int, int]) -> None:
    import torch

    from trtserve.executor.torch import kernels, plain_operations

    heads, kv_heads, size, turned = shape
    past, new = [0, 33, 60], [70, 1, 20]
    lengths = [before + more for before, more in zip(past, new, strict=True)]
    cache, tables = _cache(lengths, kv_heads, size, 1 if turned else 2)
    scores, counts = (
        replace(_scores(kind.partition(",")[0], heads), turned=turned),
        torch.tensor(lengths, dtype=torch.int32),
    )
    if "FP8" in kind:
        cache, scores = (cache / 0.3).to(torch.float8_e4m3fn), replace(scores, cache_scale=0.3)
    begins = torch.tensor([0, 70, 71, 91], dtype=torch.int32)
    known = torch.tensor(past, dtype=torch.int32)
    query = torch.randn(91, heads, size)
    prompts = [
        each.prompt_attention(query, cache, tables, known, begins, scores, most_new=70)
        for each in (kernels, plain_operations)
    ]
    torch.testing.assert_close(*prompts, rtol=1e-4, atol=1e-5)
    last = query[begins[1:] - 1].contiguous()
    found = kernels.decode_attention(last, cache, tables, counts, scores)
    torch.testing.assert_close(found, prompts[1][begins[1:] - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_keys_of_long_sequences_are_shared_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long one has more parts than are added up at a time; the last row is padding."""
    import torch

    from trtserve.executor.torch import attention_kernels, plain_operations

    monkeypatch.setattr(attention_kernels, "_multiprocessors", lambda device: 24)
    monkeypatch.setattr(attention_kernels, "_LEAST_KEYS", 64)
    lengths = [3, 2500, 1, 140]
    cache, tables = _cache(lengths, 2, 32)
    query, scores = torch.randn(5, 8, 32), _scores(kind, 8)
    if scores.window:
        scores = replace(scores, window=2400)
    expected = plain_operations.decode_attention(query[:4], cache, tables, torch.tensor(lengths), scores)
    counts = torch.tensor([*lengths, 0], dtype=torch.int32)
    tables = torch.cat([tables, torch.zeros_like(tables[:1])])
    for rows in (5, 2):  # where two rows leave room, every one is shared out
        found = attention_kernels.decode_attention(query[:rows], cache, tables[:rows], counts[:rows], scores)
        torch.testing.assert_close(found[:4], expected[:rows], rtol=1e-4, atol=1e-5)
        assert found.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "deepseek, latent attention",
        "gemma4, heads of two sizes, shared keys, inputs of layers",
        "llama4, chunks, bare norms, experts with scaled inputs",
        "nemotron-h, single blocks",
    ],
)
def test_whole_decoders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention, heads of two sizes, chunks, and experts without gates: prompts in chunks, then decode steps."""
    from tests.support.torch_models import torch_model
    from trtserve.executor.torch import kernels, model, plain_operations

    tiny, found = DECODERS[name], []
    sequences = {key: np.random.default_rng(3).integers(3, 259, size).tolist() for key, size in (("a", 22), ("b", 5))}
    for operations in (kernels, plain_operations):
        monkeypatch.setattr(model, "operations_for", lambda device, chosen=operations: chosen)
        found.append(PagedSteps(torch_model(tiny), sequences).run([{"a": 13}, {"a": 7, "b": 4}, {"a": 1, "b": 1}]))
    for key in sequences:
        np.testing.assert_allclose(found[0][key], found[1][key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("rotated", "interleaved", "normed"), [(0, False, True), (16, True, False), (48, False, True)])
def test_rotate_and_store(rotated: int, interleaved: bool, normed: bool, narrow: bool) -> None:
    import torch

    from trtserve.executor.torch import kernels, plain_operations
    from trtserve.executor.torch.operations import HeadNorms, RotationTables

    heads, kv_heads, size, tokens = 6, 2, 48, 5
    qkv, positions = torch.randn(tokens, (heads + 2 * kv_heads) * size), torch.randint(0, 90, (tokens,))
    rotation = RotationTables(cos_sin=torch.randn(90, rotated), interleaved=interleaved) if rotated else None
    norms = HeadNorms(query=torch.randn(size), key=torch.randn(size), epsilon=1e-5) if normed else None
    slots = torch.randperm(4 * PAGE)[:tokens]
    results = []
    for each in (kernels, plain_operations):
        cache = torch.zeros(4, 2, PAGE, kv_heads, size, dtype=torch.float8_e4m3fn if narrow else None)
        query = each.rotate_and_store(
            qkv.clone(), positions, cache, slots, heads=heads, rotation=rotation, norms=norms, cache_scale=0.003
        )
        results.append((query, cache.float()))
    torch.testing.assert_close(results[0][0], results[1][0])
    # The interpreter halves a number that is rounded up to a power of two in FP8.
    torch.testing.assert_close(results[0][1], results[1][1], **({"rtol": 0.5, "atol": 0.002} if narrow else {}))
    assert not narrow or results[0][1].abs().max() == 448  # more is cut off


def test_norms_gates_and_products() -> None:
    import torch

    from trtserve.executor.torch import kernels, plain_operations

    x, residual, weight = torch.randn(3, 100), torch.randn(3, 100), torch.randn(100)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), plain_operations.rms_norm(x, weight, 1e-5))
    wanted = plain_operations.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), wanted)
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        for first in (False, True):
            gates = [each.gated(x, activation, factor_first=first) for each in (kernels, plain_operations)]
            torch.testing.assert_close(*gates)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("columns", [64, 1500])
def test_products(columns: int, rows: int) -> None:
    import torch

    from trtserve.executor.torch import kernels, plain_operations

    x, residual, norm = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
    weight, bias = torch.randn(38, columns), torch.randn(38)
    for arguments in ((weight, None), (weight, bias, "silu"), (weight, None, "gelu")):
        for before in (None, residual):
            first = len(arguments) == 3
            results = [
                each.norm_linear(
                    x.clone(), None if before is None else before.clone(), norm, 1e-5, *arguments, factor_first=first
                )
                for each in (kernels, plain_operations)
            ]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)
    products = kernels.linear(x, weight, bias), plain_operations.linear(x, weight, bias)
    torch.testing.assert_close(*products, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts(tokens: int) -> None:
    import torch

    from trtserve.executor.torch import kernels, plain_operations
    from trtserve.executor.torch.operations import ExpertWeights

    x = torch.randn(tokens, 40)
    plain = ExpertWeights(outer=torch.randn(4, 2 * 24, 40), inner=torch.randn(4, 40, 24))
    biased = replace(plain, outer_bias=torch.randn(4, 2 * 24), inner_bias=torch.randn(4, 40))
    clamped = replace(biased, clamp=ClampedGate(alpha=1.702, limit=1.5))
    shares, chosen = torch.rand(tokens, 6).topk(2)  # experts 4 and 5 are another rank's
    ungated = ExpertWeights(outer=plain.outer[:, :24].contiguous(), inner=plain.inner)
    cases: list[tuple[ExpertWeights, Literal["silu", "relu2"]]] = [
        *((each, "silu") for each in (plain, biased, clamped)),
        *((each, "relu2") for each in (ungated, replace(ungated, outer_bias=torch.randn(4, 24)))),
    ]
    for experts, activation in cases:
        results = [each.expert_mlp(x, experts, chosen, shares, activation) for each in (kernels, plain_operations)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("count", [5, 8, 40])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "grouped"])
def test_routes(kind: str, count: int) -> None:
    import torch

    from trtserve.executor.torch import kernels, plain_operations

    experts = Experts(count=count, chosen=3, renormalized=False, scale=1.5)
    if kind != "softmax":
        groups: Any = {"groups": 4, "chosen_groups": 2} if kind == "grouped" and count % 4 == 0 else {}
        experts = replace(experts, scores="sigmoid", renormalized=kind == "grouped", **groups)
    correction = None if kind == "softmax" else torch.rand(count)
    logits = torch.randn(9, count)
    (chosen, shares), (wanted, weights) = (
        each.route(logits, correction, experts) for each in (kernels, plain_operations)
    )
    assert chosen.tolist() == wanted.tolist()
    torch.testing.assert_close(shares, weights, rtol=1e-5, atol=1e-6)


class _WholeMatrices:
    """`EngineWeights` of one rank."""

    def __init__(self, shape: LoraShape) -> None:
        self._linears = shape.linears

    def split(self, name: str) -> str:
        return "replicated"

    def shard(self, name: str) -> Any:
        inputs, outputs = self._linears[name.split(".", 3)[3].removesuffix(".weight")]
        return SimpleNamespace(pieces=[SimpleNamespace(first_row=0, rows=outputs, first_column=0, columns=inputs)])


def _adapters(inputs: int, outputs: int, ranks: list[int]) -> tuple[Any, AdapterBatch, LoraShape]:
    """Return a store of adapters for fc and gate of layer 1, and a batch in which each has some tokens."""
    import torch

    from trtserve.executor.torch.adapters import AdapterStore

    generator = np.random.default_rng(3)
    modules = tuple(
        LoraModule(
            id=MODULE_IDS[name], name=name, linear=linear, inputs=inputs, outputs=outputs, width=outputs, first=0
        )
        for name, linear in (("mlp_h_to_4h", "mlp.fc"), ("mlp_gate", "mlp.gate"))
    )
    shape = LoraShape(modules=modules, layers=2, max_rank=24)
    adapters = tuple(
        LoraAdapter(
            number,
            {
                (1, module.id): (
                    generator.standard_normal((rank, inputs), np.float32),
                    generator.standard_normal((rank, outputs), np.float32),
                )
                for module in modules[: 1 + number % 2]
            },
            content=number,
        )
        for number, rank in enumerate(ranks)
    )
    owner = np.concatenate([[-1] * 3, *([number] * (40 if number == 1 else 2) for number in range(len(ranks))), [0]])
    weights: Any = _WholeMatrices(shape)
    store = AdapterStore(shape, weights, range(1, 2), most=8, dtype=torch.float32, device="cpu")
    return store, AdapterBatch(AdapterStack(adapters, shape), owner), shape


def test_adapters_of_a_step() -> None:
    """Of ranks that fill no tile, more tokens than a span, for one of two matrices, and after others."""
    import torch

    from trtserve.executor.torch import kernels, plain_operations
    from trtserve.executor.torch.adapters import Adapters, spans_of

    store, batch, shape = _adapters(1100, 150, [8, 24, 3])
    first = replace(batch, stack=AdapterStack(batch.stack.adapters[1:], shape), owner=np.minimum(batch.owner, 1))
    places = store.places(first)  # adapters that stay keep their places
    kept = places[batch.owner == 1][0]
    places = store.places(batch)
    spans = torch.from_numpy(spans_of(places))
    assert spans[:, 2].sum() == (batch.owner >= 0).sum()
    x = torch.randn(len(places), 1100)
    products = [torch.ones(len(places), 320)[:, 10:310] for _ in range(3)]
    for operations, product in zip((kernels, plain_operations), products, strict=False):
        operations.begin_adapters(x, Adapters(store, spans), 1, 0, 2)(product)
    for number, adapter in enumerate(batch.stack.adapters):
        mine = torch.from_numpy(batch.owner == number)
        for (_, module), (a, b) in adapter.matrices.items():
            columns = slice(0, 150) if module == MODULE_IDS["mlp_h_to_4h"] else slice(150, 300)
            wide = x[mine].double() @ torch.from_numpy(a).double().T @ torch.from_numpy(b).double()
            products[2][mine, columns] += wide.float()
    torch.testing.assert_close(products[0], products[2], rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(products[1], products[2], rtol=1e-4, atol=2e-3)
    assert kept in store.held
    store.places(replace(batch, stack=AdapterStack(batch.stack.adapters[:1], shape), owner=batch.owner * 0))
    assert len(store.held) == 1


SAMPLING: list[dict[str, Any]] = [
    {},
    {"greedy": False, "top_k": 12, "temperature": 0.8},
    {"greedy": False, "top_p": 0.9, "temperature": 1.7},
    {"greedy": False, "top_k": 1000, "top_p": 0.7},
    {"greedy": False, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "prompt_ignore_length": 3},
    {"greedy": False, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 2, "frequency_penalty": 0.3},
]


class _Guide:
    """Allows other tokens after every token."""

    failure = None

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._taken = vocabulary, 0

    def allowed(self) -> Any:
        bits = np.random.default_rng(self._taken).integers(0, 2**32, -(-self._vocabulary // 32), np.uint32)
        return bits & ~np.uint32(1 << 31)

    def mask(self, row: Any) -> None:
        Guide.mask(self, row)  # type: ignore[arg-type]

    def accept(self, token: int) -> None:
        self._taken += 1


def _rows(vocabulary: int) -> list[SamplingRow]:
    """Return a row for each of SAMPLING, some with banned words or guides."""
    generator, rows = np.random.default_rng(0), []
    for number, values in enumerate(SAMPLING):
        parameters = SamplingParameters(seed=2**63 + number, **values)
        prompt, banned = generator.integers(0, vocabulary, 30), [[int(number)]] if number % 2 else []
        guide: Any = _Guide(vocabulary) if number % 4 < 2 else None
        processor = LogitsProcessor(parameters, prompt, vocab_size=vocabulary, end_id=2, bad_words=banned, guide=guide)
        assert processor.drawable
        rows.append(SamplingRow(parameters, processor, [], log_prob=number % 3 == 0))
    return rows


@pytest.mark.parametrize(("kind", "vocabulary"), [("plain", 300), ("kernels", 300), ("kernels", 5000)])
def test_devices_choose_the_tokens_of_the_host(kind: str, vocabulary: int) -> None:
    """Also among equal logits, over several steps in which the device itself counts what has occurred."""
    import torch

    from trtserve.executor.torch.choosing_model import choose_on_cpu
    from trtserve.executor.torch.draw_words import DrawWriter
    from trtserve.executor.torch.step_kernels import KernelSampler

    rows, generator = _rows(vocabulary), np.random.default_rng(1)
    count = len(rows)
    choose = choose_on_cpu if kind == "plain" else KernelSampler(count, vocabulary, "cpu").choose
    writer, table = DrawWriter(count), torch.zeros((count, vocabulary), dtype=torch.int16)
    tokens, log_probs = torch.zeros(count, dtype=torch.int32), torch.zeros((count, 2))
    for step in range(3):
        logits = (generator.standard_normal((count, vocabulary)) * 3).astype(np.float32)
        if step == 2:
            logits = np.round(logits)
        draws = Draws(list(range(count)), rows, list(range(count)), [step] * count, [step == 0] * count)
        arrays = writer.write(draws)
        for entry, ids, numbers in arrays.new_rows:
            table[entry, torch.from_numpy(ids)] = torch.from_numpy(numbers)
        guides = [row.processor.guide for row in rows]
        allowed = torch.from_numpy(np.stack([each.allowed() for each in guides if each]).view(np.int32))
        choose(torch.from_numpy(logits.copy()), torch.from_numpy(arrays.words), table, allowed, tokens, log_probs)
        choices = choose_tokens(logits, rows)
        assert tokens.tolist() == [choice.token for choice in choices]
        for row, choice, found in zip(rows, choices, log_probs.tolist(), strict=True):
            if row.log_prob:
                assert found == pytest.approx([choice.log_prob, choice.full_log_prob], abs=1e-4)
            row.processor.accept(choice.token)
            row.generated.append(choice.token)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["plain", "kernels"])
def test_rows_without_a_token_say_why(kind: str) -> None:
    import torch

    from trtserve.executor.engine.sampling import EXHAUSTED, UNDEFINED
    from trtserve.executor.torch.choosing_model import choose_on_cpu
    from trtserve.executor.torch.draw_words import DrawWriter
    from trtserve.executor.torch.step_kernels import KernelSampler

    parameters = SamplingParameters()
    every = [[token] for token in range(5)]
    rows = [
        SamplingRow(
            parameters, LogitsProcessor(parameters, np.zeros(0, np.int64), vocab_size=5, end_id=-1, bad_words=words), []
        )
        for words in ([], [], [], every)
    ]
    logits = torch.zeros(4, 5)
    logits[0, 3], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    choose = choose_on_cpu if kind == "plain" else KernelSampler(4, 5, "cpu").choose
    arrays = DrawWriter(4).write(Draws([0, 1, 2, 3], rows, [0, 1, 2, 3], [0] * 4, [True] * 4))
    table = torch.zeros((4, 5), dtype=torch.int16)
    ((entry, ids, numbers),) = arrays.new_rows
    table[entry, torch.from_numpy(ids)] = torch.from_numpy(numbers)
    tokens = torch.zeros(4, dtype=torch.int32)
    choose(logits, torch.from_numpy(arrays.words), table, table[:0].int(), tokens, torch.zeros(4, 2))
    assert tokens.tolist() == [UNDEFINED, UNDEFINED, UNDEFINED, EXHAUSTED]


def test_a_decode_step_is_unpacked() -> None:
    import torch

    from trtserve.executor.torch.step_kernels import FIRST_BLOCK, LENGTH, POSITION, STEP_WORDS, TOKEN, unpack_step

    packed = torch.zeros(3 * STEP_WORDS + 4, dtype=torch.int32)
    words = packed[: 3 * STEP_WORDS].view(3, STEP_WORDS)
    for row, values in enumerate([(7, 40, 35, 0), (-2, 3, 1, 3), (0, 0, 0, 0)]):  # the last one is padding
        for word, value in zip((TOKEN, POSITION, LENGTH, FIRST_BLOCK), values, strict=True):
            words[row, word] = value
    packed[3 * STEP_WORDS :] = torch.tensor([5, 9, 2, 8])
    long = {name: torch.zeros(3, dtype=torch.int64) for name in ("ids", "positions", "cache_places")}
    tables, lengths = torch.full((3, 6), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    chosen = torch.tensor([11, 12, 13], dtype=torch.int32)
    unpack_step(packed, 3, chosen, **long, tables=tables, lengths=lengths, page=PAGE, spare_place=160)
    assert {name: tensor.tolist() for name, tensor in long.items()} == {
        "ids": [7, 12, 0],
        "positions": [40, 3, 0],
        "cache_places": [2 * PAGE + 2, 8 * PAGE, 160],
    }
    assert lengths.tolist() == [35, 1, 0]
    assert tables.tolist() == [[5, 9, 2, -1, -1, -1], [8, -1, -1, -1, -1, -1], [-1] * 6]


@pytest.mark.parametrize("kind", ["int8", "int4", "int4 with zero points"])
def test_packed_matrices(kind: str) -> None:
    """Blocks have 16 words for 384 inputs and 4 for 96; one row has a kernel of its own."""
    import torch

    from trtserve.executor.torch import kernels, plain_operations
    from trtserve.executor.torch.packed import join_packed, quantize

    for inputs, outputs in ((384, 9), (96, 5)):
        weight = torch.randn(2 * outputs, inputs)
        packed = quantize(weight, 8 if kind == "int8" else 4)
        if kind == "int4 with zero points":
            zeros = torch.randint(0, 17, packed.scales.shape, dtype=torch.uint8)
            packed = join_packed([replace(packed, zeros=zeros)])
        norm, bias = torch.randn(inputs), torch.randn(2 * outputs)
        for rows in (1, 20):
            x = torch.randn(rows, inputs)
            found, expected = (each.linear(x, packed, bias) for each in (kernels, plain_operations))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
            for activation, first in ((None, False), ("silu", False), ("gelu", True))[: 1 if rows > 1 else 3]:
                both = [
                    each.norm_linear(x, torch.ones_like(x), norm, 1e-5, packed, bias, activation, factor_first=first)
                    for each in (kernels, plain_operations)
                ]
                for pair in zip(*both, strict=True):
                    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [2, 16])
def test_a_few_rows_of_floats(rows: int) -> None:
    """The parts of a row's sum meet in the program that ends last."""
    import torch

    from trtserve.executor.torch import plain_operations
    from trtserve.executor.torch.row_kernels import arrivals, multiply_few

    for inputs, outputs in ((600, 70), (100, 130)):
        x, weight, bias = torch.randn(rows, inputs), torch.randn(2 * outputs, inputs), torch.randn(2 * outputs)
        product = plain_operations.linear(x, weight, bias)
        torch.testing.assert_close(multiply_few(x, weight, bias), product, rtol=1e-4, atol=1e-3)
        found = multiply_few(x, weight, bias, "silu", factor_first=True)
        expected = plain_operations.gated(product, "silu", factor_first=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert not arrivals(torch.device("cpu")).any()


@pytest.mark.parametrize("rows", [1, 3])
def test_fp8_matrices(rows: int) -> None:
    """Inputs are rounded by the norm, by the gate before the next matrix, or by a kernel of their own.

    The interpreter rounds wrongly up to powers of two, so most numbers here are FP8 from the start.
    """
    import torch

    from trtserve.executor.torch import kernels, plain_operations
    from trtserve.executor.torch.packed import FP8, Fp8Codes

    weight = Fp8Codes(
        codes=torch.randn(64, 96).to(FP8),
        scale=torch.tensor([0.03]),
        input_scale=torch.tensor([0.25]),
        dtype=torch.float32,
    )
    x, bias = torch.randn(rows, 96).to(FP8).float() / 4, torch.randn(64)
    x[0, 5] = 200  # beyond the largest number
    found, expected = (each.linear(x, weight, bias) for each in (kernels, plain_operations))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    signs, norm = torch.randn(rows, 96).sign() / 2, torch.randn(96).to(FP8).float() / 4
    after = replace(weight, input_scale=torch.tensor([0.01]))
    for activation, rounding in ((None, None), ("silu", None), ("silu", after)):
        (found, total), (expected, _) = (
            each.norm_linear(signs, signs.clone(), norm, 0.0, weight, bias, activation, rounding=rounding)
            for each in (kernels, plain_operations)
        )
        assert found.dtype == expected.dtype == (torch.float32 if rounding is None else FP8)
        near = torch.isclose(found.float(), expected.float(), rtol=1e-4, atol=1e-3)
        assert near.float().mean() > (0.999 if rounding is None else 0.8)
        assert torch.equal(total, 2 * signs)


@pytest.mark.parametrize("shape", [(192,), (2, 2)], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_fp8_inputs_with_scales_of_their_own(rows: int, shape: tuple[int, ...]) -> None:
    """Tokens are rounded by the norm, by the gate before the next matrix, or by a kernel; few after the gate.

    Rounding moves a number by 3 % on average, and the interpreter rounds wrongly up to powers of two.
    """
    import torch

    from trtserve.executor.torch import kernels, plain_operations
    from trtserve.executor.torch.packed import FP8, Fp8Codes, Fp8Rows

    weight = Fp8Codes(codes=torch.randn(192, 144).to(FP8), scale=torch.rand(shape) / 9, dtype=torch.bfloat16)
    x, bias = torch.randn(rows, 144), torch.randn(192)
    x[0, :130] *= 50

    def near(found: Any, expected: Any) -> None:
        assert (found.float() - expected).norm() < 0.12 * expected.norm()

    near(kernels.linear(x.bfloat16(), weight, bias), x @ weight.floats(torch.float32).T + bias)
    norm, residual = torch.rand(144).bfloat16(), torch.randn(rows, 144).bfloat16()
    after = replace(weight, codes=torch.randn(64, 96).to(FP8), scale=torch.rand(64 if len(shape) == 1 else (1, 1)))
    cases: list[tuple[Literal["silu"] | None, Fp8Codes | None]] = [(None, None), ("silu", None), ("silu", after)]
    for activation, rounding in cases:
        made, _ = kernels.norm_linear(
            x.bfloat16(), residual.clone(), norm, 1e-5, weight, None, activation, rounding=rounding
        )
        wide = x.bfloat16().float(), residual.float(), norm.float()
        expected, _ = plain_operations.norm_linear(*wide, 1e-5, weight.floats(torch.float32), None, activation)
        assert isinstance(made, Fp8Rows) is (rounding is not None and rows > 64)
        near(made.floats() if isinstance(made, Fp8Rows) else made, expected)


def test_many_rows_take_a_copy_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trtserve.executor.torch import packed_kernels
    from trtserve.executor.torch.packed import quantize

    monkeypatch.setattr(packed_kernels, "_MOST_ROWS", 8)
    for bits in (8, 4):
        packed, x = quantize(torch.randn(40, 96), bits), torch.randn(9, 96)
        expected = x @ packed.floats(torch.float32).T
        torch.testing.assert_close(packed_kernels.multiply_packed(x, packed, None), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [256, 96, 40])
def test_weights_are_quantised_as_on_openvino(inputs: int) -> None:
    import torch

    from trtserve.checkpoint.quantized import group_size
    from trtserve.executor.openvino.weight_quantization import quantize_in_groups, quantize_per_channel
    from trtserve.executor.torch.packed import pack, quantize

    weight = torch.randn(64, inputs)
    weight[3] = 0
    theirs = pack(quantize_in_groups(weight.numpy(), group_size(inputs)), "cpu")
    ours = quantize(weight, 4)
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scales, theirs.scales)
    codes, scales = quantize_per_channel(weight.numpy())
    ours = quantize(weight, 8)
    assert np.array_equal(ours.floats(torch.float32).numpy(), codes * scales)


@pytest.mark.parametrize("type_", ["float32", "float16", "bfloat16"])
def test_a_rank_sums_what_the_others_wrote_into_its_places(type_: str) -> None:
    import torch

    from trtserve.executor.torch.sum_kernels import GpuSums

    dtype = getattr(torch, type_)
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    sizes = (2, 3, 16384)  # halves, ranks, bytes
    memory = [torch.zeros(sizes, dtype=torch.uint8) for _ in range(3)]
    sums = GpuSums(memory[1].view(-1), [each.data_ptr() for each in memory], 1)
    words = [each.view(bits) for each in memory]
    empty = words[1].clone()
    for turn, count in enumerate((512, 8, 264)):  # of one program
        given = torch.randn(3, count).to(dtype)
        given[:, ::5] = -0.0
        for rank in (0, 2):
            words[1][turn % 2, rank, :count] = given[rank].view(bits).where(given[rank] != 0, 0)
        found = sums(given[1])
        # Of bfloat16 the interpreter does not round as GPUs do.
        torch.testing.assert_close(
            found.float(), given.float().sum(0), rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-2
        )
        assert torch.equal(words[1], empty), "its places are free again"
        for rank in (0, 2):
            sent = words[rank][turn % 2, 1, :count]
            assert torch.equal(sent.view(dtype), given[1])
            assert not (sent == empty[0, 0, 0]).any(), "a zero is not taken for an empty place"
