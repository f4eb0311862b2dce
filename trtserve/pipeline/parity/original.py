"""The prompts, and the original model that answers them with transformers on PyTorch, in float32 on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.architectures import architecture_of, family, text_model
from trtserve.checkpoint.architectures.parts.text_halves import WITH_IMAGES
from trtserve.checkpoint.repacking import dequantized
from trtserve.checkpoint.source import read_hf_config, read_source
from trtserve.checkpoint.supported import SourceQuantization, source_quantization, widened_by
from trtserve.errors import CorruptFileError, MissingDependencyError, TrtserveError, UsageError, listing
from trtserve.files import parse_json, read_text
from trtserve.host.machine import give_memory_back, install_command
from trtserve.pipeline.parity.comparison import PromptLogits
from trtserve.pipeline.parity.constants import Constants, constants_of, products_of
from trtserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from trtserve.pipeline.parity.comparison import Logits
    from trtserve.pipeline.parity.constants import Products

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
_OTHER_ORIGINAL = "Import the model again, or give another folder with --against."


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
        try:
            lines = [line for line in read_text(file, UsageError, pipes=True).splitlines() if line.strip()]
        except FileNotFoundError as error:
            raise UsageError(f"--prompts: {file} cannot be read: {error}.") from None
        if not lines:
            raise UsageError(f"--prompts: {file} contains no prompts.")
        return _own(model, vocabulary, [_prompt(line) for line in lines], file)
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


def require_oracle() -> None:
    """Raise MissingDependencyError when PyTorch is not installed."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "The check runs the original model on PyTorch, which is not installed.",
            hint=f"{install_command('oracle')} brings PyTorch and transformers.",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Original:
    """The original's results.

    `answers` use its own weights. `rounded` holds the logits f32[tokens, vocab] for the same tokens with weights
    rounded like the checkpoint's; the same arrays when nothing is rounded. `constants` are its constants besides
    weights, and `products` stand for the rows of its tables (`constants.products_of`), rounded likewise.
    """

    answers: Sequence[PromptLogits]
    rounded: Sequence[Logits]
    constants: Constants
    products: Mapping[str, Products]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How the checkpoint rounds weights: to `dtype`, after adding the `offsets`.

    Weights in `kept` are not rounded.
    """

    dtype: str
    offsets: Mapping[str, float]
    kept: frozenset[str] = frozenset()


def run_original(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    rounding: Rounding | None = None,
    progress: Progress = SILENT,
) -> Original:
    """Return the original's greedy answers of `max_tokens` tokens, with the logits of every token.

    The model is freed before this returns. Raises CorruptFileError when transformers cannot load it.
    """
    require_oracle()
    progress.step(f"Loading the original of {folder} (transformers, float32)")
    model = _load(folder)
    try:
        constants = constants_of(model)
        with progress.task("Running the original", total=len(prompts)) as task:
            answers = []
            for prompt in prompts:
                tokens = [*prompt, *_greedy(model, prompt, max_tokens - 1)]
                answers.append(PromptLogits(tokens=tokens, prompt_length=len(prompt), logits=_logits(model, tokens)))
                task.advance(1)
        rounded = [answer.logits for answer in answers]
        if rounding is not None:
            _round(model, rounding)
            rounded = [_logits(model, answer.tokens) for answer in answers]
        return Original(answers=answers, rounded=rounded, constants=constants, products=products_of(model))
    finally:
        del model
        give_memory_back()


def _round(model: Any, rounding: Rounding) -> None:
    """Round all weights in place; values computed from the config (frequencies) are not weights."""
    import torch

    with torch.no_grad():
        for name, values in model.named_parameters():
            if name in rounding.kept:
                continue
            offset = rounding.offsets.get(name, 0.0)
            values.copy_((values + offset).to(getattr(torch, rounding.dtype)).float() - offset)


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # eager supports every family (soft-caps), except that it adds Falcon's ALiBi twice (transformers 5.23).
    # 4.56 renamed torch_dtype, and warns about the old name.
    major, minor = metadata.version("transformers").split(".")[:2]
    settings: dict[str, Any] = {
        "attn_implementation": "sdpa" if read_hf_config(folder).get("model_type") == "falcon" else "eager",
        "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype": torch.float32,
        "output_loading_info": True,
    }
    hf = text_model(read_hf_config(folder))
    quantization = source_quantization(hf)
    read = widened_by(hf)
    try:
        with _quiet():
            if quantization is None and (read is None or read.method == "mxfp4"):  # which transformers reads
                model, report = AutoModelForCausalLM.from_pretrained(
                    folder, trust_remote_code=False, local_files_only=True, **settings
                )
            else:
                model, report = _dequantized(folder, architecture_of(hf), quantization, settings)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CorruptFileError(
            f"transformers cannot load the original in {folder}: {' '.join(str(error).split())}", hint=_OTHER_ORIGINAL
        ) from error
    if absent := sorted(report["missing_keys"]):
        raise CorruptFileError(
            f"The original in {folder} lacks tensors required by its config.json: {listing(absent)}. transformers "
            "would initialise them randomly.",
            hint=_OTHER_ORIGINAL,
        )
    return _text_part(model, architecture_of(hf)).eval()


def _text_part(model: Any, architecture: str) -> Any:
    """Return the text half of a model with images, a model of its own `architecture` without vision tensors."""
    if type(model).__name__ not in WITH_IMAGES:
        return model
    import torch
    import transformers

    with torch.device("meta"):
        text = getattr(transformers, architecture)(model.config.get_text_config())
    inner = model.model
    text.model, text.lm_head = getattr(inner, "language_model", None) or inner.text_model, model.lm_head
    return text


def _dequantized(
    folder: Path, architecture: str, quantization: SourceQuantization | None, settings: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a quantised model with dequantised floats, and transformers' loading report."""
    import transformers
    from torch import from_numpy

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config = config.get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    floats = dequantized(read_source(folder, family(architecture).prefix), quantization)
    weights = {name: from_numpy(values) for name, values in floats}
    loaded: tuple[Any, dict[str, Any]] = getattr(transformers, architecture).from_pretrained(
        None, config=config, state_dict=weights, **settings
    )
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _logits(model: Any, tokens: Sequence[int]) -> Logits:
    import torch

    with torch.inference_mode():
        logits: Logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return logits


def _greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    import torch

    # transformers 5.24 renamed the argument and warns about the old name.
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    tokens: list[int] = []
    fresh, past = list(prompt), None
    with torch.inference_mode():
        while len(tokens) < count:
            result = model(torch.tensor([fresh]), use_cache=True, **{cache: past})
            past, fresh = result[cache], [int(result.logits[0, -1].argmax())]
            tokens += fresh
    return tokens
