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
    """Return the ids that end an answer: the tokenizer's EOS, then those of `generation_config.json`."""
    path = folder / "generation_config.json"
    more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    found = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return list(dict.fromkeys(int(each) for each in found if each is not None))


def pad_id(tokenizer: Any, end: int) -> int:
    """Return the id that pads a sequence: the tokenizer's, or the one that ends it."""
    return end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
