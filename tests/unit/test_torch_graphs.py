"""What CUDA graphs are replayed with: here a graph computes its step again, with kernels that the interpreter runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.executors import collect
from tests.support.tiny_decoders import tiny_decoder
from trtserve.executor import api
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.model import StepInputs

pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]
BATCH = 4


class _Recorder:
    """Keeps what a graph would capture; it computes on the same buffers."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def record(self, what: str, run: Callable[[], None]) -> Any:
        self.steps.append(what)
        return SimpleNamespace(replay=run)


@pytest.fixture
def _unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not pinned without a GPU."""
    import torch

    zeros = torch.zeros

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
        del pin_memory
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())


def _answers(model: Any) -> list[Any]:
    limits = EngineLimits(
        max_batch_size=BATCH, max_seq_len=60, max_num_tokens=24, vocab_size=model.vocab_size, chunked=True
    )
    config = api.ExecutorConfig(enable_chunked_context=True, kv_cache_config=api.KvCacheConfig(max_tokens=320))
    generator, sampling = np.random.default_rng(0), api.SamplingConfig
    kinds: list[dict[str, Any]] = [{}, {"sampling_config": sampling(top_k=9, seed=4)}, {"bad_words": [[5]]}, {}]
    requests = [
        api.Request(generator.integers(11, model.vocab_size, 2 + 9 * (number % 4)).tolist(), 4 + number, **options)
        for number, options in enumerate(kinds * 2)
    ]
    with api.Executor.from_model(model, limits, config) as executor:
        found = collect(executor, executor.enqueue_requests(requests))
    return [[response.result.output_token_ids for response in responses] for responses in found.values()]


@pytest.mark.usefixtures("_unpinned")
def test_captured_steps_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts, chunks without logits, and those that only decode."""
    from tests.support.torch_models import torch_model
    from trtserve.executor.torch import graphs
    from trtserve.executor.torch.choosing_model import ChoosingTorchModel

    tiny = tiny_decoder()
    expected = _answers(torch_model(tiny, model_class=ChoosingTorchModel, batch=BATCH))
    recorder = _Recorder()
    monkeypatch.setattr(graphs, "GraphRecorder", lambda: recorder)
    monkeypatch.setattr(graphs, "_replayed", lambda _: 0.005)  # the seconds of every step
    model: Any = torch_model(tiny, model_class=ChoosingTorchModel, batch=BATCH)
    monkeypatch.setattr(model, "warm_up", model._capture)
    eager: list[StepInputs] = []
    monkeypatch.setattr(model, "inputs", eager.append)  # and fail
    assert _answers(model) == expected
    assert not eager
    assert f"step of 64 tokens of {BATCH} sequences" in recorder.steps
    assert f"decode step of {BATCH} rows" in recorder.steps


def test_a_capture_that_fails_names_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trtserve.executor.torch.graphs import GraphRecorder

    class Graph:
        def __enter__(self) -> None:
            """Begin to capture."""

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": object}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: Graph())
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the first error")

    with pytest.raises(RuntimeError, match=r"decode step of 8 rows could not be captured.*ValueError: the first error"):
        GraphRecorder().record("decode step of 8 rows", run)
