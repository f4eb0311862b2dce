"""Layers with a state in the executor: reuse, chunks, beams, pauses and several sequences equal a run without them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.errors import UsageError
from trtserve.executor import api
from trtserve.executor.engine.blocks import DEFAULT_RETENTION as RETAINED
from trtserve.executor.engine.blocks import BlockTree
from trtserve.executor.engine.kv_cache import StateRows
from trtserve.executor.engine.limits import EngineLimits, state_rows
from trtserve.specs import BuildSpec, ConvertSpec

RUNTIMES = [
    pytest.param((runtime, family), id=f"{runtime}-{family}", marks=[pytest.mark.needs("torch")] * (runtime == "torch"))
    for runtime in ("openvino", "torch")
    for family in ("lfm2", "falcon_h1")  # states instead of attention, and beside it
]
PROMPT = np.random.default_rng(3).integers(3, 259, 150).tolist()
CHANGED = [*PROMPT[:100], *PROMPT[20:60]]
NEW = 8


def engine(runtime: Literal["openvino", "torch"], folder: Path, family: str = "lfm2", **spec: Any) -> Path:
    model = write_tiny_model(folder / "model", family, gain=1.0)
    checkpoint = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=folder / "checkpoint")
    device: dict[str, Any] = {"device": "cpu"} if runtime == "torch" else {"kv_precision": "f32"}
    build = BuildSpec(runtime=runtime, max_seq_len=256, max_batch_size=4, max_beam_width=3, **device, **spec)
    return build_engine(checkpoint, build, out=folder / "engine").path


@pytest.fixture(scope="module", params=RUNTIMES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runtime, family = request.param
    return engine(runtime, tmp_path_factory.mktemp("states"), family)


def answers(engine: Path, prompts: list[list[int]], *, beams: int = 1, **config: Any) -> tuple[list[Any], int]:
    """Return the new tokens of the prompts, asked one after another, and how many blocks were reused."""
    cache = api.KvCacheConfig(enable_block_reuse=config.pop("reuse", False), max_tokens=config.pop("tokens", None))
    settings = api.ExecutorConfig(kv_cache_config=cache, max_beam_width=beams, **config)
    output = api.OutputConfig(exclude_input_from_output=True)
    with api.Executor(engine, api.ModelType.DECODER_ONLY, settings) as executor:
        found = []
        for prompt in prompts:
            request = api.Request(prompt, NEW, output_config=output, sampling_config=api.SamplingConfig(beams))
            (answer,) = executor.await_responses(executor.enqueue_request(request), timedelta(seconds=60))
            assert isinstance(answer, api.Response)
            assert not answer.has_error(), answer.error_msg
            found.append(answer.result.output_token_ids)
        statistics = executor.get_latest_iteration_stats()
    return found, max(each.kv_cache_stats.reused_blocks for each in statistics if each.kv_cache_stats)


def test_a_reused_beginning_continues_from_its_state(built: Path) -> None:
    prompts = [PROMPT, PROMPT, CHANGED, [*PROMPT, 5, 6, 7], PROMPT[:128], PROMPT[:129]]
    plain, none = answers(built, prompts)
    reused, blocks = answers(built, prompts, reuse=True)
    assert none == 0
    assert blocks > 10  # PROMPT again and longer: 4 blocks of 32 tokens, or 9 of 16, each
    assert reused == plain


def test_chunks_give_the_same_tokens(built: Path) -> None:
    plain, _ = answers(built, [PROMPT, CHANGED])
    chunked, _ = answers(built, [PROMPT, CHANGED], reuse=True, max_num_tokens=64, enable_chunked_context=True)
    assert chunked == plain


def test_beams_take_their_states_with_them(built: Path) -> None:
    plain, _ = answers(built, [PROMPT, CHANGED], beams=3)
    reused, _ = answers(built, [PROMPT, CHANGED, PROMPT], beams=3, reuse=True)
    assert reused == [*plain, plain[0]]
    single, _ = answers(built, [PROMPT])
    assert any(beams != single[0] * 3 for beams in plain)


def test_paused_sequences_are_computed_again(built: Path) -> None:
    """Two prompts of 100 tokens with 60 new ones each do not fit 256 tokens at once."""
    output = api.OutputConfig(exclude_input_from_output=True)

    def run(tokens: int, policy: Any) -> list[Any]:
        settings = api.ExecutorConfig(
            kv_cache_config=api.KvCacheConfig(enable_block_reuse=True, max_tokens=tokens),
            scheduler_config=api.SchedulerConfig(policy),
            enable_chunked_context=True,
        )
        with api.Executor(built, api.ModelType.DECODER_ONLY, settings) as executor:
            numbers = executor.enqueue_requests(
                [api.Request(prompt[:100], 60, output_config=output) for prompt in (PROMPT, CHANGED[40:])]
            )
            found: list[Any] = [executor.await_responses(number, timedelta(seconds=60))[0] for number in numbers]
        return [answer.result.output_token_ids for answer in found]

    policies = api.CapacitySchedulerPolicy
    assert run(256, policies.MAX_UTILIZATION) == run(1024, policies.GUARANTEED_NO_EVICT)


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a state instead of attention"):
        engine("openvino", tmp_path, lora_plugin="auto", lora_target_modules=["attn_q"])


def test_the_state_used_longest_ago_is_given_up() -> None:
    copies: list[tuple[list[int], list[int]]] = []
    tree = BlockTree(4)
    rows = StateRows(rows=2, kept=2, copy=lambda *pair: copies.append((list(pair[0]), list(pair[1]))), tree=tree)
    root = tree.root(None, None)
    nodes = [
        tree.insert(root, bytes([n] * tree.block_bytes), n, retention) for n, retention in enumerate([RETAINED] * 4)
    ]
    for node in nodes[:2]:
        rows.keep(0, node)
    rows.restore(nodes[0], 1)
    rows.keep(1, nodes[2])
    assert [node.state for node in nodes] == [3, None, 2, None]
    tree.retire(2)
    tree.forget(nodes[2])  # its state is the first to go though it was used last
    rows.keep(0, nodes[3])
    assert [node.state for node in nodes] == [3, None, None, 2]
    assert copies == [([0], [3]), ([0], [2]), ([3], [1]), ([1], [2]), ([0], [2])]


def test_states_that_do_not_fit_are_refused() -> None:
    limits = EngineLimits(max_batch_size=4, max_seq_len=64, max_num_tokens=64, vocab_size=97)
    assert state_rows(limits, bytes_per_state=0, memory=0, reuse=True) == 0
    assert state_rows(limits, bytes_per_state=10, memory=10_000, reuse=True) == 20
    assert state_rows(limits, bytes_per_state=10, memory=120, reuse=True) == 7
    assert state_rows(limits, bytes_per_state=10, memory=10_000, reuse=False) == 4
    with pytest.raises(RuntimeError, match="--max-batch-size"):
        state_rows(limits, bytes_per_state=10, memory=39, reuse=False)
