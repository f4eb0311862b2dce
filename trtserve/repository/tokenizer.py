"""The tokenizer of a repository: its files, whether it works, and whether two models share one."""

from __future__ import annotations

import re
from pathlib import Path

from trtserve.client.tokenizer import missing_packages
from trtserve.errors import ArtifactError, RepositoryError
from trtserve.files import LARGEST_TEXT, read_json_object, require_own
from trtserve.programs.shared.tokenizer import configured_end_ids, decode, encode, open_tokenizer, prepare
from trtserve.programs.shared.tokenizer import token_ids as read_token_ids
from trtserve.progress import SILENT, Progress

_TOKENIZER_FILES = (
    "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*.jinja", "config.json", "generation_config.json",
)  # fmt: skip
_PROBE = "What is machine learning?"


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that its tokenizer needs. Raises RepositoryError if there are none."""
    found = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    if not any(path.name not in ("config.json", "generation_config.json") for path in found):
        raise RepositoryError(
            f"{folder} has no tokenizer files.",
            hint="Give the folder of the Hugging Face model (or of its tokenizer) with --tokenizer.",
        )
    return sorted(found)


def own_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files that a repository gets copies of. Raises UsageError for a link to elsewhere, too."""
    found = tokenizer_files(folder)
    for path in found:
        require_own(path, folder)
    return found


def check_tokenizer(folder: Path, vocab_size: int | None, progress: Progress = SILENT, *, keep: bool = False) -> None:
    """Load a tokenizer as the models will, and encode and decode a text. Raises RepositoryError when that fails.

    `keep`: write what was loaded into the folder, so that the models need not import transformers.
    """
    try:
        tokenizer = open_tokenizer(folder)
        ids = encode(tokenizer, _PROBE, special=True)
        text = decode(tokenizer, ids, skip_special_tokens=True)
    except ModuleNotFoundError as error:
        raise missing_packages(folder, error) from None
    except Exception as error:
        raise RepositoryError(
            f"The tokenizer cannot be loaded: {_sentence(error)}",
            hint="Check the tokenizer files of the model; --tokenizer takes another folder.",
        ) from error
    try:
        configured_end_ids(folder)
    except ValueError as error:
        raise RepositoryError(f"{error}.", hint="Correct the file: the models read it when they start.") from None
    if not ids or not re.sub(r"\W", "", text):
        raise RepositoryError(f"The tokenizer turns {_PROBE!r} into {text!r}; it does not fit this model.")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise RepositoryError(
            f"The tokenizer produces token {max(ids)}, but the engine's vocabulary has {vocab_size} tokens.",
            hint="Give the tokenizer of the model that the engine was built from.",
        )
    if text.strip() != _PROBE:
        progress.warn(f"The tokenizer does not reproduce its input: {_PROBE!r} became {text.strip()!r}.")
    if keep:
        prepare(tokenizer, folder)


def _sentence(error: Exception) -> str:
    """Return the first line of a message, or all of it when that line only introduces a list."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines).split()) if lines[0].rstrip().endswith(":") else lines[0]


def require_same_tokens(target: Path, draft: Path) -> None:
    """Raise RepositoryError when two tokenizers use an id for different tokens.

    Only `tokenizer.json` is compared; a folder without one passes.
    """
    first, second = token_ids(target), token_ids(draft)
    if first is None or second is None or first == second:
        return
    token = next(token for token in {**first, **second} if first.get(token) != second.get(token))
    raise RepositoryError(
        f"The draft model has another tokenizer: {token!r} is {first.get(token, 'no token')} for the target and "
        f"{second.get(token, 'no token')} for the draft.",
        hint="Both must share one vocabulary: use a smaller model of the same family as the draft.",
    )


def token_ids(folder: Path) -> dict[str, int] | None:
    """Return token → id of `tokenizer.json`, or None for a folder without a readable one."""
    try:
        ids = read_token_ids(read_json_object(folder / "tokenizer.json", limit=LARGEST_TEXT))
        return ids if all(type(number) is int for number in ids.values()) else None
    except (ArtifactError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
