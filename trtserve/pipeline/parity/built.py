"""Run a built engine for a comparison with its original: the files that serve, in the arithmetic that serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.quantized import FP8, FP8_BY_TOKEN
from trtserve.errors import UnsupportedModelError
from trtserve.executor.loaders import MODELS, embedded_runtime, load_model
from trtserve.executor.runtimes import RUNTIMES
from trtserve.host.machine import give_memory_back
from trtserve.pipeline.parity.comparison import Precision, PromptLogits
from trtserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from trtserve.executor.engine.model import StatefulModel
    from trtserve.pipeline.parity.comparison import Logits

_NAMES: Mapping[str, Precision] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "int8"}
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)  # the exact ones first


def obstacle(config: EngineConfig) -> str | None:
    """Return why the engine cannot be compared by one process, or None."""
    runtime = embedded_runtime(config)
    if runtime is None or config.trtserve.weights_bytes:
        return "another program computes its logits"
    if MODELS[runtime].ranks and config.mapping.ranks > 1:
        return f"it has {config.mapping.ranks} ranks, each a process of its own"
    return None


def require_comparable(engine: Path, config: EngineConfig) -> None:
    """Raise UnsupportedModelError for an engine that one process of ours does not run."""
    if (why := obstacle(config)) is not None:
        raise UnsupportedModelError(
            f"The engine {engine} cannot be compared with its original: {why}.", hint="Check its checkpoint."
        )


def bounds_of(config: EngineConfig, weights: Precision) -> Precision:
    """Return the coarsest precision of an engine: of its weights, its arithmetic and its KV cache."""
    own = (config.trtserve.compute_precision, config.trtserve.kv_precision)
    found = [weights, *(_NAMES.get(name, "int8") for name in own if name)]
    if RUNTIMES[str(embedded_runtime(config))].rounds_fp8_inputs and config.model.quantization.quant_algo in (
        FP8,
        *FP8_BY_TOKEN,
    ):
        found.append("int8")
    return max(found, key=_PRECISIONS.index)


def logits_of_engine(
    engine: Path, config: EngineConfig, answers: Sequence[PromptLogits], *, progress: Progress = SILENT
) -> list[Logits]:
    """Return the engine's logits for the tokens of the original's answers, in steps that the engine allows."""
    import numpy as np

    from trtserve.executor.engine.limits import EngineOptions
    from trtserve.executor.engine.model import single_sequence

    progress.step(f"Loading the engine of {engine} ({embedded_runtime(config)})")
    model = cast("StatefulModel", load_model(engine, EngineOptions()))  # `obstacle` has found no other kind
    longest = max(len(answer.tokens) for answer in answers)
    blocks = range(-(-longest // model.tokens_per_block))
    model.allocate(len(blocks))
    stateful = bool(getattr(model, "bytes_per_state", 0))
    if stateful:
        model.allocate_states(1)
    size, found = config.build.max_num_tokens or longest, []
    with progress.task("Running the engine", total=len(answers)) as task:
        for answer in answers:
            parts = []
            for past in range(0, len(answer.tokens), size):
                new = answer.tokens[past : past + size]
                step = single_sequence(new, blocks[: -(-(past + len(new)) // model.tokens_per_block)], past=past)
                step = replace(step, states=np.zeros(1, np.int32)) if stateful else step
                parts.append(model.forward(step).copy())
            found.append(np.concatenate(parts))
            task.advance(1)
    del model
    give_memory_back()
    return found
