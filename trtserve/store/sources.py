"""Sources of models: the demo, an alias, a hub id or a local folder, and the name that the model is served under."""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtserve.artifacts import plain_name
from trtserve.errors import ModelNotFoundError, TrtserveError, UsageError, counted, did_you_mean, listing
from trtserve.files import read_text

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo"

# Names of Triton models in every repository.
RESERVED_NAMES = frozenset(
    {"preprocessing", "tensorrt_llm", "tensorrt_llm_draft", "postprocessing", "ensemble", "tensorrt_llm_bls"}
)

# Alias → hub id; known_models.yaml has the shapes of these models.
ALIASES: dict[str, str] = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-2-70b-chat": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3-70b-instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "tinyllama-1.1b-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "gemma-2-2b-it": "google/gemma-2-2b-it",
    "gemma-3-1b-it": "google/gemma-3-1b-it",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "opt125m": "facebook/opt-125m",
    "falcon-7b": "tiiuae/falcon-7b",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "granite-3.3-2b-instruct": "ibm-granite/granite-3.3-2b-instruct",
    "granite-3.1-1b-a400m-instruct": "ibm-granite/granite-3.1-1b-a400m-instruct",
    "olmo-2-1b-instruct": "allenai/OLMo-2-0425-1B-Instruct",
    "olmoe-1b-7b-instruct": "allenai/OLMoE-1B-7B-0924-Instruct",
    "ernie-4.5-0.3b": "baidu/ERNIE-4.5-0.3B-PT",
    "glm-4-9b": "zai-org/GLM-4-9B-0414",
    "seed-oss-36b-instruct": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "internlm3-8b-instruct": "internlm/internlm3-8b-instruct",
    "phi-2": "microsoft/phi-2",
    "pythia-160m": "EleutherAI/pythia-160m",
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
}

_BUCKETS = ("s3", "gs", "az", "abfs", "file")  # schemes of fsspec
_CACHED = "models--"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GGUF = re.compile(r"[\w][\w./-]{0,199}")
_SERVED_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from."""

    text: str  # as the user typed it
    kind: Literal["demo", "hub", "folder", "bucket"]
    location: str  # `org/name` of the hub, the URL of a folder in an object store, else an absolute folder or GGUF file
    name: str  # that the model is served under
    revision: str | None = None  # branch, tag or commit of the hub; None: its default branch
    gguf: str | None = None  # which GGUF file of the hub's repository: its name, or the end of it (Q4_K_M)


def parse_source(text: str, *, name: str | None = None) -> Source:
    """Parse what the user typed; `name` replaces the derived name.

    An existing folder is always a folder, and a text that looks like a path is never looked up on the hub. The prefixes
    `hf:` and `local:` decide explicitly. Raises UsageError or ModelNotFoundError when nothing fits.
    """
    if "://" in text:
        return _bucket(text, name)
    if text.startswith("local:"):
        return _folder(text, text.removeprefix("local:"), name)
    if text.startswith("hf:"):
        return _hub(text, text.removeprefix("hf:"), name)
    path = Path(text).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        # The resolved path is part of the fingerprint, as that of a folder.
        return Source(
            text=text, kind="folder", location=str(path.resolve()), name=served_name(name or plain_name(path.stem))
        )
    if path.is_file():
        raise ModelNotFoundError(
            f"{text} is a file; a model is a folder.", hint="Give the folder that holds it, or a GGUF file."
        )
    if path.suffix == ".gguf" and not path.is_dir() and ":" not in text:
        near = sorted(str(each) for each in path.parent.glob("*.gguf"))
        raise ModelNotFoundError(
            f"{text} is not a file on this machine.",
            hint=did_you_mean(str(path), near, f"GGUF files there: {listing(near) or 'none'}.")
            + f" A repository of the hub is named hf:{text}." * (text.count("/") == 1 and text[0] not in "./~"),
        )
    if is_folder_source(text):
        return _folder(text, text, name)
    if text == DEMO:
        return Source(text=text, kind="demo", location=str(DEMO_FOLDER), name=served_name(name or DEMO))
    return _hub(text, text, name)


def other_meaning(source: Source) -> str | None:
    """Return a warning when a folder hides a hub model or the demo, and how to get that.

    Returns None if it hides nothing.
    """
    if source.kind != "folder" or source.text.startswith("local:"):
        return None
    if source.text == DEMO:
        return f"The folder {source.location} is used for {DEMO}; run this in another folder to get the demo model."
    repository, _, _ = source.text.partition("@")
    if repository not in ALIASES and not _HUB_ID.fullmatch(repository):
        return None
    return f"The folder {source.location} is used for {source.text}; hf:{source.text} is the model on the hub."


def served_name(text: str) -> str:
    """Return `text` if a model can be served under it: [A-Za-z0-9._-], not the name of a model in every repository."""
    if text in RESERVED_NAMES:
        raise UsageError(f"{text!r} is the name of a Triton model in every repository.", hint="Choose one with --name.")
    if not _SERVED_NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} cannot be the name of a model; expected at most 100 letters, digits, '.', '_' and '-'.",
            hint="Choose one with --name.",
        )
    return text


def import_words(name: str) -> tuple[str, str]:
    """Return what follows `trtserve import` in a hint to somebody who asked for `name`, and the name to start then."""
    with suppress(TrtserveError):
        return name, parse_source(name).name
    with suppress(UsageError):
        return f"MODEL --name {served_name(name)}", name
    return "MODEL --name NAME", "NAME"


def is_folder_source(text: str) -> bool:
    """Return whether `text` means a folder: one that exists, or a text that cannot be the name of a hub's model."""
    if not text:
        return False
    path = Path(text).expanduser()
    if text == DEMO or text.partition("@")[0] in ALIASES:
        # An alias means a folder of the same name only if that folder holds a model.
        return (path / "config.json").is_file()
    looks_like_path = text.startswith(("/", ".", "~")) or text.endswith("/") or "\\" in text
    return path.is_dir() or looks_like_path or re.split("[@:]", text)[0].count("/") > 1


def _folder(text: str, path: str, name: str | None) -> Source:
    # The path is part of the fingerprint, so every folder needs one spelling.
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"{path} is not a folder on this machine.",
            hint="Give an existing folder, or a hub id as org/name (hf:org/name when in doubt).",
        )
    derived = folder.name
    if folder.name.startswith(_CACHED) and not (folder / "config.json").exists():
        derived = folder.name.rpartition("--")[2]
        folder = _snapshot(folder)
    return Source(text=text, kind="folder", location=str(folder), name=served_name(name or plain_name(derived)))


def _bucket(url: str, name: str | None) -> Source:
    scheme, _, path = url.partition("://")
    if scheme in ("http", "https"):
        owner, *rest = [*path.split("/")[1:], ""]
        name_there = "/".join(word for word in (owner, *rest[:1]) if word not in ("", "tree", "blob", "resolve"))
        raise UsageError(
            f"{url[:200]} is the address of a page.", hint=f"Models of the hub have short names: {name_there or 'gpt2'}"
        )
    if scheme not in _BUCKETS or not path.strip("/"):
        raise UsageError(
            f"{url[:200]} is not a place that models are imported from.",
            hint=f"Expected a folder in an object store ({', '.join(f'{each}://…' for each in _BUCKETS)}), a hub id "
            "or a folder.",
        )
    location = url.rstrip("/")
    derived = plain_name(location.rpartition("/")[2])
    return Source(text=url, kind="bucket", location=location, name=served_name(name or derived))


def _snapshot(folder: Path) -> Path:
    """Return the snapshot that `main` means in a model's folder of huggingface_hub's cache, else the only one."""
    found = sorted(path for path in folder.glob("snapshots/*") if path.is_dir())
    with suppress(TrtserveError, FileNotFoundError):
        commit = read_text(folder / "refs" / "main", limit=1 << 20).strip()
        found = [path for path in found if path.name == commit] or found
    if len(found) != 1:
        some = ", ".join(str(path) for path in found[:3])
        raise ModelNotFoundError(
            f"{folder} is a model's folder in the cache of huggingface_hub, with {counted(len(found), 'snapshot')}.",
            hint=f"Give one of them: {some}" if found else "Nothing was downloaded there: give the hub id, org/name.",
        )
    return found[0]


def _nearest(typed: str) -> list[str]:
    """Return up to three aliases that begin like a name, small chat models first, or else are like it."""

    def letters(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    def rank(alias: str) -> tuple[bool, float]:
        size = re.search(r"([0-9.]+)([bm])\b", alias)
        parameters = float(size[1]) * (1 if size[2] == "b" else 0.001) if size else 0.0
        return not alias.endswith(("-instruct", "-chat", "-it")), parameters

    begun = [alias for alias in ALIASES if letters(typed) and letters(alias).startswith(letters(typed))]
    return sorted(begun, key=rank)[:3] or difflib.get_close_matches(typed.lower(), [DEMO, *ALIASES], n=3, cutoff=0.5)


def _hub(text: str, identifier: str, name: str | None) -> Source:
    identifier, chosen, gguf = identifier.partition(":")
    repository, _, revision = identifier.partition("@")
    alias = repository if repository in ALIASES else None
    repository = ALIASES.get(repository, repository)
    if not _HUB_ID.fullmatch(repository) or identifier.endswith("@") or (chosen and not _GGUF.fullmatch(gguf)):
        close = _nearest(repository)
        known = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ModelNotFoundError(
            f"{text!r} is not the name of a model.",
            hint=f"{known}Expected {DEMO}, an alias (see `trtserve models`), org/name[@revision] or a folder; "
            "org/name:Q4_K_M chooses a GGUF file.",
        )
    derived = alias or plain_name(repository.rpartition("/")[2])
    return Source(
        text=text,
        kind="hub",
        location=repository,
        revision=revision or None,
        name=served_name(name or derived),
        gguf=gguf or None,
    )
