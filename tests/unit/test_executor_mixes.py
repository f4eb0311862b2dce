"""Random mixes of requests with all features: each gets the answer it gets alone, and no block leaks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.executors import answer_of, collect, executors, is_last, loop_of
from tests.support.fake_model import (
    HIDDEN,
    VOCAB,
    FakeChoosingModel,
    FakeModel,
    FakeRepeatingChooser,
    FakeRepeatingModel,
)
from trtserve.executor.api import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    Executor,
    ExecutorConfig,
    ExternalDraftTokensConfig,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    PromptTuningConfig,
    Request,
    Response,
    SamplingConfig,
    SchedulerConfig,
)

BLOCKS = 32
BUILT = {
    "gather_context_logits": True,
    "gather_generation_logits": True,
    "max_draft_len": 4,
    "max_prompt_embedding_table_size": 2,
}

TOKEN = st.integers(0, VOCAB - 1)
# A few prompts with common beginnings, so that blocks are shared.
PROMPT = st.builds(
    lambda start, tail: [*range(start, start + 9), *tail], st.integers(0, 2), st.lists(TOKEN, max_size=12)
)
CHANCE = st.booleans()


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """One request; beams, drafts and plain sequences get features that can be combined with them."""
    kind = draw(st.sampled_from(["plain", "plain", "plain", "beams", "draft", "table"]))
    prompt = draw(PROMPT)
    other: dict[str, Any] = {}
    if kind == "draft":
        other["external_draft_tokens_config"] = ExternalDraftTokensConfig(draw(st.lists(TOKEN, min_size=1, max_size=4)))
    if kind == "table":
        rows = np.full((2, HIDDEN), draw(st.integers(1, 9)), np.float32)
        prompt[1] = VOCAB + 1
        other["prompt_tuning_config"] = PromptTuningConfig(rows, [int(rows[0, 0])] * len(prompt))
    return Request(
        prompt,
        draw(st.integers(1, 18)),
        streaming=draw(CHANCE),
        return_all_generated_tokens=draw(CHANCE),
        sampling_config=_sampling(draw, kind),
        output_config=OutputConfig(*(draw(CHANCE) for _ in range(4)), return_perf_metrics=draw(CHANCE)),
        end_id=draw(st.none() | TOKEN),
        stop_words=draw(st.none() | st.lists(st.lists(TOKEN, min_size=1, max_size=2), max_size=3)),
        bad_words=draw(st.none() | st.lists(st.lists(TOKEN, min_size=1, max_size=2), max_size=3)),
        priority=draw(st.sampled_from([0.2, 0.5, 0.9])),
        **other,
    )


def _sampling(draw: st.DrawFn, kind: str) -> SamplingConfig:
    values: dict[str, Any] = {"beam_width": 2 if kind == "beams" else 1}
    if draw(CHANCE):
        values |= {"top_k": 9, "temperature": 2.5, "seed": draw(st.integers(0, 99))}
    if draw(CHANCE):
        values |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 2}
    if kind == "plain" and draw(CHANCE):
        values["num_return_sequences"] = draw(st.integers(1, 3))
    if draw(CHANCE):
        values["min_tokens"] = draw(st.integers(0, 5))
    return SamplingConfig(**values)


SETTINGS = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([2, 8]),
        "policy": st.sampled_from(
            [CapacitySchedulerPolicy.MAX_UTILIZATION, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT]
        ),
        "chunked": CHANCE,
        "reuse": CHANCE,
        "model": st.sampled_from([FakeModel, FakeChoosingModel, FakeChoosingModel]),
    }
)


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "batch": values["batch"],
        "tokens": 24 if values["chunked"] else 64,
        "enable_chunked_context": values["chunked"],
        "scheduler_config": SchedulerConfig(values["policy"], ContextChunkingPolicy.EQUAL_PROGRESS),
        "kv_cache_config": KvCacheConfig(enable_block_reuse=values["reuse"], max_tokens=4 * BLOCKS),
        "max_beam_width": 2,
        "seq_len": 60,
        "built": BUILT,
    }


def _answer(responses: list[Response]) -> list[Any]:
    """What must not depend on other requests: all tokens of each sequence, and the outputs of its last response."""
    ends: dict[int, list[Any]] = {}
    for response in responses:
        result = response.result
        tokens, _ = ends.get(result.sequence_index, ([], None))
        whole = len(result.output_token_ids) > 1
        tokens = result.output_token_ids if whole else [*tokens, result.output_token_ids[0]]
        ends[result.sequence_index] = [tokens, result.finish_reasons]
    return sorted(ends.items())


def _log_probs(responses: list[Response]) -> list[float]:
    """Those of the last response of each sequence, and their sum."""
    ends = {response.result.sequence_index: response.result for response in responses}
    found: list[float] = []
    for _, result in sorted(ends.items()):
        for row in (*(result.log_probs or ()), result.cum_log_probs or ()):
            found += row
    return found


def _check(executor: Executor, other: Executor, mix: list[Request], cancelled: list[int]) -> None:
    """Compare the answers of a mix with those of `other` to each request alone."""
    ids = executor.enqueue_requests(mix)
    for index in cancelled:
        time.sleep(0.001)
        executor.cancel_request(ids[index % len(ids)])
    gone = {ids[index % len(ids)] for index in cancelled}
    for number, request, responses in zip(ids, mix, collect(executor, ids).values(), strict=True):
        assert [is_last(response) for response in responses] == [False] * (len(responses) - 1) + [True]
        if number not in gone:
            (alone,) = collect(other, [other.enqueue_request(request)]).values()
            _same(responses, alone)
        elif not responses[-1].has_error():
            assert responses[-1].result.is_final


def _same(found: list[Response], alone: list[Response]) -> None:
    if alone[-1].has_error():
        assert found[-1].error_msg == alone[-1].error_msg
        return
    assert _answer(found) == _answer(alone)
    # Some come from a device in float32, others from the host in float64.
    assert _log_probs(found) == pytest.approx(_log_probs(alone), abs=1e-6)
    logits = [responses[-1].result.context_logits for responses in (found, alone)]
    assert (logits[0] is None) == (logits[1] is None)
    if logits[0] is not None:
        assert (logits[0] == logits[1]).all()


@given(
    values=SETTINGS,
    mix=st.lists(requests(), min_size=1, max_size=24),
    cancelled=st.lists(st.integers(0, 63), max_size=4),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_random_mixes_equal_single_requests(values: dict[str, Any], mix: list[Request], cancelled: list[int]) -> None:
    with executors(values["model"]) as start, executors() as start_alone:
        executor, _ = start(**_settings(values))
        _check(executor, start_alone(**_settings(values))[0], mix, cancelled)
        assert executor._loop is not None
        assert loop_of(executor).cache.available == BLOCKS
        assert loop_of(executor).scheduler.active == []
        assert executor.get_num_responses_ready() == 0
        last = answer_of(executor, Request([1], 2))
        assert last.result.finish_reasons == [FinishReason.LENGTH]


class _DraftingConfig(ExecutorConfig):
    ngram_max_draft_len = 6


@pytest.mark.parametrize("made", [FakeRepeatingModel, FakeRepeatingChooser])
@given(values=SETTINGS, mix=st.lists(requests(), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_drafts_from_ngrams_change_no_response(
    made: type[FakeModel], values: dict[str, Any], mix: list[Request]
) -> None:
    """Alone and in a mix: the same tokens with the same seed, log-probs and logits, one response per token."""
    with executors(made) as start:
        drafting, model = start(**_settings(values), config_class=_DraftingConfig)
        plain, _ = start(**_settings(values))
        for requests_at_once in ([each] for each in mix), [mix]:
            for some in requests_at_once:
                found = collect(drafting, drafting.enqueue_requests(some))
                expected = collect(plain, plain.enqueue_requests(some))
                for ours, theirs in zip(found.values(), expected.values(), strict=True):
                    assert _contents(ours) == _contents(theirs)
        assert drafting._loop is not None
        assert loop_of(drafting).cache.available == BLOCKS
        assert max(model.steps) <= _settings(values)["tokens"]


def _contents(responses: list[Response]) -> list[Any]:
    """Return them by sequence; which of several ends first may differ."""
    return sorted(map(_content, responses), key=lambda each: each[0])


def _content(response: Response) -> tuple[Any, ...]:
    """Everything but the numbers of requests and steps, and times."""
    if response.has_error():
        return 0, response.error_msg
    result = response.result
    logits = [None if each is None else each.tolist() for each in (result.context_logits, result.generation_logits)]
    ended = result.is_sequence_final, result.finish_reasons
    return result.sequence_index, result.output_token_ids, result.log_probs, result.cum_log_probs, logits, ended
