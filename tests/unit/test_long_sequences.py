"""LongRoPE: which sequences use the long factors, and what happens when one becomes long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.schedulers import add, make_scheduler, make_sequence, run_step
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.executor.engine.batch import Batch
from trtserve.executor.engine.limits import EngineOptions, resolve_limits
from trtserve.executor.engine.sequence import Logits

BEYOND = 12


@pytest.mark.parametrize(("max_seq_len", "expected"), [(4096, None), (4097, 4096), (131072, 4096)])
def test_only_engines_for_longer_sequences_have_a_threshold(max_seq_len: int, expected: int | None) -> None:
    build = {"max_batch_size": 1, "max_seq_len": max_seq_len, "max_num_tokens": 64}
    model: dict[str, Any] = {
        "vocab_size": 97,
        "position_embedding_type": "long_rope",
        "original_max_position_embeddings": 4096,
    }
    engine = {"build_config": build, "pretrained_config": model}
    assert resolve_limits(EngineConfig.of(engine), EngineOptions()).long_rope_beyond == expected
    model["position_embedding_type"] = "rope_gpt_neox"
    assert resolve_limits(EngineConfig.of(engine), EngineOptions()).long_rope_beyond is None


def test_beams_count_their_maximum_length() -> None:
    assert not make_sequence(1, 12, new=50).is_long(BEYOND)
    assert make_sequence(1, 13, new=1).is_long(BEYOND)
    assert make_sequence(1, 10, new=3, width=2).is_long(BEYOND)
    assert not make_sequence(1, 10, new=2, width=2).is_long(BEYOND)
    assert make_sequence(1, 10, new=3, single_step=True).is_long(BEYOND)


def test_sequence_that_becomes_long_is_recomputed_in_its_blocks() -> None:
    scheduler = make_scheduler(long_rope_beyond=BEYOND)
    growing, short = add(scheduler, 1, 10, new=8), add(scheduler, 2, 3, new=8)
    for total in (11, 12, 13):
        run_step(scheduler)
        assert growing.prompt_length + len(growing.generated) == total
    slots = growing.slots
    plan = run_step(scheduler)
    assert plan.chunks == [(growing, 13)]
    assert plan.generations == [short]
    assert (growing.slots, growing.context.tolist()) == (slots, [*range(10), 1, 1, 1])
    assert growing.is_long(BEYOND)
    plan = run_step(scheduler)
    assert not plan.chunks
    assert len(growing.generated) == 5


def test_model_gets_a_flag_per_sequence_and_beam() -> None:
    scheduler = make_scheduler(long_rope_beyond=BEYOND, beams=2)
    batch = Batch(scheduler.limits, scheduler.cache)
    add(scheduler, 1, 13, new=2, width=2)
    add(scheduler, 2, 5, new=2, width=2)
    flags = batch.fill(scheduler.plan_step()).inputs.long_sequences
    assert flags is not None
    assert flags.tolist() == [True, False]


def test_context_logits_keep_those_of_the_first_rotation() -> None:
    scheduler = make_scheduler(long_rope_beyond=BEYOND)
    logits = Logits(context=np.zeros((10, 97), np.float32), generation=None)
    growing = add(scheduler, 1, 10, new=8, logits=logits)
    batch = Batch(scheduler.limits, scheduler.cache)
    plan = scheduler.plan_step()
    assert [span.count for span in batch.fill(plan).contexts] == [10]
    growing.computed, growing.generated[:] = 12, [1, 1, 1]
    plan = scheduler.plan_step()
    assert plan.chunks == [(growing, 13)]
    assert batch.fill(plan).contexts == []


def test_models_without_longrope_get_no_flags() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 13)
    batch = Batch(scheduler.limits, scheduler.cache)
    assert batch.fill(scheduler.plan_step()).inputs.long_sequences is None
