"""Load the repository's tokenizer, and find its ids: of every token, and those that end and pad a sequence."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def load_tokenizer(folder: Path) -> Any:
    """Load the Hugging Face tokenizer in `folder`, from local files only and without running custom code.

    Raises FileNotFoundError when there is no such folder; transformers would treat the path as a hub id.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"tokenizer_dir is {folder}, which is not a folder on this machine")
    # Keep transformers from importing PyTorch: seconds and hundreds of megabytes that no tokenizer needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), legacy=False, padding_side="left", trust_remote_code=False, local_files_only=True
    )


def token_ids(content: dict[str, Any]) -> dict[str, int]:
    """Return token → id, including the added tokens, from the content of tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # a Unigram model: pairs of token and score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in content.get("added_tokens", [])}}


def end_ids(tokenizer: Any, folder: Path) -> list[int]:
    """Return the ids that end an answer: the tokenizer's EOS, then those that the model's files name."""
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return list(dict.fromkeys([*own, *configured_end_ids(folder)]))


def configured_end_ids(folder: Path) -> list[int]:
    """Return the end ids of `generation_config.json`, else those of `config.json`. Raises ValueError for other JSON."""
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        value = content.get("eos_token_id") if isinstance(content, dict) else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(each) is int for each in ids):
                raise ValueError(f"{name} has the eos_token_id {value!r:.100}; expected an id or a list of ids")
            return list(dict.fromkeys(ids))
    return []


def pad_id(tokenizer: Any, end: int) -> int:
    """Return the id that pads a sequence: the tokenizer's, or the one that ends it."""
    return end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
