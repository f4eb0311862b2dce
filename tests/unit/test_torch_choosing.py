"""A model on PyTorch that chooses tokens gives the answers of one that leaves them to the executor."""

from __future__ import annotations

import string
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.executors import collect, free_blocks, loop_of
from tests.support.tiny_decoders import TinyDecoder, tiny_decoder
from trtserve.executor import api
from trtserve.executor.engine.drafts import NgramDrafter
from trtserve.executor.engine.limits import EngineLimits

pytestmark = pytest.mark.needs("torch")
BATCH, LENGTH = 6, 60


def _requests(vocabulary: int) -> list[api.Request]:
    """Return requests of all kinds; what only the host can do is among them."""
    sampling = api.SamplingConfig
    guide = partial(api.GuidedDecodingParams, api.GuidedDecodingParams.GuideType.REGEX)
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling_config": sampling(top_k=9, temperature=1.5, seed=4), "streaming": True},
        {"sampling_config": sampling(top_p=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.2)},
        {"sampling_config": sampling(top_p=0.9, top_p_decay=0.8, seed=5)},
        {"sampling_config": sampling(no_repeat_ngram_size=2, min_tokens=4), "end_id": 3},
        {"bad_words": [[5], [6]], "sampling_config": sampling(top_k=50, seed=1, min_tokens=4), "end_id": 3},
        {"bad_words": [[5, 6]], "stop_words": [[7], [8], [9, 10]]},
        {"output_config": api.OutputConfig(return_log_probs=True), "sampling_config": sampling(top_k=5, seed=2)},
        {"output_config": api.OutputConfig(return_generation_logits=True)},
        {"output_config": api.OutputConfig(return_context_logits=True)},
        {"embedding_bias": np.linspace(-1, 1, vocabulary, dtype=np.float32)},
        {"sampling_config": sampling(num_return_sequences=2, top_k=7, seed=3)},
        {"guided_decoding_params": guide("ab(c|d)+e"), "end_id": 3},
        {"guided_decoding_params": guide("[f-p]+"), "end_id": 3, "sampling_config": sampling(top_k=50, seed=7)},
        {
            "guided_decoding_params": guide("([q-z]|<[0-9]*>)*"),
            "end_id": 3,
            "output_config": api.OutputConfig(return_log_probs=True),
            "sampling_config": sampling(top_p=0.95, seed=8, repetition_penalty=1.2, min_tokens=3),
        },
    ]
    generator = np.random.default_rng(0)
    prompts = [generator.integers(11, vocabulary, 3 + 2 * number).tolist() for number in range(len(kinds))]
    return [api.Request(prompt, 14, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]


class _Drafting(api.ExecutorConfig):
    ngram_max_draft_len = 4


def _answers(
    model: Any, requests: list[api.Request], *, overlaps: bool, made: type[api.ExecutorConfig] = api.ExecutorConfig
) -> list[Any]:
    vocabulary = [*string.ascii_lowercase, *(f"<{token}>" for token in range(26, model.vocab_size))]
    config = made(
        iter_stats_max_iterations=1000,
        enable_chunked_context=True,
        kv_cache_config=api.KvCacheConfig(max_tokens=320),
        gather_generation_logits=True,
        guided_decoding_config=api.GuidedDecodingConfig(
            api.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE, vocabulary, None, [3]
        ),
    )
    limits = EngineLimits(
        max_batch_size=BATCH,
        max_seq_len=LENGTH,
        max_num_tokens=20,
        vocab_size=model.vocab_size,
        chunked=True,
        gather_generation_logits=True,
        gather_context_logits=True,
    )
    with api.Executor.from_model(model, limits, config) as executor:
        assert executor._loop is not None
        assert loop_of(executor)._stepper.overlaps == overlaps
        before = free_blocks(executor)
        found = collect(executor, executor.enqueue_requests(requests))
        assert free_blocks(executor) == before
        records = [record.specdec_stats for record in executor.get_latest_iteration_stats()]
        assert (sum(each.num_accepted_tokens for each in records if each) > 0) == (made is _Drafting)
    answers = []
    for responses in found.values():
        tokens: dict[int, list[int]] = {}
        for response in responses:
            assert not response.has_error(), response.error_msg
            tokens.setdefault(response.result.sequence_index, []).extend(response.result.output_token_ids[0])
        result = responses[-1].result
        answers.append(
            (tokens, result.finish_reasons, result.log_probs, result.generation_logits, result.context_logits)
        )
    return answers


def test_the_model_chooses_the_tokens_of_drafts(tiny: TinyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed: here every fourth guess is wrong."""
    from tests.support.torch_models import torch_model
    from trtserve.executor.torch.choosing_model import ChoosingTorchModel

    model = torch_model(tiny, model_class=ChoosingTorchModel, batch=16)
    assert isinstance(model, ChoosingTorchModel)
    requests = [_requests(model.vocab_size)[number] for number in (0, 1, 7, 8, 11)]
    expected = _answers(model, requests, overlaps=True)
    known = {
        tuple(request.input_token_ids): [
            tokens[0 if request.streaming else len(request.input_token_ids) :] for tokens in answer[0].values()
        ]
        for request, answer in zip(requests, expected, strict=True)
    }

    class Told(NgramDrafter):
        def __init__(self, tokens: Any, **_: Any) -> None:
            self._answers = known[tuple(tokens)]
            self._so_far: list[int] = []

        def accept(self, token: int) -> None:
            self._so_far.append(token)

        def gains(self, length: int) -> list[float]:
            return [1.0] * min(length, 4)

        def draft(self, length: int) -> list[int]:
            begin = len(self._so_far)
            mine = next(each for each in self._answers if each[:begin] == self._so_far)
            return [token if place % 4 else 9 for place, token in enumerate(mine)][begin : begin + length]

    monkeypatch.setattr("trtserve.executor.engine.admission.NgramDrafter", Told)
    model = torch_model(tiny, model_class=ChoosingTorchModel, batch=16)
    assert isinstance(model, ChoosingTorchModel)
    model.step_costs = model.plain_costs = [1.0] * 16
    for ours, theirs in zip(_answers(model, requests, overlaps=True, made=_Drafting), expected, strict=True):
        assert ours[:2] == theirs[:2]
        np.testing.assert_allclose(np.array(ours[2] or 0), np.array(theirs[2] or 0), atol=1e-4)


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return tiny_decoder()


def test_answers_do_not_depend_on_who_chooses(tiny: TinyDecoder) -> None:
    from tests.support.torch_models import torch_model
    from trtserve.executor.torch.choosing_model import ChoosingTorchModel

    host, device = torch_model(tiny), torch_model(tiny, model_class=ChoosingTorchModel, batch=BATCH)
    requests = _requests(host.vocab_size)
    expected = _answers(host, requests, overlaps=False)
    for ours, theirs in zip(_answers(device, requests, overlaps=True), expected, strict=True):
        assert ours[:2] == theirs[:2]
        for mine, other in zip(ours[2:], theirs[2:], strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_allclose(np.array(mine), np.array(other), atol=1e-4)
