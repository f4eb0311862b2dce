"""Prompts from a file, as upstream's benchmark_core_model.py and end_to_end_test.py read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.bench.traffic import Limits, Traffic, TrafficRequest, clip
from trtserve.errors import UsageError
from trtserve.query.tokenizer import TokenizerFiles
from trtserve.specs import BenchSpec

FIELDS = ("input", "instruction", "output")
_FORM = "It must be a JSON list of objects with the texts `input`, `instruction` and `output`."


@dataclass(frozen=True, kw_only=True)
class Example:
    """One entry: the prompt is input, a space, instruction; the words of `output` say how long the answer is to be."""

    prompt: str
    output: str

    def output_len(self, tokens_per_word: float) -> int:
        """Tokens to generate: words (split at single spaces, as upstream does) times `tokens_per_word`."""
        return max(1, int(len(self.output.split(" ")) * tokens_per_word))


def read_dataset(path: Path) -> list[Example]:
    """All entries of a dataset; UsageError that names the first entry which is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--dataset is {path}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"--dataset is {path}, which is not JSON: {error}.", hint=_FORM) from None
    if not isinstance(content, list) or not content:
        wrong = "is an empty list" if content == [] else "is no JSON list"
        raise UsageError(f"--dataset is {path}, which {wrong}.", hint=_FORM)
    return [_example(path, number, entry) for number, entry in enumerate(content)]


def _example(path: Path, number: int, entry: Any) -> Example:
    wrong = [name for name in FIELDS if not isinstance(entry, Mapping) or not isinstance(entry.get(name), str)]
    if wrong:
        said = "has no text " + " and no text ".join(repr(name) for name in wrong)
        raise UsageError(f"Entry {number} of {path} {said}.", hint=_FORM)
    return Example(prompt=f"{entry['input']} {entry['instruction']}", output=entry["output"])


def dataset_traffic(
    spec: BenchSpec, limits: Limits, files: TokenizerFiles, *, text: bool, special: bool, end_id: int | None
) -> Traffic:
    """The dataset's prompts in their order, at most `spec.num_requests` of those that the engine takes.

    Prompts longer than `max_input_len` are left out, as upstream does. `special`: prompts are encoded with special
    tokens; `text`: the model gets their text. UsageError when no prompt is left.
    """
    import numpy as np

    if spec.dataset is None:
        raise UsageError("--dataset is missing.")
    requests: list[TrafficRequest] = []
    examples: list[Example] = []
    shortened = skipped = 0
    for example in read_dataset(spec.dataset):
        if len(requests) == spec.num_requests:
            break
        ids = files.encode(example.prompt, special=special)
        wanted = example.output_len(spec.op_tokens_per_word)
        input_len, output_len = clip(len(ids), wanted, limits)
        if not ids or input_len < len(ids):
            skipped += 1
            continue
        shortened += output_len < wanted
        examples.append(example)
        prompt = example.prompt if text else None
        requests.append(
            TrafficRequest(token_ids=np.array(ids, np.int32), output_len=output_len, text=prompt, end_id=end_id)
        )
    if not requests:
        raise UsageError(
            f"None of the {skipped} prompts of {spec.dataset} is short enough for the engine ({_bounds(limits)})."
        )
    return Traffic(
        requests=tuple(requests),
        clipped_inputs=0,
        clipped_outputs=shortened,
        notes=_notes(requests, examples, skipped, limits),
    )


def _notes(requests: list[TrafficRequest], examples: list[Example], skipped: int, limits: Limits) -> tuple[str, ...]:
    words = sum(len(example.prompt.split()) for example in examples)
    tokens = sum(len(request.token_ids) for request in requests)
    notes = [f"Tokenizer: tokens per word = {tokens / max(1, words):.3f}."]
    if skipped:
        notes.append(f"{skipped} prompts were left out: empty, or longer than the engine takes ({_bounds(limits)}).")
    return tuple(notes)


def _bounds(limits: Limits) -> str:
    return f"max_input_len {limits.max_input_len}, max_seq_len {limits.max_seq_len}"
