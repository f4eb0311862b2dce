"""A model in transformers on PyTorch, float32: the reference for logits and greedy tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from packaging.version import Version

from tests.support.stages import build_engine, convert_model
from trtserve.artifacts import Engine, Model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

ENGINES: dict[str, dict[str, Any]] = {
    "openvino": {"runtime": "openvino", "kv_precision": "f32"},
    "torch": {"runtime": "torch", "device": os.environ.get("TRTSERVE_TEST_DEVICE", "cpu")},
}
"""Options of `build` for float32 engines of each embedded runtime; those of torch also run on a GPU."""


class Oracle:
    """transformers' model."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

        self._torch = torch

        self._torch.set_num_threads(1)
        # The eager attention of its Falcon adds alibi twice.
        described = json.loads((folder / "config.json").read_text())
        # transformers 5.17 reads neither the gate's constants of gpt-oss nor the rotated share of MiniMax M2, looks up
        # Gemma 3n's tokens beyond its second table, norms all groups of the states of Granite and Bamba together, and
        # lacks some families. A GPU machine may have it; the lock file has a later one.
        kind = described["model_type"]
        partly = kind in ("gpt_oss", "minimax_m2", "gemma3n") or kind not in CONFIG_MAPPING
        partly |= kind in ("granitemoehybrid", "bamba") and described.get("mamba_n_groups", 1) > 1
        if partly and Version(__version__) < Version("5.24"):
            pytest.skip(f"transformers {__version__} does not read all of this config")
        attention = "sdpa" if kind == "falcon" else "eager"
        # "gelu" in a config of Gemma means its approximation, which transformers 5.17 does not know.
        meant = {"hidden_act": "gelu_pytorch_tanh"} if kind == "gemma" else {}
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self._torch.float32, attn_implementation=attention, **meant
        )
        self._model = loaded.eval()

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """[tokens, vocab]."""
        with self._torch.inference_mode():
            values: npt.NDArray[np.float32] = self._model(self._torch.tensor([ids]), use_cache=False).logits[0].numpy()
        return values

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most probable tokens, each computed from the complete sequence before it."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def engine_of(folder: Path, out: Path, convert: ConvertSpec, build: BuildSpec) -> Engine:
    """Convert and build the model of a folder below `out`."""
    checkpoint = convert_model(Model(path=folder), convert, out=out / "checkpoint")
    return build_engine(checkpoint, build, out=out / "engine")


def greedy_tokens(engine: Path, requests: Sequence[tuple[list[int], int]], **config: Any) -> list[list[int]]:
    """New tokens of the requests (prompt, count), all enqueued at once."""
    output = api.OutputConfig(exclude_input_from_output=True)
    with api.Executor(engine, api.ModelType.DECODER_ONLY, api.ExecutorConfig(**config)) as executor:
        answers = []
        queued = [api.Request(prompt, count, output_config=output) for prompt, count in requests]
        for number in executor.enqueue_requests(queued):
            (answer,) = executor.await_responses(number, timedelta(seconds=60))
            assert isinstance(answer, api.Response)
            answers.append(list(answer.result.output_token_ids[0]))
    return answers
