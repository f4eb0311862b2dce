"""The prompts for both models: built-in texts and token sequences, or the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.errors import TrtserveError, UsageError
from trtserve.files import parse_json
from trtserve.progress import SILENT, Progress

Tokens = tuple[int, ...]

# Prose, a question, code, another script, numbers, and one text long enough for positions to matter.
TEXTS: tuple[str, ...] = (
    "The ship left the harbour before dawn, and nobody on the quay",
    "Question: Why is the sky blue during the day and red at sunset?\nAnswer:",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Der schnelle braune Fuchs springt über den faulen Hund. 速い茶色の狐が",
    "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31,",
    (
        "In the first year the valley had three farms and one road. In the second year a mill was built by the river, "
        "and the road was paved with stones from the old quarry. In the third year the first school opened its doors; "
        "it had nine pupils, one teacher and a stove that smoked. By the tenth year there were two hundred houses, a "
        "market every Thursday, and a bridge that people came from far away to see. What had begun as a place to rest"
    ),
)

# Lengths of random sequences, which cover the vocabulary better than texts and need no tokenizer.
_RANDOM_LENGTHS = (24, 96, 160)
_SEED = 20240229
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The limits of prompts: ids below `size`, and at most `longest` tokens."""

    size: int
    longest: int


def prompt_set(
    model: Path, vocabulary: Vocabulary, file: Path | None = None, *, progress: Progress = SILENT
) -> list[Tokens]:
    """Return the prompts of `file`, or the built-in texts (if the model has a tokenizer) and random sequences.

    Raises UsageError for an unreadable file or a prompt that does not fit the model.
    """
    if file is not None:
        return _own(model, vocabulary, _read_prompts(file), file)
    import numpy as np

    generator = np.random.default_rng(_SEED)
    lengths = [min(length, vocabulary.longest) for length in _RANDOM_LENGTHS]
    random = [tuple(int(token) for token in generator.integers(0, vocabulary.size, length)) for length in lengths]
    return [*_texts(model, vocabulary, progress), *random]


def _texts(model: Path, vocabulary: Vocabulary, progress: Progress) -> list[Tokens]:
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        progress.step("The model has no tokenizer: the prompts are random tokens")
        return []
    try:
        tokenizer = _tokenizer(model)
    except TrtserveError as error:
        progress.warn(f"{error.message} The prompts are random tokens.")
        return []
    encoded = (_encode(tokenizer, text)[: vocabulary.longest] for text in TEXTS)
    return [tokens for tokens in encoded if tokens and max(tokens) < vocabulary.size]


def _own(model: Path, vocabulary: Vocabulary, prompts: Sequence[str | Tokens], file: Path) -> list[Tokens]:
    tokenizer = _tokenizer(model) if any(isinstance(prompt, str) for prompt in prompts) else None
    found = []
    for number, prompt in enumerate(prompts, 1):
        tokens = _encode(tokenizer, prompt) if isinstance(prompt, str) else prompt
        if not tokens or not all(0 <= token < vocabulary.size for token in tokens):
            raise UsageError(
                f"--prompts: prompt {number} of {file} is empty or has tokens outside 0 … {vocabulary.size - 1}."
            )
        if len(tokens) > vocabulary.longest:
            raise UsageError(
                f"--prompts: prompt {number} of {file} has {len(tokens)} tokens; at most {vocabulary.longest} leave "
                "room for the answer.",
                hint="Shorten it, or use fewer --max-tokens.",
            )
        found.append(tokens)
    return found


def _read_prompts(file: Path) -> list[str | Tokens]:
    """Read one prompt per line: a text, a JSON string (to allow line breaks), or a JSON list of token ids."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts: {file} cannot be read: {error}.") from None
    if not lines:
        raise UsageError(f"--prompts: {file} contains no prompts.")
    return [_prompt(line) for line in lines]


def _prompt(line: str) -> str | Tokens:
    try:
        content = parse_json(line)
    except ValueError:
        return line
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in content):
        return tuple(content)
    return line


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UsageError(
            f"The tokenizer of {model} cannot be loaded: {' '.join(str(error).split())}.",
            hint="Pass prompts as token ids: --prompts FILE with one JSON list per line.",
        ) from error


def _encode(tokenizer: Any, text: str) -> Tokens:
    return tuple(int(token) for token in tokenizer.encode(text))
