"""Rules about the tensors that each model declares, beside the table of its release."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from trtserve.check.repository.findings import Fault
from trtserve.check.repository.subject import LLMAPI, ModelFolder, Subject, model_table
from trtserve.releases import RELEASES, order
from trtserve.triton.config import type_name
from trtserve.triton.profiles import CORE, ENSEMBLE, LLMAPI_SINCE, ModelProfile, Tensor

# What a `$name` of the tables may be.
_CHOSEN = ("FP32", "FP16", "BF16")
# Container 25.05 has TensorRT-LLM 0.19 with these names of 0.20.
_EARLY = {"0.19": ("0.20", frozenset({"min_tokens", "seed"}))}
_LOGITS = ("context_logits", "generation_logits")
_LOGITS_TYPED = "0.17"


def known(subject: Subject) -> Iterator[tuple[ModelFolder, Any, Tensor]]:
    """Every declared tensor that the table of its model's release has, with its row."""
    for model, table in _tabled(subject):
        inputs, outputs = rows_of(table.inputs, subject, model), {row.name: row for row in table.outputs}
        yield from ((model, each, inputs[each.name]) for each in model.config.input if each.name in inputs)
        yield from ((model, each, outputs[each.name]) for each in model.config.output if each.name in outputs)


def _tabled(subject: Subject) -> Iterator[tuple[ModelFolder, ModelProfile]]:
    for model in subject.models.values():
        table = subject.table(model)
        if table is not None:
            yield model, table


def rows_of(rows: tuple[Tensor, ...], subject: Subject, model: ModelFolder) -> dict[str, Tensor]:
    """Name → row, with the names that the container of a release has early."""
    early = _EARLY.get(subject.release(model) or "")
    found = {row.name: row for row in rows}
    if early is not None and model.role != LLMAPI:
        found |= {row.name: row for row in model_table(model.role, early[0]).inputs if row.name in early[1]}
    return found


def wrong_types(subject: Subject) -> Iterator[Fault]:
    """The data type is the table's."""
    for model, tensor, row in known(subject):
        expected = _CHOSEN if row.type.startswith("$") else (row.type,)
        found = type_name(tensor)
        if found not in expected:
            yield _differs(model, tensor, f"is of type {found}", f"expected {' or '.join(expected)}")


def wrong_dims(subject: Subject) -> Iterator[Fault]:
    """The dims are the table's."""
    for model, tensor, row in known(subject):
        if tuple(tensor.dims) != row.dims:
            yield _differs(model, tensor, f"has dims {list(tensor.dims)}", f"expected {list(row.dims)}")


def wrong_shapes(subject: Subject) -> Iterator[Fault]:
    """Scalars are reshaped, and tensors whose rows differ in length may be ragged."""
    for model, tensor, row in known(subject):
        if row.scalar and not (tensor.HasField("reshape") and not tensor.reshape.shape):
            yield _differs(model, tensor, "is not reshaped", "expected reshape: { shape: [ ] }")
        elif not row.scalar and tensor.HasField("reshape"):
            yield _differs(model, tensor, f"is reshaped to {list(tensor.reshape.shape)}", "expected no reshape")
        if row.ragged and not tensor.allow_ragged_batch:
            yield _differs(model, tensor, "is not ragged", "expected allow_ragged_batch: true")


def not_optional(subject: Subject) -> Iterator[Fault]:
    """What clients may leave out is marked so."""
    for model, tensor, row in known(subject):
        if row.optional and not tensor.optional:
            yield _differs(model, tensor, "is not optional, so every client must send it", "expected optional: true")


def _differs(model: ModelFolder, tensor: Any, found: str, expected: str) -> Fault:
    return Fault(
        model=model.name,
        file=model.file,
        what=f"The tensor {tensor.name} {found}; {expected}.",
        fix="Write it as NVIDIA's template of this release has it, or make the file again with trtserve repo.",
    )


def lacking_tensors(subject: Subject) -> Iterator[Fault]:
    """What a model cannot work without is declared."""
    for model, table in _tabled(subject):
        inputs, outputs = {each.name for each in model.config.input}, {each.name for each in model.config.output}
        needed = {row.name for row in table.inputs if not row.optional} - inputs
        needed |= {"output_ids", "sequence_length"} - outputs if model.role == CORE else set()
        for name in sorted(needed):
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"The tensor {name} is not declared, and {model.name} cannot work without it.",
                fix="Take it over from NVIDIA's template of this release.",
            )


def other_releases(subject: Subject) -> Iterator[Fault]:
    """No tensor is one of another release only."""
    for model, table in _tabled(subject):
        release = subject.release(model)
        if release is None and model.role != LLMAPI:
            continue
        declared = {*rows_of(table.inputs, subject, model), *(row.name for row in table.outputs)}
        for tensor in (*model.config.input, *model.config.output):
            having = _releases_with(model.role, tensor.name)
            if tensor.name not in declared and having:
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The tensor {tensor.name} belongs to release {having[0]} … {having[-1]}; this repository is "
                    f"of release {release}, which does not read it.",
                    fix="Make the repository for the release that serves it: trtserve repo --release RELEASE",
                )


def misspelt(subject: Subject) -> Iterator[Fault]:
    """No tensor is almost one of the table that is missing."""
    for model, table in _tabled(subject):
        rows = {*rows_of(table.inputs, subject, model), *(row.name for row in table.outputs)}
        declared = {tensor.name for tensor in (*model.config.input, *model.config.output)}
        for name in sorted(declared - rows):
            close = difflib.get_close_matches(name, rows - declared, n=1, cutoff=0.85)
            if close and not _releases_with(model.role, name):
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The tensor {name} is none that {model.name} reads.",
                    fix=f"Did you mean {close[0]}?",
                )


def declared_twice(subject: Subject) -> Iterator[Fault]:
    """No tensor is declared twice; NVIDIA's ensemble of 0.19 does it, in the same words, which harms nobody."""
    for model in subject.models.values():
        for tensors in (model.config.input, model.config.output):
            different = {tensor.SerializeToString(deterministic=True): tensor.name for tensor in tensors}
            told = different.values() if model.role == ENSEMBLE else [tensor.name for tensor in tensors]
            for name, count in Counter(told).items():
                if count > 1:
                    yield Fault(
                        model=model.name,
                        file=model.file,
                        what=f"The tensor {name} is declared {count} times.",
                        fix="Leave one of them.",
                    )


def wrong_logits(subject: Subject) -> Iterator[Fault]:
    """Logits have the type of the engine's: the C++ backend refuses to return others."""
    for model in subject.gpu_engines:
        release, built = subject.release(model), model.pretrained.get("logits_dtype")
        if model.config.backend != "tensorrtllm" or release is None or order(release) < order(_LOGITS_TYPED):
            continue
        expected = {"float16": "FP16", "float32": "FP32"}.get(str(built))
        for tensor in model.config.output:
            if tensor.name in _LOGITS and expected is not None and type_name(tensor) != expected:
                yield Fault(
                    model=model.name,
                    file=model.file,
                    what=f"The output {tensor.name} is {type_name(tensor)}; the engine was built with {built} logits.",
                    fix=f"Write data_type: TYPE_{expected}, in the ensemble and the BLS model too.",
                )


def unused_features(subject: Subject) -> Iterator[Fault]:
    """What an engine was built for can be asked for."""
    for model in subject.engines:
        declared = {tensor.name for tensor in (*model.config.input, *model.config.output)}
        wanted = {
            "context_logits": model.build.get("gather_context_logits"),
            "generation_logits": model.build.get("gather_generation_logits"),
            "prompt_embedding_table": model.limit("max_prompt_embedding_table_size"),
            "lora_weights": (model.build.get("plugin_config") or {}).get("lora_plugin"),
            "draft_input_ids": model.limit("max_draft_len"),
        }
        for name in sorted(name for name, built in wanted.items() if built and name not in declared):
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"The engine was built for {name}, and the model does not declare that tensor.",
                fix="Declare it, or build an engine without it, which takes less memory.",
            )


@cache
def _releases_with(role: str, name: str) -> tuple[str, ...]:
    releases = [each for each in RELEASES if role != LLMAPI or order(each) >= order(LLMAPI_SINCE)]
    return tuple(each for each in releases if name in _names(role, each))


@cache
def _names(role: str, release: str) -> frozenset[str]:
    table = model_table(role, release)
    return frozenset(row.name for row in (*table.inputs, *table.outputs))
