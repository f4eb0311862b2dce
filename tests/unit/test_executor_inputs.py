"""Inputs of requests: bias, bans, prompt tables, adapters, positions, guides; valid and invalid ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.executors import Start, answer_of, collect, free_blocks
from tests.support.fake_model import ADAPTER, HIDDEN, POSITION, TABLE, fake_logits, greedy_continuation
from trtserve.executor.api import (
    GuidedDecodingConfig,
    GuidedDecodingParams,
    KvCacheConfig,
    KvCacheRetentionConfig,
    LoraConfig,
    OutputConfig,
    PromptTuningConfig,
    Request,
    SamplingConfig,
)
from trtserve.executor.engine.lora import NotCachedError

ONLY_NEW = OutputConfig(exclude_input_from_output=True)
REUSE = KvCacheConfig(enable_block_reuse=True)
NO_REUSE = KvCacheConfig(enable_block_reuse=False)


def _continuation(contents: list[int], count: int, *, added: int = 0) -> list[int]:
    """Return the fake model's answer after tokens with these contents; `added` is in each new token's contents."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(fake_logits(np.array([*contents, *(token + added for token in tokens)])).argmax()))
    return tokens


# Bias and bans


def test_bias_changes_the_chosen_token(start: Start) -> None:
    executor, _ = start()
    bias = np.zeros(97, np.float32)
    bias[7] = 100
    request = Request([1], 3, embedding_bias=bias, output_config=ONLY_NEW)
    half = Request([1], 3, embedding_bias=bias.astype(np.float16), output_config=ONLY_NEW)
    assert [answer_of(executor, each).result.output_token_ids for each in (request, half)] == [[[7, 7, 7]]] * 2
    empty = Request([1], 3, embedding_bias=np.zeros(0, np.float32), output_config=ONLY_NEW)
    assert answer_of(executor, empty).result.output_token_ids == [greedy_continuation([1], 3)]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (np.zeros(96, np.float32), r"96 entries; expected as many as the vocabulary has \(97\)"),
        (np.zeros(97, np.float64), "type float64; expected float32 or float16"),
        (np.full(97, np.nan, np.float32), "has NaN"),
    ],
    ids=["size", "type", "nan"],
)
def test_invalid_bias_is_refused(start: Start, bias: Any, message: str) -> None:
    executor, _ = start()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer_of(executor, Request([1], 1, embedding_bias=bias)).error_msg)


def test_bad_words_of_several_tokens(start: Start) -> None:
    executor, _ = start()
    expected = greedy_continuation([1], 4)
    request = Request([1], 4, bad_words=[expected[1:3], []], output_config=ONLY_NEW)
    (tokens,) = answer_of(executor, request).result.output_token_ids
    assert tokens[:2] == expected[:2]
    assert tokens[2] != expected[2]


# Prompt tables


def _table(*rows: int) -> np.ndarray[Any, Any]:
    return np.array([[row] * HIDDEN for row in rows], dtype=np.float32)


def test_prompt_tables_of_several_requests_in_one_step(start: Start) -> None:
    executor, model = start(built={"max_prompt_embedding_table_size": 4}, kv_cache_config=NO_REUSE)
    model.gate.clear()
    tables = [_table(11, 12), None, _table(21, 22, 23).astype(np.float16)]
    prompts = [[97, 98, 5], [5, 6, 7], [4, 99, 97]]
    requests = [
        Request(
            prompt, 4, output_config=ONLY_NEW, prompt_tuning_config=None if table is None else PromptTuningConfig(table)
        )
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    ids = executor.enqueue_requests([Request([1], 1), *requests])
    model.gate.set()
    answers = [each[0].result.output_token_ids[0] for each in collect(executor, ids).values()]
    contents = [[TABLE + 11, TABLE + 12, 5], [5, 6, 7], [4, TABLE + 23, TABLE + 21]]
    assert answers[1:] == [_continuation(each, 4) for each in contents]


def test_prompt_table_with_chunks(start: Start) -> None:
    built = {"max_prompt_embedding_table_size": 4}
    executor, _ = start(tokens=8, enable_chunked_context=True, built=built, kv_cache_config=NO_REUSE)
    prompt = [*range(10), 97, 98, *range(10)]
    sampling = SamplingConfig(repetition_penalty=1.2, no_repeat_ngram_size=2)
    tuning = PromptTuningConfig(_table(7, 8))
    result = answer_of(executor, Request(prompt, 2, sampling_config=sampling, prompt_tuning_config=tuning)).result
    assert result.output_token_ids[0][:-2] == prompt


def test_extra_ids_keep_blocks_of_prompt_tables_apart(start: Start) -> None:
    executor, model = start(built={"max_prompt_embedding_table_size": 4}, kv_cache_config=REUSE)
    prompt = [97, 98, *range(10)]

    def ask(row: int, extra: int) -> list[int]:
        tuning = PromptTuningConfig(_table(row, row), [extra, extra, *[0] * 10])
        return answer_of(
            executor, Request(prompt, 3, prompt_tuning_config=tuning, output_config=ONLY_NEW)
        ).result.output_token_ids[0]

    for row, extra, reused in ((1, 5, False), (1, 5, True), (2, 6, False)):
        model.steps.clear()
        assert ask(row, extra) == _continuation([TABLE + row, TABLE + row, *range(10)], 3)
        assert (model.steps[0] < 12) is reused


@pytest.mark.parametrize(
    ("table", "extra", "prompt", "message"),
    [
        (_table(1, 2, 3), None, [97], "has 3 rows, but the engine was built for 2 rows"),
        (np.zeros((1, 5), np.float32), None, [97], "hidden size 5; the model has 3"),
        (np.full((1, 3), np.nan, np.float32), None, [97], "values that are not finite"),
        (_table(1), None, [98], "Token id 98 .* vocabulary of 97 and the 1 rows"),
        (_table(1), [1, 2], [97], r"vector size \(2\) must be the same as input token vector size \(1\)"),
        (_table(1), None, [97], "Input token extra ids must be provided when enabling kv cache reuse"),
    ],
    ids=["rows", "hidden", "NaN", "id", "length", "extra"],
)
def test_invalid_prompt_tables_are_refused(start: Start, table: Any, extra: Any, prompt: Any, message: str) -> None:
    built = {"max_prompt_embedding_table_size": 2}
    executor, _ = start(built=built, kv_cache_config=KvCacheConfig(enable_block_reuse="provided" in message))
    error = answer_of(executor, Request(prompt, 1, prompt_tuning_config=PromptTuningConfig(table, extra))).error_msg
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_engine_without_prompt_tables_refuses_them(start: Start) -> None:
    executor, _ = start()
    request = Request([97], 1, prompt_tuning_config=PromptTuningConfig(_table(1)))
    assert "the engine was built without a prompt table" in answer_of(executor, request).error_msg


# Adapters


@dataclass
class FakeAdapters:
    """An adapter cache with batches that the fake model can read; `held` counts references."""

    held: dict[int, int] = field(default_factory=dict)

    def resolve(self, config: LoraConfig) -> Any:
        if config.weights is None and config.task_id not in self.held:
            raise NotCachedError(f"LoRA task {config.task_id} not found in cache.")
        self.held[config.task_id] = self.held.get(config.task_id, 0) + 1
        return FakeAdapter(config.task_id)

    def release(self, adapter: Any) -> None:
        self.held[adapter.task_id] -= 1

    def fits(self, adapters: Any) -> bool:
        return len(adapters) > 0

    def batch(self, spans: Any) -> Any:
        return spans


@dataclass(frozen=True)
class FakeAdapter:
    """What the fake model uses of an adapter."""

    task_id: int

    @property
    def content(self) -> int:
        """Return an adapter with weights of its own for every task."""
        return self.task_id


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> FakeAdapters:
    cache = FakeAdapters()
    monkeypatch.setattr("trtserve.executor.engine.loop.AdapterCache", lambda *_, **__: cache)
    return cache


def _with_adapter(prompt: list[int], task: int | None, *, first: bool = True, **other: Any) -> Request:
    weights = np.zeros((1, 4), np.float32) if first else None
    config = np.zeros((1, 3), np.int32) if first else None
    lora = None if task is None else LoraConfig(task, weights, config)
    return Request(prompt, 5, lora_config=lora, output_config=ONLY_NEW, **other)


def test_adapters_mixed_in_one_batch(start: Start, adapters: FakeAdapters) -> None:
    executor, model = start(lora=object(), max_beam_width=2)
    model.gate.clear()
    tasks = [3, None, 4, 3]
    ids = executor.enqueue_requests([_with_adapter([8, n], task) for n, task in enumerate(tasks)])
    model.gate.set()
    for number, task, responses in zip(range(4), tasks, collect(executor, ids).values(), strict=True):
        added = ADAPTER * (task or 0)
        expected = _continuation([8 + added, number + added], 5, added=added)
        assert responses[0].result.output_token_ids == [expected]
    assert adapters.held == {3: 0, 4: 0}
    beams = answer_of(executor, _with_adapter([8, 1], 4, first=False, sampling_config=SamplingConfig(2))).result
    assert len(beams.output_token_ids) == 2
    assert adapters.held == {3: 0, 4: 0}


def test_adapters_keep_blocks_apart_until_their_requests_end(start: Start, adapters: FakeAdapters) -> None:
    executor, model = start(lora=object(), kv_cache_config=REUSE)
    prompt = list(range(12))
    for task in (1, 2, 1):
        model.steps.clear()
        added = ADAPTER * task
        answer = answer_of(executor, _with_adapter(prompt, task))
        assert answer.result.output_token_ids == [_continuation([each + added for each in prompt], 5, added=added)]
    assert model.steps[0] < 12
    sampling = SamplingConfig(num_return_sequences=3)
    collect(executor, [executor.enqueue_request(_with_adapter(prompt, 1, sampling_config=sampling))])
    number = executor.enqueue_request(_with_adapter(prompt, 2, sampling_config=sampling))
    executor.cancel_request(number)
    collect(executor, [number])
    assert adapters.held == {1: 0, 2: 0}
    assert free_blocks(executor) == model.blocks


def test_error_for_an_uncached_adapter_has_no_prefix(start: Start, adapters: FakeAdapters) -> None:
    executor, _ = start(lora=object())
    error = answer_of(executor, _with_adapter([1], 9, first=False)).error_msg
    assert error == "LoRA task 9 not found in cache."
    assert adapters.held == {}


# Reuse


def test_requests_share_blocks_only_with_the_same_salt(start: Start) -> None:
    executor, model = start(kv_cache_config=REUSE)
    prompt = list(range(12))
    reused = []
    for salt in (None, 1, 1, 2, None):
        model.steps.clear()
        answer_of(executor, Request(prompt, 1, cache_salt_id=salt))
        reused.append(model.steps[0] < 12)
    assert reused == [False, False, True, False, True]


def test_retention_applies_to_the_blocks(start: Start) -> None:
    ranges = [KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 90)]
    executor, model = start(kv_cache_config=KvCacheConfig(enable_block_reuse=True, max_tokens=100), seq_len=60)
    kept = Request(list(range(12)), 1, kv_cache_retention_config=KvCacheRetentionConfig(ranges))
    answer_of(executor, kept)
    for first in range(20, 50, 3):
        answer_of(executor, Request([first] * 50, 1))
    model.steps.clear()
    answer_of(executor, Request(list(range(12)), 1))
    assert model.steps[0] < 12


# Positions


def test_position_ids_of_the_prompt(start: Start) -> None:
    executor, _ = start(kv_cache_config=REUSE)
    request = Request([1, 2, 3], 4, position_ids=[0, 5, 6], output_config=ONLY_NEW)
    expected = _continuation([1, 2 + 4 * POSITION, 3 + 4 * POSITION], 4)
    for _ in range(2):
        assert answer_of(executor, request).result.output_token_ids == [expected]
    plain = Request([1, 2, 3], 4, output_config=ONLY_NEW)
    assert answer_of(executor, plain).result.output_token_ids == [greedy_continuation([1, 2, 3], 4)]
    assert answer_of(executor, request).result.output_token_ids == [expected], "nothing of the plain one is reused"


@pytest.mark.parametrize(("positions", "message"), [([0], "1 position ids for a prompt of 2"), ([0, -1], "must be in")])
def test_invalid_position_ids_are_refused(start: Start, positions: list[int], message: str) -> None:
    executor, _ = start()
    assert message in answer_of(executor, Request([1, 2], 1, position_ids=positions)).error_msg


# Guides


def _guided(**other: Any) -> Request:
    kind = GuidedDecodingParams.GuideType.REGEX
    return Request(
        [1],
        12,
        guided_decoding_params=GuidedDecodingParams(kind, "ab(c|d)+e"),
        output_config=ONLY_NEW,
        end_id=0,
        **other,
    )


def _guiding() -> GuidedDecodingConfig:
    vocabulary = ["</s>", *(chr(ord("a") + at) for at in range(26)), *(f"<{at}>" for at in range(70))]
    return GuidedDecodingConfig(GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE, vocabulary, None, [0])


def test_guides_hold_for_every_sequence_and_after_pauses(start: Start) -> None:
    executor, _ = start(guided_decoding_config=_guiding())
    sampling = SamplingConfig(num_return_sequences=3, top_k=97, temperature=3.0)
    number = executor.enqueue_request(_guided(sampling_config=sampling))
    answers = [response.result for response in collect(executor, [number])[number]]
    texts = ["".join(chr(ord("a") + token - 1) for token in result.output_token_ids[0]) for result in answers]
    for text in texts:
        assert text.startswith("ab")
        assert set(text[2:]) <= set("cde")
    assert len(set(texts)) > 1


def test_guides_need_a_configuration(start: Start) -> None:
    executor, _ = start()
    assert "GuidedDecodingConfig" in answer_of(executor, _guided()).error_msg


def test_invalid_guide_fails_alone(start: Start) -> None:
    executor, _ = start(guided_decoding_config=_guiding())
    kind = GuidedDecodingParams.GuideType.JSON_SCHEMA
    wrong = Request([1], 3, guided_decoding_params=GuidedDecodingParams(kind, json.dumps({"type": 7})))
    bad, good = executor.enqueue_requests([wrong, Request([1], 3)])
    responses = collect(executor, [bad, good])
    assert responses[bad][0].has_error()
    assert not responses[good][0].has_error()
