"""A converted adapter is PEFT's: patterns, rsLoRA and ranks change matrices, logits and answers as they do there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.stages import convert_adapter
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES, engine_of
from trtserve.executor import api
from trtserve.pipeline.lora import CONFIG, WEIGHTS
from trtserve.specs import BuildSpec, ConvertSpec

# PEFT asks transformers for a name that this has renamed.
pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

WORDS = {1: "q_proj", 2: "k_proj", 3: "v_proj", 4: "o_proj", 5: "gate_proj", 6: "down_proj", 7: "up_proj"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"v_proj": 2, r"layers\.1\.self_attn\.q_proj": 6},
        "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 1, "q_proj": 3},
    },
}


ENGINE_MODULES = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
PROMPT, COUNT = [1, 70, 71, 72, 90], 12
# The float32 matrices of PEFT and of the engine are multiplied in another order.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("lora") / "model")


def tuned_model(base: Path, folder: Path, **settings: Any) -> Any:
    """Let PEFT tune the model in `base` at random; its adapter is saved in `folder`."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(len(settings))
    spec = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(WORDS.values()), init_lora_weights=False, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tuned = peft.get_peft_model(model, spec).eval()
    tuned.save_pretrained(str(folder))
    return tuned


def added_matrices(model: Any) -> dict[tuple[int, str], Any]:
    """(layer, module) → the matrix that the adapter adds."""
    added = {}
    for layer, block in enumerate(model.base_model.model.model.layers):
        for part in (block.self_attn, block.mlp):
            for name, module in part.named_children():
                if hasattr(module, "get_delta_weight"):
                    added[layer, name] = module.get_delta_weight("default").detach().numpy()
    return added


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_rows_hold_what_peft_adds(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    added = added_matrices(tuned_model(folder, tmp_path / "adapter", **settings))
    adapter = convert_adapter(tmp_path / "adapter", storage_type="float32")
    weights, table = np.load(adapter.path / WEIGHTS)[0], np.load(adapter.path / CONFIG)[0]
    assert len(table) == len(added) == 14
    for row, (number, layer, rank) in zip(weights, table.tolist(), strict=True):
        expected = added[layer, WORDS[number]]
        outputs, inputs = expected.shape
        first = row[: rank * inputs].reshape(rank, inputs)
        second = row[rank * inputs : rank * (inputs + outputs)].reshape(outputs, rank)
        np.testing.assert_allclose(second @ first, expected, rtol=1e-5, atol=1e-6)
        assert not row[rank * (inputs + outputs) :].any()


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and logits f32[tokens, vocab] after each token of the prompt and of the answer but the last."""

    tokens: list[int]
    logits: Any


def answer_of(model: Any) -> Answer:
    """Return the answer to PROMPT of a transformers model, with or without PEFT."""
    import torch

    ids, logits = list(PROMPT), torch.empty(0)
    with torch.inference_mode():
        for _ in range(COUNT):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            ids.append(int(logits[-1].argmax()))
    return Answer(ids[len(PROMPT) :], logits.numpy())


@pytest.fixture(scope="module")
def tuned(folder: Path) -> dict[str, Answer]:
    """Settings → PEFT's answer with an adapter of them, which lies beside the model; "" is the plain model's."""
    answers = {}
    for name, settings in SETTINGS.items():
        model = tuned_model(folder, folder.parent / name, **settings)
        answers[name] = answer_of(model)
        with model.disable_adapter():
            answers[""] = answer_of(model)
    return answers


@pytest.fixture(scope="module", params=ENGINES)
def executor(request: pytest.FixtureRequest, folder: Path) -> Iterator[api.Executor]:
    """A float32 engine of the model that takes adapters on every module."""
    build = BuildSpec(
        max_batch_size=8,
        max_seq_len=128,
        **ENGINES[request.param],
        gather_context_logits=True,
        gather_generation_logits=True,
        lora_plugin="auto",
        lora_target_modules=ENGINE_MODULES,
        max_lora_rank=8,
    )
    engine = engine_of(folder, folder.parent / request.param, ConvertSpec(dtype="float32"), build)
    with api.Executor(engine.path, api.ModelType.DECODER_ONLY, api.ExecutorConfig()) as running:
        yield running


def request(adapter: Path | None, task: int) -> api.Request:
    """PROMPT with an adapter of PEFT's, as `trtserve lora` converts it."""
    lora = None
    if adapter is not None:
        converted = convert_adapter(adapter, storage_type="float32").path
        lora = api.LoraConfig(task, np.load(converted / WEIGHTS)[0], np.load(converted / CONFIG)[0])
    output = api.OutputConfig(exclude_input_from_output=True, return_context_logits=True, return_generation_logits=True)
    return api.Request(PROMPT, COUNT, output_config=output, lora_config=lora)


def test_one_batch_answers_as_peft_does(folder: Path, tuned: dict[str, Answer], executor: api.Executor) -> None:
    """Requests with every adapter and with none, all enqueued at once, give PEFT's tokens and logits."""
    requests = [request(folder.parent / name if name else None, task) for task, name in enumerate(tuned, start=1)]
    assert len({tuple(answer.tokens) for answer in tuned.values()}) == len(SETTINGS) + 1
    for number, expected in zip(executor.enqueue_requests(requests), tuned.values(), strict=True):
        (response,) = executor.await_responses(number, timedelta(seconds=60))
        assert isinstance(response, api.Response)
        result: Any = response.result
        assert result.output_token_ids[0] == expected.tokens
        found = np.concatenate([result.context_logits, result.generation_logits[0][1:]])
        np.testing.assert_allclose(found, expected.logits, atol=TOLERANCE)
