"""Run the original model with transformers on PyTorch, in float32 on the CPU."""

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
from trtserve.checkpoint.architectures.gemma3 import WITH_VISION
from trtserve.checkpoint.dequantized import dequantized
from trtserve.checkpoint.quantized_source import SourceQuantization, source_quantization
from trtserve.checkpoint.source import read_hf_config, read_source
from trtserve.errors import CorruptFileError, MissingDependencyError, listing
from trtserve.host.install_command import install_command
from trtserve.host.machine import give_memory_back
from trtserve.pipeline.parity.comparison import Answer
from trtserve.pipeline.parity.constants import Constants, constants_of
from trtserve.pipeline.parity.rows import products_of
from trtserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from trtserve.pipeline.parity.comparison import Logits
    from trtserve.pipeline.parity.rows import Products

_OTHER_ORIGINAL = "Import the model again, or give another folder with --against."


def require_oracle() -> None:
    """Raise MissingDependencyError when PyTorch is not installed."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "The check runs the original model on PyTorch, which is not installed.",
            hint=install_command("oracle"),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Original:
    """The original's results.

    `answers` use its own weights. `rounded` holds the logits f32[tokens, vocab] for the same tokens with weights
    rounded like the checkpoint's; the same arrays when nothing is rounded. `constants` are its constants besides
    weights, and `products` stand for the rows of its tables (parity.rows), rounded likewise.
    """

    answers: Sequence[Answer]
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
                answers.append(Answer(tokens=tokens, prompt_length=len(prompt), logits=_logits(model, tokens)))
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
    settings: dict[str, Any] = {
        "attn_implementation": "sdpa" if read_hf_config(folder).get("model_type") == "falcon" else "eager",
        _dtype_argument(): torch.float32,
        "output_loading_info": True,
    }
    hf = text_model(read_hf_config(folder))
    quantization = source_quantization(hf)
    try:
        with _quiet():
            if quantization is None:
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
    return _text_part(model).eval()


def _text_part(model: Any) -> Any:
    """Return the text model of a multimodal one, named like its own class, without vision tensors."""
    if type(model).__name__ != WITH_VISION:
        return model
    import torch
    from transformers import Gemma3ForCausalLM

    with torch.device("meta"):
        text = Gemma3ForCausalLM(model.config.get_text_config())
    text.model, text.lm_head = model.model.language_model, model.lm_head
    return text


def _dequantized(
    folder: Path, architecture: str, quantization: SourceQuantization, settings: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a quantised model with dequantised floats, and transformers' loading report."""
    import transformers
    from torch import from_numpy

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config = config.get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    floats = dequantized(read_source(folder, family(architecture).BASE_PREFIX), quantization)
    weights = {name: from_numpy(values) for name, values in floats}
    loaded: tuple[Any, dict[str, Any]] = getattr(transformers, architecture).from_pretrained(
        None, config=config, state_dict=weights, **settings
    )
    return loaded


def _dtype_argument() -> str:
    """transformers 4.56 renamed the argument and warns about the old name."""
    major, minor = metadata.version("transformers").split(".")[:2]
    return "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bar; ours is shown."""
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
