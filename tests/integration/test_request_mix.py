"""Random mixes of requests with every feature and random cancels: all answered once, nothing leaks, all as if alone."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.adapters import random_adapter
from tests.support.executors import free_blocks, loop_of
from tests.support.request_mix import (
    BEAMS,
    DRAFT,
    LORA_RANK,
    MOST_TOKENS,
    PROMPTS,
    TABLE_ROWS,
    Recipe,
    recipes,
    request_of,
)
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.executor import api
from trtserve.executor.engine.shapes import LoraShape
from trtserve.executor.openvino import paged_model
from trtserve.executor.openvino.paged_model import SIZES
from trtserve.specs import BuildSpec, ConvertSpec

SOON = 60.0
KV_TOKENS = 512  # less than a large mix needs at once: requests wait, are paused, and blocks are taken from the cache
# `make soak` tries many more, other ones each time.
MIXES = int(os.environ.get("TRTSERVE_MIXES", "0"))
EXAMPLES = settings(
    max_examples=MIXES or 20,
    deadline=None,
    derandomize=not MIXES,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass
class Answer:
    """Everything that came back for one request, by number of the sequence."""

    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    last: dict[int, Any] = field(default_factory=dict)
    responses: int = 0
    finals: int = 0
    cancelled: bool = False
    error: str | None = None

    def add(self, recipe: Recipe, response: api.Response) -> None:
        """Take one response."""
        assert not self.finals, "a response after the final one"
        self.responses += 1
        if response.has_error():
            self.error, self.finals = response.error_msg, 1
            return
        result = response.result
        self.finals += result.is_final
        self.cancelled |= api.FinishReason.CANCELLED in result.finish_reasons
        whole = recipe.beams > 1 or not recipe.streaming
        if not self.cancelled:
            self.last[result.sequence_index] = result
            known = self.tokens.setdefault(result.sequence_index, [[] for _ in result.output_token_ids])
            for number, ids in enumerate(result.output_token_ids):
                known[number] = list(ids) if whole else known[number] + ids


@dataclass
class Side:
    """An executor under test, one that gets every request alone, and that one's answers."""

    mixed: api.Executor
    alone: api.Executor
    lora: LoraShape
    policy: api.CapacitySchedulerPolicy
    most: int
    """Requests in a mix."""
    drafting: bool
    """Whether steps have drafts from the text of each request."""
    known: dict[Recipe, Answer] = field(default_factory=dict)

    def expected(self, recipe: Recipe) -> Answer:
        """Return the answer to a request alone in its executor."""
        if recipe not in self.known:
            (self.known[recipe],) = run(self.alone, [recipe], self.lora, cancel=False)
        return self.known[recipe]


CASES = {
    "drafts, guaranteed_no_evict": (False, api.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, True, "openvino"),
    "drafts, max_utilization": (False, api.CapacitySchedulerPolicy.MAX_UTILIZATION, True, "openvino"),
    "context logits, max_utilization, whole prompts": (
        True,
        api.CapacitySchedulerPolicy.MAX_UTILIZATION,
        False,
        "openvino",
    ),
    # On PyTorch the model chooses most tokens, and steps overlap.
    "PyTorch, drafts, max_utilization": (False, api.CapacitySchedulerPolicy.MAX_UTILIZATION, True, "torch"),
}
PARAMETERS = [
    pytest.param(case, id=name, marks=[pytest.mark.needs("torch")] if case[-1] == "torch" else [])
    for name, case in CASES.items()
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mix")
    model = Model(path=write_tiny_model(folder / "model", "llama", seed=5))
    return convert_model(model, ConvertSpec(dtype="float32"), out=folder / "checkpoint")


@pytest.fixture(scope="module", params=PARAMETERS)
def side(request: pytest.FixtureRequest, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    context_logits, policy, chunked, runtime = request.param
    spec = BuildSpec(
        max_batch_size=16,
        max_seq_len=128,
        max_num_tokens=128,
        max_beam_width=BEAMS,
        max_draft_len=0 if context_logits else DRAFT,
        speculative_decoding_mode=None if context_logits else "draft_tokens_external",
        max_prompt_embedding_table_size=16 * TABLE_ROWS,
        gather_context_logits=context_logits,
        gather_generation_logits=True,
        lora_plugin="auto",
        lora_target_modules=("attn_q", "attn_v", "mlp_h_to_4h"),
        max_lora_rank=LORA_RANK,
        runtime=runtime,
        device="cpu" if runtime == "torch" else None,
    )
    engine = build_engine(checkpoint, spec, out=tmp_path_factory.mktemp("engine") / "engine").path
    mixed = _executor(engine, checkpoint.path.parent / "model", policy, chunked=chunked, reuse=True, ngrams=True)
    quiet = api.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    alone = _executor(engine, checkpoint.path.parent / "model", quiet, chunked=True, reuse=False, ngrams=False)
    lora = alone._loop._stepper._model.lora  # type: ignore[union-attr]
    assert lora is not None
    with mixed, alone:
        openvino = runtime == "openvino"
        yield Side(mixed, alone, lora, policy, most=64 if openvino else 24, drafting=openvino)


def _executor(
    engine: Path, tokenizer: Path, policy: api.CapacitySchedulerPolicy, *, chunked: bool, reuse: bool, ngrams: bool
) -> api.Executor:
    config = (_Drafting if ngrams else api.ExecutorConfig)(
        max_beam_width=BEAMS,
        enable_chunked_context=chunked,
        iter_stats_max_iterations=1_000_000,
        scheduler_config=api.SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=api.KvCacheConfig(enable_block_reuse=reuse, max_tokens=KV_TOKENS),
        gather_generation_logits=True,
        guided_decoding_config=api.GuidedDecodingConfig(
            api.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE,
            tokenizer_str=(tokenizer / "tokenizer.json").read_text(encoding="utf-8"),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        # How fast a busy machine is must not decide whether there are drafts.
        patch.setattr(paged_model, "measure_steps", lambda _: [dict.fromkeys(SIZES, 1.0)])
        return api.Executor(engine, api.ModelType.DECODER_ONLY, config)


class _Drafting(api.ExecutorConfig):
    """With drafts from the text of each request."""

    ngram_max_draft_len = 6


def run(executor: api.Executor, mix: list[Recipe], lora: LoraShape, *, cancel: bool = True) -> list[Answer]:
    """Send all of `mix` at once and take every response until each request has had its last one, for a bounded time."""
    ids = executor.enqueue_requests([request_of(recipe, lora) for recipe in mix])
    answers = {number: Answer() for number in ids}
    by_id = dict(zip(ids, mix, strict=True))
    cancelling: dict[int, list[int]] = defaultdict(list)
    for number, recipe in by_id.items():
        if cancel and recipe.cancel_after is not None:
            cancelling[recipe.cancel_after].append(number)
    for number in cancelling.pop(0, ()):
        executor.cancel_request(number)
    deadline = time.monotonic() + SOON
    while not all(answer.finals for answer in answers.values()):
        assert time.monotonic() < deadline, "not every request was answered"
        for response in executor.await_responses(timeout=0.5):
            assert isinstance(response, api.Response)
            number = response.request_id
            answers[number].add(by_id[number], response)
            if number in cancelling.get(answers[number].responses, ()):
                executor.cancel_request(number)
    assert executor.get_num_responses_ready() == 0
    return list(answers.values())


@EXAMPLES
@given(data=st.data())
def test_a_mix_is_answered_as_if_each_were_alone(side: Side, data: st.DataObject) -> None:
    context_logits = side.mixed.limits.gather_context_logits
    mix = data.draw(st.lists(recipes(context_logits=context_logits), min_size=1, max_size=side.most))
    before = free_blocks(side.mixed)
    answers = run(side.mixed, mix, side.lora)
    for recipe, answer in zip(mix, answers, strict=True):
        assert answer.error is None, recipe
        _compare(recipe, answer, side.expected(recipe))
    worker = loop_of(side.mixed)
    assert worker is not None
    assert free_blocks(side.mixed) == before == worker.cache.pool.count
    assert not worker.scheduler.active


def test_the_mixes_reached_the_hard_cases(side: Side) -> None:
    """Blocks are found again; the policy that pauses does so when a mix outgrows the cache, the other one never."""
    recipe = Recipe(prompt=len(PROMPTS) - 1, max_tokens=4, streaming=False, features=(("sampling", "greedy"),))
    for _ in range(2):  # drawn mixes share prompts, but which ones differs with the versions of what draws them
        (answer,) = run(side.mixed, [recipe], side.lora)
        _compare(recipe, answer, side.expected(recipe))
    assert side.mixed._loop is not None
    assert loop_of(side.mixed).cache.reused_total > 0
    running = set(side.mixed.enqueue_requests([api.Request([5 + number] * 60, 60) for number in range(8)]))
    deadline = time.monotonic() + SOON
    while running and time.monotonic() < deadline:
        for response in side.mixed.await_responses(timedelta(seconds=1)):
            assert isinstance(response, api.Response)
            assert not response.has_error(), response.error_msg
            running -= {response.request_id} if response.result.is_final else set()
    assert not running
    records = side.mixed.get_latest_iteration_stats()
    paused = max(record.inflight_batching_stats.num_paused_requests for record in records)  # type: ignore[union-attr]
    drafts = [record.specdec_stats for record in records if record.specdec_stats is not None]
    assert (sum(each.num_accepted_tokens for each in drafts) > 0) == side.drafting
    assert (paused > 0) == (side.policy is api.CapacitySchedulerPolicy.MAX_UTILIZATION)


def _compare(recipe: Recipe, answer: Answer, expected: Answer) -> None:
    """Compare answers; that of a cancelled request is the beginning of its complete answer."""
    assert expected.error is None, (recipe, expected.error)
    for number, beams in answer.tokens.items():
        for beam, tokens in enumerate(beams):
            complete = expected.tokens[number][beam]
            if not answer.cancelled:
                assert tokens == complete, recipe
            elif recipe.beams == 1:
                assert tokens == complete[: len(tokens)], recipe
    if answer.cancelled:
        return
    assert answer.tokens.keys() == expected.tokens.keys(), recipe
    for number, result in answer.last.items():
        other = expected.last[number]
        assert result.finish_reasons == other.finish_reasons, recipe
        assert (result.cum_log_probs is None) == ("log_probs" not in dict(recipe.features))
        for name in ("cum_log_probs", "context_logits", "generation_logits"):
            _close(recipe, getattr(result, name), getattr(other, name))
        for ours, theirs in zip(result.log_probs or (), other.log_probs or (), strict=True):
            _close(recipe, ours, theirs)


def _close(recipe: Recipe, ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None), recipe
    if ours is not None:
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3, err_msg=str(recipe))


def test_new_weights_under_a_task_id_reuse_no_old_blocks(side: Side) -> None:
    """A task id may be evicted and return with another adapter, whose keys and values differ."""
    tokens = list(range(3, 103))

    def answer(seed: int, task: int) -> list[int]:
        lora = api.LoraConfig(task, *random_adapter(side.lora, seed=seed, rank=LORA_RANK))
        number = side.mixed.enqueue_request(api.Request(tokens, 8, lora_config=lora))
        (response,) = side.mixed.await_responses(number, timedelta(seconds=SOON))
        assert isinstance(response, api.Response)
        return response.result.output_token_ids[0][len(tokens) :]

    first, second = answer(1, 101), answer(2, 102)
    assert first != second
    assert side.mixed._loop is not None
    cached = loop_of(side.mixed)._admission._adapters._adapters
    del cached[101]
    assert answer(2, 101) == second


def test_the_mix_covers_what_it_claims(side: Side) -> None:
    """Each feature alone changes the answer, and no recipe is refused."""
    wanted: list[dict[str, Any]] = [
        {"beam_width": 3},
        {"num_return_sequences": 3, "sampling": "top_k"},
        {"guided": True},
        {"log_probs": True},
        {"generation_logits": True},
        {"table": "table"},
        {"adapter": "adapter 1"},
        {"context_logits": True} if side.mixed.limits.gather_context_logits else {"draft": DRAFT},
    ]
    mix = [
        Recipe(1, MOST_TOKENS, streaming=False, features=tuple(sorted(({"sampling": "greedy"} | each).items())))
        for each in wanted
    ]
    answers = run(side.mixed, mix, side.lora)
    assert [answer.error for answer in answers] == [None] * len(mix)
    assert len(answers[0].tokens[0]) == 3
    assert sorted(answers[1].tokens) == [0, 1, 2]
    assert all(answers[index].last[0].generation_logits is not None for index in (4,))
