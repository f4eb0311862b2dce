"""Rules about what an engine was built for: its files are such, it batches in flight, and its limits can be reached."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtserve.check.repository.findings import Fault
from trtserve.check.repository.subject import ModelFolder, Subject
from trtserve.releases.engine_config import speculative_mode
from trtserve.repo.engine import rank_sizes
from trtserve.runtimes.plan_header import begins_like_an_engine

_IN_FLIGHT = ("inflight_fused_batching", "inflight_batching")
_TRUE = ("true", "1")
# Ways to choose tokens for which the engine must have been built, with their names in its config.json.
_BUILT_MODES = {
    "medusa": "medusa",
    "lookahead": "lookahead_decoding",
    "explicit_draft_tokens": "explicit_draft_tokens",
    "redrafter": "explicit_draft_tokens",
    "eagle": "eagle",
}
_CONSTANT = re.compile(rb'\boffset="(\d+)"[^>]*?\bsize="(\d+)"')


def no_engine_files(subject: Subject) -> Iterator[Fault]:
    """Every file of an engine begins as such files do, and is as long as its description says."""
    for model in subject.engines:
        assert model.core is not None
        assert model.core.engine is not None
        folder = model.core.engine
        if model.embedded:
            yield from _graph(model, folder / "rank0.xml", folder / "rank0.bin")
            continue
        for name, size in rank_sizes(folder).items():
            if size and name.endswith(".engine") and not begins_like_an_engine(folder / name):
                yield _fault(model, f"{name} does not begin like a TensorRT engine, so that TensorRT refuses it.")


def _graph(model: ModelFolder, graph: Path, weights: Path) -> Iterator[Fault]:
    if not graph.is_file() or not weights.is_file():
        return
    content = graph.read_bytes()
    if not content.lstrip().startswith(b"<"):
        yield _fault(model, f"{graph.name} is no description of a network.")
        return
    needed = max((int(found[1]) + int(found[2]) for found in _CONSTANT.finditer(content)), default=0)
    if weights.stat().st_size < needed:
        yield _fault(
            model, f"{weights.name} has {weights.stat().st_size} bytes, and {graph.name} names {needed}: it is cut off."
        )


def copied_ranks(subject: Subject) -> Iterator[Fault]:
    """No rank's file is a copy of another's: each holds its own part of the weights. Reading ends where they differ."""
    for model in subject.gpu_engines:
        assert model.core is not None
        assert model.core.engine is not None
        sizes = rank_sizes(model.core.engine)
        first, *others = sorted(name for name, size in sizes.items() if name.endswith(".engine") and size) or [""]
        for name in others:
            same = sizes[name] == sizes[first]
            if same and filecmp.cmp(model.core.engine / first, model.core.engine / name, shallow=False):
                yield _fault(model, f"{name} is a copy of {first}: ranks have parts of their own.")


def not_in_flight(subject: Subject) -> Iterator[Fault]:
    """An engine that is to batch in flight was built for it: packed inputs, a paged KV cache, the attention plugin."""
    for model in subject.gpu_engines:
        lacking = _lacking(model.build)
        if lacking and model.parameters.get("gpt_model_type") in _IN_FLIGHT:
            yield _fault(
                model,
                f"Requests cannot be batched in flight: the engine was built with {' and '.join(lacking)}.",
                "Build it again without these, which is what trtllm-build does by itself.",
            )


def _lacking(build: Mapping[str, Any]) -> list[str]:
    plugins = build.get("plugin_config") or {}
    paged = str(build.get("kv_cache_type")).lower() != "continuous" and plugins.get("paged_kv_cache") is not False
    attention = plugins.get("gpt_attention_plugin", "auto") or plugins.get("mamba_conv1d_plugin")
    return [
        *([] if paged else ["a continuous KV cache"]),
        *(["padded inputs"] if plugins.get("remove_input_padding") is False else []),
        *([] if attention else ["no attention plugin"]),
    ]


def no_encoder(subject: Subject) -> Iterator[Fault]:
    """The decoder of an encoder-decoder model has its encoder."""
    for model in subject.gpu_engines:
        decoder = model.pretrained.get("architecture") == "DecoderModel"
        if decoder and not model.parameters.get("encoder_model_path"):
            yield _fault(
                model,
                "The engine is the decoder of an encoder-decoder model, and encoder_model_path is not set.",
                "Name the encoder's engine: trtserve repo --set encoder_model_path=FOLDER",
            )


def other_decoding(subject: Subject) -> Iterator[Fault]:
    """Tokens are chosen in a way that the engine was built for."""
    for model in subject.gpu_engines:
        said = model.parameters.get("decoding_mode", "")
        needed, built = _BUILT_MODES.get(said), speculative_mode(model.build.get("speculative_decoding_mode"))
        if needed is not None and built != needed:
            yield _fault(
                model,
                f"decoding_mode is {said}; the engine was built for {built or 'none such'}.",
                f"Leave decoding_mode out, or build with --speculative-decoding-mode {needed}.",
            )


def hidden_limits(subject: Subject) -> Iterator[Fault]:
    """Prompts may be as long as the engine was built for."""
    for model in subject.gpu_engines:
        longest, step = model.limit("max_input_len"), model.limit("max_num_tokens")
        chunked = model.parameters.get("enable_chunked_context", "").lower() in _TRUE
        if longest is not None and step is not None and step < longest and not chunked:
            yield _fault(
                model,
                f"Prompts end at {step} tokens (max_num_tokens); the engine was built for {longest} (max_input_len).",
                "Set enable_chunked_context to true, or build with a larger --max-num-tokens.",
            )


def logits_of_stages(subject: Subject) -> Iterator[Fault]:
    """Logits are not gathered over pipeline stages, which crashed."""
    for model in subject.gpu_engines:
        stages = int((model.pretrained.get("mapping") or {}).get("pp_size") or 1)
        gathered = [name for name in ("context", "generation") if model.build.get(f"gather_{name}_logits")]
        if stages > 1 and gathered:
            yield _fault(
                model,
                f"The engine gathers {' and '.join(gathered)} logits over {stages} pipeline stages: servers were "
                "reported to crash when they were asked for.",
                "Try one request that asks for them; tensor parallel engines are not affected.",
            )


def _fault(
    model: ModelFolder, what: str, fix: str = "Copy every file of the engine again, or build it again."
) -> Fault:
    return Fault(model=model.name, file=model.file, what=what, fix=fix)
