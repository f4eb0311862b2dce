"""Models of tiny decoders, driven as a scheduler would: several sequences with any number of new tokens in a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.tiny_decoders import POSITIONS, TinyDecoder
from trtserve.executor.engine.model import ModelRunner, StatefulModel, StepInputs

Logits = npt.NDArray[np.float32]


def write_engine(
    folder: Path,
    tiny: TinyDecoder,
    *,
    compute: str = "f32",
    kv: str = "f32",
    prompt_table: int = 0,
    lora: Sequence[str] = (),
) -> Path:
    """Write an engine folder of `tiny` with the config.json keys that PagedModel reads.

    `prompt_table` and `lora` are what is built in: rows of a prompt table, and the modules of adapters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    from trtserve.executor.openvino.graph import build_graph, save_graph  # machines with GPUs need no OpenVINO

    graph = build_graph(tiny.decoder, tiny.sizes, tiny, packing=tiny.packing)
    save_graph(graph, folder / "rank0.xml")
    config: dict[str, Any] = {
        "pretrained_config": tiny.config,
        "build_config": {
            "max_seq_len": POSITIONS,
            "max_prompt_embedding_table_size": prompt_table,
            "lora_config": {"lora_target_modules": list(lora), "max_lora_rank": 8},
            "plugin_config": {"lora_plugin": "float32" if lora else None},
        },
        "trtserve": {
            "runtime": "openvino",
            "compute_precision": compute,
            "kv_precision": kv,
            "windows": list(tiny.decoder.windows),
            "mlp": tiny.decoder.mlp,
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


MODEL_RUNTIMES = ["openvino", pytest.param("torch", marks=pytest.mark.needs("torch"))]
"""The runtimes whose models are compared with a reference."""


def tiny_model(
    runtime: str,
    folder: Path,
    tiny: TinyDecoder,
    *,
    windows: Sequence[int] | None = None,
    prompt_table: int = 0,
    lora: Sequence[str] = (),
) -> ModelRunner:
    """Return the model of `tiny` in float32; for OpenVINO its engine is written to `folder`."""
    if runtime == "openvino":
        engine = write_engine(folder, tiny, prompt_table=prompt_table, lora=lora)
        from trtserve.executor.openvino.paged_model import PagedModel

        return PagedModel(engine, threads=1, windows=windows)
    from tests.support.torch_models import torch_model

    return torch_model(tiny, windows=windows, prompt_table=prompt_table, lora=lora)


class PagedSteps:
    """Running sequences on `model`; blocks are assigned in a shuffled order."""

    def __init__(self, model: ModelRunner, sequences: Mapping[str, Sequence[int]]) -> None:
        self.model = model
        self.past = dict.fromkeys(sequences, 0)
        self._tokens = {name: np.asarray(ids, dtype=np.int64) for name, ids in sequences.items()}
        needed = {name: -(-len(ids) // model.tokens_per_block) for name, ids in self._tokens.items()}
        total = sum(needed.values())
        model.allocate(total)
        free = [int(block) for block in np.random.default_rng(7).permutation(total)]
        self._rows = {name: number for number, name in enumerate(sequences)}
        self._stateful = bool(getattr(model, "bytes_per_state", 0))
        if self._stateful:
            cast("StatefulModel", model).allocate_states(len(self._rows))
        self.blocks = {name: [free.pop() for _ in range(count)] for name, count in needed.items()}

    def step(self, new: Mapping[str, int], **extra: Any) -> dict[str, Logits]:
        """Let `new[name]` more tokens of each named sequence through the model; logits [new, vocab] of all of them.

        `extra` are further fields of the step.
        """
        lengths = np.array(list(new.values()))
        begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = [np.arange(self.past[name], self.past[name] + count) for name, count in new.items()]
        blocks = [self.blocks[name] for name in new]
        step = StepInputs(
            token_ids=np.concatenate([self._tokens[n][p] for n, p in zip(new, positions, strict=True)]),
            positions=np.concatenate(positions),
            past_lens=np.array([self.past[name] for name in new], dtype=np.int32),
            subsequence_begins=begins,
            block_indices=np.concatenate(blocks).astype(np.int32),
            block_indices_begins=np.concatenate([[0], np.cumsum([len(b) for b in blocks])]).astype(np.int32),
            max_context_len=max(self.past[name] + count for name, count in new.items()),
            rows=np.arange(begins[-1], dtype=np.int32),
            states=np.array([self._rows[name] for name in new], np.int32) if self._stateful else None,
            **extra,
        )
        logits = self.model.forward(step).copy()
        for name, count in new.items():
            self.past[name] += count
        return {name: logits[begins[i] : begins[i + 1]] for i, name in enumerate(new)}

    def run(self, schedule: Sequence[Mapping[str, int]]) -> dict[str, Logits]:
        """Logits of every token of every sequence after all steps of `schedule`."""
        parts: dict[str, list[Logits]] = {name: [] for name in self.past}
        for new in schedule:
            for name, logits in self.step(new).items():
                parts[name].append(logits)
        return {name: np.concatenate(logits) for name, logits in parts.items()}
