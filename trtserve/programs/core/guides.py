"""The configuration of guided decoding, read from the tokenizer's files without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..shared.parameters import ModelParameters
from .executor_module import ExecutorModule

_BACKENDS = ("xgrammar", "llguidance")


def guided_decoding_config(module: ExecutorModule, parameters: ModelParameters) -> Any:
    """Return the GuidedDecodingConfig of the parameters, or None when guided decoding is off.

    Raises ValueError for an unknown backend, and for a folder without `tokenizer.json`. TensorRT-LLM has `llguidance`
    since 1.0; the embedded executor of older releases accepts the same guides under the name xgrammar.
    """
    backend = parameters.text("guided_decoding_backend")
    if backend is None or not module.since("0.16"):
        return None
    if backend.lower() not in _BACKENDS:
        raise ValueError(f"Parameter guided_decoding_backend is {backend!r}; expected one of {', '.join(_BACKENDS)}.")
    config = module.api.GuidedDecodingConfig
    name = backend.upper() if module.since("1.0") else "XGRAMMAR"
    return config(getattr(config.GuidedDecodingBackend, name), **_tokenizer(parameters))


def _tokenizer(parameters: ModelParameters) -> dict[str, Any]:
    """Return `encoded_vocab`, `tokenizer_str` and `stop_token_ids`.

    They come from the file that `xgrammar_tokenizer_info_path` names, else from the tokenizer's own files.
    """
    info = parameters.path("xgrammar_tokenizer_info_path")
    if info is not None:
        return _of_file(info)
    folder = parameters.path("tokenizer_dir")
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise ValueError(
            "Parameter guided_decoding_backend is set; it needs a tokenizer_dir with the file tokenizer.json, "
            f"and {str(folder)!r} has none."
        )
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    ids = _ids(json.loads(text))
    vocabulary = sorted(ids, key=lambda token: ids[token])
    return {"encoded_vocab": vocabulary, "tokenizer_str": text, "stop_token_ids": _stop_ids(folder, ids)}


def _of_file(info: Path) -> dict[str, Any]:
    try:
        content = json.loads(info.read_text(encoding="utf-8"))
        return {name: content[name] for name in ("encoded_vocab", "tokenizer_str", "stop_token_ids")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"Parameter xgrammar_tokenizer_info_path is {str(info)!r}; expected a JSON file with encoded_vocab, "
            f"tokenizer_str and stop_token_ids, but reading it gave {type(error).__name__}: {error}"
        ) from None


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token → id, including the added tokens."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # a Unigram model: pairs of token and score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}}


def _stop_ids(folder: Path, ids: dict[str, int]) -> list[int]:
    """Return the tokenizer's EOS id and the end ids of `generation_config.json`."""
    eos = _read(folder / "tokenizer_config.json").get("eos_token")
    token = eos.get("content") if isinstance(eos, dict) else eos
    found = [ids[token]] if token in ids else []
    ends = _read(folder / "generation_config.json").get("eos_token_id")
    found += ends if isinstance(ends, list) else [] if ends is None else [ends]
    return list(dict.fromkeys(found))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content
