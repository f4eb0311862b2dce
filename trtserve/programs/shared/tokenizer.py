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


def end_and_pad_id(tokenizer: Any, folder: Path) -> tuple[int, int]:
    """Return the ids that end and pad a sequence; -1, which never matches, where there is none.

    The tokenizer's EOS comes first, then `generation_config.json`. Without a pad token the EOS pads.
    """
    end = tokenizer.eos_token_id
    if end is None:
        end = _generation_end_id(folder)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = end
    return int(end), int(pad)


def _generation_end_id(folder: Path) -> int:
    path = folder / "generation_config.json"
    if not path.exists():
        return -1
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if isinstance(value, list):
        value = value[0] if value else None
    return -1 if value is None else int(value)
