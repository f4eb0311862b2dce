"""A GGUF file becomes a Hugging Face folder: small files made of its metadata, and a link to the file itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from trtserve.checkpoint.gguf import GgufFile
from trtserve.checkpoint.gguf_model import config_of, tokenizer_of
from trtserve.errors import UnsupportedModelError, listing
from trtserve.files import locked
from trtserve.pipeline.model_files import CONFIG, GGUF
from trtserve.store import Store
from trtserve.store.sources import Source


def gguf_file(source: Source) -> Path | None:
    """Return the GGUF file that a source is, or the only one of a folder without config.json; None for others.

    Raises UnsupportedModelError for a folder with several.
    """
    place = Path(source.location)
    if place.is_file():
        return place
    found = sorted(place.glob("*.gguf")) if place.is_dir() and not (place / CONFIG).is_file() else []
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{place} has several GGUF files: {listing([path.name for path in found])}.",
            hint=f"Name one of them: {found[0]}",
        )
    return found[0].resolve() if found else None


def unfolded(file: Path, store: Store, *, tokenizer: bool) -> Path:
    """Make the folder of a GGUF file among the store's downloads, and return it. It holds no weights of its own.

    Without `tokenizer` another one is served. Raises what reading the file raises.
    """
    content = GgufFile(file)
    made = {CONFIG: config_of(content)} | (tokenizer_of(content) if tokenizer else {})
    folder = store.download("gguf", hashlib.sha256(str(file).encode()).hexdigest())
    with locked(store.lock_of(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in made.items():
            (folder / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
        link = folder / GGUF
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    return folder
