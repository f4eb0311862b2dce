"""Rules about tokenizers: their folders, their ids beside the engine's, and whether they work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trtserve.check.repository.findings import Fault, refusal
from trtserve.check.repository.subject import LLMAPI, ModelFolder, Subject
from trtserve.errors import MissingDependencyError, TrtserveError, counted
from trtserve.progress import SilentProgress
from trtserve.query.chat import find_chat_template, render
from trtserve.query.tokenizer import TokenizerFiles
from trtserve.repo.tokenizer import check_tokenizer, require_same_tokens, token_ids, tokenizer_files
from trtserve.triton.profiles import CORE, POSTPROCESSING, PREPROCESSING

# Tokens that one message names.
_NAMED = 3


class _Heard(SilentProgress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def absent(subject: Subject) -> Iterator[Fault]:
    """tokenizer_dir is a folder of this machine."""
    for model in subject.of(PREPROCESSING, POSTPROCESSING, CORE):
        text = model.parameters.get("tokenizer_dir", "")
        if not text and model.role != CORE:
            yield _fault(model, "The parameter tokenizer_dir is not set.", "Give the folder of the tokenizer.")
        elif model.config.backend == "python" and text and not subject.located(text, model.name).is_dir():
            yield _fault(
                model,
                f"tokenizer_dir is {text!r}, which is no folder on this machine.",
                "NVIDIA's program would take it for a name of the hub and try to download it. Put the tokenizer into "
                "the repository.",
            )


def without_files(subject: Subject) -> Iterator[Fault]:
    """The folder of a tokenizer holds one."""
    for model, folder in _folders(subject):
        if (error := refusal(partial(tokenizer_files, folder))) is not None:
            yield _fault(model, error.message, "Copy tokenizer.json, tokenizer_config.json and their like into it.")


def two_tokenizers(subject: Subject) -> Iterator[Fault]:
    """Texts are decoded by the tokenizer that encoded them."""
    found = {model.name: (model, folder) for model, folder in _folders(subject)}
    for name, (model, folder) in found.items():
        other = found.get(name.replace(POSTPROCESSING, PREPROCESSING))
        if model.role != POSTPROCESSING or other is None or folder.resolve() == other[1].resolve():
            continue
        if (error := refusal(partial(require_same_tokens, other[1], folder))) is not None:
            yield _fault(
                model,
                f"{model.name} decodes with another tokenizer than {other[0].name} encodes with: "
                + error.message.partition(": ")[2],
                "Let both name the same tokenizer_dir.",
            )


def large_vocabularies(subject: Subject) -> Iterator[Fault]:
    """Every token of the tokenizer is one of the engine's."""
    for model, folder, vocab_size in _with_engine(subject):
        beyond = _beyond(folder, vocab_size, added=False)
        if beyond:
            token = max(beyond, key=lambda each: beyond[each])
            yield _fault(
                model,
                f"The tokenizer has {len(beyond)} tokens beyond the engine's vocabulary of {vocab_size}, such as "
                f"{token!r} ({beyond[token]}).",
                "Take the tokenizer of the model that the engine was built from.",
            )


def large_additions(subject: Subject) -> Iterator[Fault]:
    """Every added token is one of the engine's too: a request with another one is refused."""
    for model, folder, vocab_size in _with_engine(subject):
        beyond = sorted((number, token) for token, number in _beyond(folder, vocab_size, added=True).items())
        if beyond:
            first = ", ".join(f"{token!r} ({number})" for number, token in beyond[:_NAMED])
            more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
            yield _fault(
                model,
                f"The tokenizer has {counted(len(beyond), 'added token')} beyond the engine's vocabulary of "
                f"{vocab_size}: {first}{more}. A text with one of them cannot be answered.",
                "Take the tokenizer of the model that the engine was built from, or keep these tokens out of prompts.",
            )


def _beyond(folder: Path, vocab_size: int, *, added: bool) -> dict[str, int]:
    """Token → id of those beyond the vocabulary, from `added_tokens` or from the model's own list."""
    ids = token_ids(folder)
    if not ids:
        return {}
    entries = TokenizerFiles(folder).json("tokenizer.json").get("added_tokens", [])
    additions = {str(entry.get("content")) for entry in entries}
    return {token: number for token, number in ids.items() if number >= vocab_size and (token in additions) == added}


def wrong_ends(subject: Subject) -> Iterator[Fault]:
    """The token that ends a text is one that the model ends its answers with."""
    for model, folder in _folders(subject):
        files = TokenizerFiles(folder)
        try:
            text, ends = files.special_tokens().get("eos_token"), files.end_ids()
        except TrtserveError:
            continue  # told where the tokenizer is loaded
        ids = token_ids(folder)
        if ids is None or model.role != PREPROCESSING:
            continue
        if text is None and not ends:
            yield _fault(
                model,
                "Neither the tokenizer nor generation_config.json names a token that ends an answer.",
                "Copy generation_config.json of the model, or send end_id with each request.",
            )
        elif text is not None and ends and ids.get(text) not in ends:
            yield _fault(
                model,
                f"The tokenizer ends texts with {text!r} ({ids.get(text, 'no token')}), the model with {list(ends)}.",
                "Correct eos_token in tokenizer_config.json, or eos_token_id in generation_config.json.",
            )


def not_working(subject: Subject) -> Iterator[Fault]:
    """The tokenizer can be loaded as the models load it, and takes a text there and back."""
    yield from (fault for fault, fatal in _probed(subject) if fatal)


def not_exact(subject: Subject) -> Iterator[Fault]:
    """What comes back is what was sent."""
    yield from (fault for fault, fatal in _probed(subject) if not fatal)


def _probed(subject: Subject) -> Iterator[tuple[Fault, bool]]:
    """Every tokenizer folder once; whether the fault keeps the model from working."""
    sizes = {folder.resolve(): size for _, folder, size in _with_engine(subject)}
    seen: set[Path] = set()
    for model, folder in _folders(subject):
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        heard = _Heard()
        if refusal(partial(tokenizer_files, folder)) is not None:
            continue  # told by without_files
        error = refusal(partial(check_tokenizer, folder, sizes.get(folder.resolve()), heard))
        if error is not None:
            yield _fault(model, error.message, error.hint or "Check the files of the tokenizer."), True
        yield from ((_fault(model, text, "Check its normalizer and decoder."), False) for text in heard.warnings)


def broken_templates(subject: Subject) -> Iterator[Fault]:
    """The chat template can be read and takes a question."""
    seen: set[Path] = set()
    for model, folder in _folders(subject):
        files = TokenizerFiles(folder)
        if folder.resolve() in seen or refusal(partial(files.json, "tokenizer_config.json")) is not None:
            continue  # told where the tokenizer is loaded
        seen.add(folder.resolve())
        try:
            template = find_chat_template(files)
            if template is not None and model.role == PREPROCESSING:
                render(template, [{"role": "user", "content": "?"}], files.special_tokens())
        except MissingDependencyError:
            return
        except TrtserveError as error:
            yield _fault(
                model, error.message, "Correct chat_template.jinja, or chat_template in tokenizer_config.json."
            )
        except Exception as error:  # noqa: BLE001 - templates are programs of strangers
            yield _fault(model, f"The chat template fails: {error}", "Correct chat_template.jinja.")


def _folders(subject: Subject) -> Iterator[tuple[ModelFolder, Path]]:
    """Every model with the folder of its tokenizer; those that encode come first and answer for a folder of both."""
    for model in (*subject.of(PREPROCESSING), *subject.of(POSTPROCESSING)):
        text = model.parameters.get("tokenizer_dir", "")
        if text and (folder := subject.located(text, model.name)).is_dir():
            yield model, folder
    for model in subject.of(LLMAPI):
        name = str(model.core.settings.get("model", "")) if model.core is not None else ""
        if name and (folder := subject.located(name, model.name)).is_dir():
            yield model, folder


def _with_engine(subject: Subject) -> Iterator[tuple[ModelFolder, Path, int]]:
    """Tokenizers with the vocabulary of the engine that their ids go to."""
    for model, folder in _folders(subject):
        core = subject.models.get(model.name.replace(PREPROCESSING, CORE).replace(POSTPROCESSING, CORE))
        size = core.pretrained.get("vocab_size") if core is not None else None
        if isinstance(size, int) and model.role == PREPROCESSING:
            yield model, folder, size


def _fault(model: ModelFolder, what: str, fix: str) -> Fault:
    return Fault(model=model.name, file=model.file, what=what, fix=fix)
