"""Beam search on a float32 engine of a random llama: beams, their order and their scores equal transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES
from trtserve.artifacts import Model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

EARLY_STOPPING = {1: True, 0: False, 2: "never"}
"""SamplingConfig.early_stopping to `generate(early_stopping=…)`; every number above 1 means the same.

The other parameters: beam_width is `num_beams`; length_penalty is `length_penalty`, whose default is 0 here and 1 there
(both divide the sum of log-probabilities by length ** penalty, the end token counts); num_return_sequences, end_id and
max_tokens are `num_return_sequences`, `eos_token_id` and `max_new_tokens`. cum_log_probs are the sums, so
`sequences_scores` times length ** penalty. beam_search_diversity_rate has no counterpart.
"""

WIDTHS = (2, 4)
LENGTHS = (1, 7, 18)
PENALTIES = (0.0, 0.6, 1.0, 2.0)
PROMPT_LENGTHS = (1, 33)


@dataclass(frozen=True)
class Beams:
    """Tokens without the end token, and sums of log-probabilities, best first."""

    tokens: list[list[int]]
    sums: list[float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("beams") / "model", "llama", seed=5)


@pytest.fixture(scope="module", params=ENGINES)
def executor(request: pytest.FixtureRequest, folder: Path) -> Iterator[api.Executor]:
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32"), out=folder.parent / "checkpoint")
    build = ENGINES[request.param]
    limits = BuildSpec(max_batch_size=4, max_beam_width=4, max_seq_len=96, max_num_tokens=64, **build)
    engine = build_engine(checkpoint, limits, out=folder.parent / request.param)
    with api.Executor(engine.path, api.ModelType.DECODER_ONLY, api.ExecutorConfig(max_beam_width=4)) as running:
        yield running


class Transformers:
    """The search of the original model."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self._torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32).eval()

    def search(self, prompt: list[int], *, end_id: int | None, length_penalty: float, **options: Any) -> Beams:
        ids = self._torch.tensor([prompt])
        found = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            num_return_sequences=options["num_beams"],
            length_penalty=length_penalty,
            eos_token_id=-1 if end_id is None else end_id,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        tokens, sums = [], []
        for row, score, beams in zip(found.sequences, found.sequences_scores, found.beam_indices, strict=True):
            length = int((beams >= 0).sum())
            new = row[len(prompt) : len(prompt) + length].tolist()
            sums.append(float(score) * length**length_penalty)
            tokens.append(new[:-1] if new[-1] == end_id else new)
        return Beams(tokens, sums)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Transformers:
    return Transformers(folder)


def _search(executor: api.Executor, requests: list[api.Request]) -> list[Beams]:
    found = []
    for number in executor.enqueue_requests(requests):
        (response,) = executor.await_responses(number, timedelta(seconds=60))
        assert isinstance(response, api.Response)
        assert response.result.cum_log_probs is not None
        found.append(Beams(response.result.output_token_ids, response.result.cum_log_probs))
    return found


def _request(
    prompt: list[int], count: int, width: int, penalty: float, early_stopping: int, end_id: int | None
) -> api.Request:
    sampling = api.SamplingConfig(beam_width=width, length_penalty=penalty, early_stopping=early_stopping)
    wanted = api.OutputConfig(exclude_input_from_output=True, return_log_probs=True)
    return api.Request(prompt, count, sampling_config=sampling, output_config=wanted, end_id=end_id)


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(3, 320, size=length).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_beams_equal_transformers(
    executor: api.Executor, oracle: Transformers, width: int, early_stopping: int
) -> None:
    cases = []
    for number, prompt in enumerate(_prompts()):
        for index, count in enumerate(LENGTHS):
            penalty = PENALTIES[(number + index) % len(PENALTIES)]
            free = oracle.search(
                prompt,
                end_id=None,
                length_penalty=penalty,
                num_beams=width,
                max_new_tokens=count,
                early_stopping=EARLY_STOPPING[early_stopping],
            )
            # Tokens that the search comes by, early and late, so that some beams end and others go on.
            ends = {free.tokens[-1][len(free.tokens[-1]) // 3], free.tokens[1][-1]}
            cases += [(prompt, count, penalty, end_id) for end_id in (None, *sorted(ends))]
    requests = [_request(p, n, width, penalty, early_stopping, end) for p, n, penalty, end in cases]
    ended = 0
    for case, ours in zip(cases, _search(executor, requests), strict=True):
        prompt, count, penalty, end_id = case
        theirs = oracle.search(
            prompt,
            end_id=end_id,
            length_penalty=penalty,
            num_beams=width,
            max_new_tokens=count,
            early_stopping=EARLY_STOPPING[early_stopping],
        )
        ended += any(len(tokens) < count for tokens in theirs.tokens)
        assert ours.tokens == theirs.tokens, case
        assert ours.sums == pytest.approx(theirs.sums, abs=2e-4), case
    assert ended > len(cases) // 4


@pytest.mark.needs("torch")
def test_the_best_beams_alone_can_be_asked_for(executor: api.Executor) -> None:
    prompt = _prompts()[1]
    (all_beams,) = _search(executor, [_request(prompt, 9, 4, 0.0, 1, None)])
    sampling = api.SamplingConfig(beam_width=4, num_return_sequences=2)
    wanted = api.OutputConfig(exclude_input_from_output=True, return_log_probs=True)
    (best,) = _search(executor, [api.Request(prompt, 9, sampling_config=sampling, output_config=wanted)])
    assert best == Beams(all_beams.tokens[:2], all_beams.sums[:2])
    assert all_beams.sums == sorted(all_beams.sums, reverse=True)
