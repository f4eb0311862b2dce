"""Requests for one float32 engine of a random model, and the results that they get."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

VOCAB = 320
PROMPT_LENGTHS = (5, 1, 33, 12, 47, 8, 20, 31)
COUNT = 16
"""Tokens that are asked for unless a test says how many."""
_OF_REQUEST = (
    "end_id",
    "bad_words",
    "embedding_bias",
    "guided_decoding_params",
    "num_return_sequences",
    "external_draft_tokens_config",
)


def build_tiny_engine(folder: Path) -> None:
    """Fill `folder` with a random `model` and its `engine`, which takes drafts."""
    model = write_tiny_model(folder / "model", "llama", seed=5)
    checkpoint = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=folder / "checkpoint")
    spec = BuildSpec(
        max_batch_size=8,
        max_seq_len=128,
        max_num_tokens=256,
        max_draft_len=8,
        speculative_decoding_mode="draft_tokens_external",
        runtime="openvino",
    )
    build_engine(checkpoint, spec, out=folder / "engine")


def prompt_of(number: int) -> list[int]:
    """One of eight random prompts."""
    tokens: list[int] = np.random.default_rng(number).integers(3, 259, size=PROMPT_LENGTHS[number]).tolist()
    return tokens


def request_of(number: int = 0, *, count: int = COUNT, log_probs: bool = False, **parts: Any) -> api.Request:
    """A request for prompt `number`; `parts` are parameters of Request or of SamplingConfig."""
    settings = {name: parts.pop(name) for name in _OF_REQUEST if name in parts}
    return api.Request(
        prompt_of(number),
        count,
        sampling_config=api.SamplingConfig(**parts),
        output_config=api.OutputConfig(exclude_input_from_output=True, return_log_probs=log_probs),
        **settings,
    )


def answers(executor: api.Executor, requests: list[api.Request]) -> list[list[api.Response]]:
    """The responses of each request, all enqueued at once; those of several sequences in their order."""
    collected = []
    for number in executor.enqueue_requests(requests):
        responses: list[api.Response] = []
        while not responses or not (responses[-1].has_error() or responses[-1].result.is_final):
            new = executor.await_responses(number, timedelta(seconds=60))
            assert new, "no answer within a minute"
            responses += [each for each in new if isinstance(each, api.Response)]
        collected.append(sorted(responses, key=lambda each: 0 if each.has_error() else each.result.sequence_index))
    return collected


def results(executor: api.Executor, *requests: api.Request) -> list[api.Result]:
    """The only result of each request."""
    found = []
    for (response,) in answers(executor, list(requests)):
        assert not response.has_error(), response.error_msg
        found.append(response.result)
    return found


def tokens(executor: api.Executor, *requests: api.Request) -> list[list[int]]:
    """The generated tokens of each request."""
    return [result.output_token_ids[0] for result in results(executor, *requests)]


def log_probs_of(result: api.Result) -> list[float]:
    """The log-probabilities of the only beam."""
    assert result.log_probs is not None
    return result.log_probs[0]
