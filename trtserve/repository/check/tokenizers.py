"""Rules about tokenizers: their folders, their ids compared with the engine's, and whether they work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trtserve.client.tokenizer import TokenizerFiles, find_chat_template, render
from trtserve.errors import MissingDependencyError, TrtserveError, counted
from trtserve.progress import SilentProgress
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, model_rule, of_role, refusal, rule
from trtserve.repository.profiles import CORE, POSTPROCESSING, PREPROCESSING
from trtserve.repository.tokenizer import check_tokenizer, require_same_tokens, token_ids, tokenizer_files

_LISTED = 3  # tokens that one message names


@model_rule(
    "tokenizer-path",
    "tokenizer_dir is a folder on this machine",
    of_role(PREPROCESSING, POSTPROCESSING, CORE),
    stops=True,
)
def absent_folders(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    text = model.parameters.get("tokenizer_dir", "")
    if not text and model.role != CORE:
        yield model.finding("The parameter tokenizer_dir is not set.", "Give the folder of the tokenizer.")
    elif text and model.config.backend == "python" and not repository.located(text, model.name).is_dir():
        yield model.finding(
            f"tokenizer_dir is {text!r}, which is not a folder on this machine.",
            "NVIDIA's program would take it for a name on the hub and try to download it. Put the tokenizer into "
            "the repository.",
        )


@rule("tokenizer-files", "it holds a tokenizer")
def missing_files(repository: Repository) -> Iterator[Finding]:
    for model, folder in _folders(repository):
        if (error := refusal(partial(tokenizer_files, folder))) is not None:
            yield model.finding(error.message, "Copy tokenizer.json, tokenizer_config.json and the like into it.")


@rule("tokenizer-pair", "pre- and postprocessing use one tokenizer")
def different_tokenizers(repository: Repository) -> Iterator[Finding]:
    found = {model.name: (model, folder) for model, folder in _folders(repository)}
    for name, (model, folder) in found.items():
        other = found.get(name.replace(POSTPROCESSING, PREPROCESSING))
        if model.role != POSTPROCESSING or other is None or folder.resolve() == other[1].resolve():
            continue
        if (error := refusal(partial(require_same_tokens, other[1], folder))) is not None:
            yield model.finding(
                f"{model.name} decodes with another tokenizer than {other[0].name} encodes with: "
                + error.message.partition(": ")[2],
                "Set the same tokenizer_dir in both.",
            )


@rule("tokenizer-vocabulary", "its ids are within the engine's vocabulary")
def large_vocabularies(repository: Repository) -> Iterator[Finding]:
    for model, folder, vocab_size in _with_engine(repository):
        beyond = _beyond(folder, vocab_size, added=False)
        if beyond:
            number, token = beyond[-1]
            yield model.finding(
                f"The tokenizer has {len(beyond)} tokens beyond the engine's vocabulary of {vocab_size}, such as "
                f"{token!r} ({number}).",
                "Use the tokenizer of the model that the engine was built from.",
            )


@rule("tokenizer-added", "so are its added tokens", severity="warning")
def large_added_tokens(repository: Repository) -> Iterator[Finding]:
    for model, folder, vocab_size in _with_engine(repository):
        beyond = _beyond(folder, vocab_size, added=True)
        if beyond:
            first = ", ".join(f"{token!r} ({number})" for number, token in beyond[:_LISTED])
            more = f" and {len(beyond) - _LISTED} more" if len(beyond) > _LISTED else ""
            yield model.finding(
                f"The tokenizer has {counted(len(beyond), 'added token')} beyond the engine's vocabulary of "
                f"{vocab_size}: {first}{more}. The server refuses requests with one of them.",
                "Use the tokenizer of the model that the engine was built from, or keep these tokens out of prompts.",
            )


def _beyond(folder: Path, vocab_size: int, *, added: bool) -> list[tuple[int, str]]:
    """Ids beyond the vocabulary with their tokens, of `added_tokens` or of the tokenizer's own vocabulary."""
    ids = token_ids(folder)
    if not ids:
        return []
    additions = {str(entry.get("content")) for entry in TokenizerFiles(folder).added_tokens()}
    return sorted(
        (number, token) for token, number in ids.items() if number >= vocab_size and (token in additions) == added
    )


@rule("tokenizer-end", "it ends texts as the model does", severity="warning")
def wrong_end_tokens(repository: Repository) -> Iterator[Finding]:
    for model, folder in _folders(repository):
        files = TokenizerFiles(folder)
        try:
            text, ends = files.special_tokens().get("eos_token"), files.configured_end_ids()
        except TrtserveError:
            continue  # the rule that loads the tokenizer reports it
        ids = token_ids(folder)
        if ids is None or model.role != PREPROCESSING:
            continue
        if text is None and not ends:
            yield model.finding(
                "Neither the tokenizer nor generation_config.json names a token that ends an answer.",
                "Copy generation_config.json of the model, or send end_id with each request.",
            )
        elif text is not None and ends and ids.get(text) not in ends:
            yield model.finding(
                f"The tokenizer ends texts with {text!r:.80} ({ids.get(text, 'no token')}), the model with "
                f"{list(ends)}.",
                "Correct eos_token in tokenizer_config.json, or eos_token_id in generation_config.json.",
            )


class _Warnings(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


@rule("tokenizer-load", "it can be loaded, without custom code", needs="tokenizer")
def broken_tokenizers(repository: Repository) -> Iterator[Finding]:
    for model, error, _ in _loaded(repository):
        if error is not None:
            yield model.finding(error.message, error.hint or "Check the files of the tokenizer.")


@rule("tokenizer-exact", "it returns the text that it was given", severity="warning", needs="tokenizer")
def inexact_tokenizers(repository: Repository) -> Iterator[Finding]:
    for model, _, warnings in _loaded(repository):
        yield from (model.finding(text, "Check its normalizer and decoder.") for text in warnings)


def _loaded(repository: Repository) -> Iterator[tuple[ModelFolder, TrtserveError | None, list[str]]]:
    """Load every tokenizer once, as the models do; why that failed, and the warnings."""
    sizes = {folder.resolve(): size for _, folder, size in _with_engine(repository)}
    for model, folder in _distinct_folders(repository):
        if refusal(partial(tokenizer_files, folder)) is None:  # otherwise another rule reports it
            warnings = _Warnings()
            error = refusal(partial(check_tokenizer, folder, sizes.get(folder.resolve()), warnings))
            yield model, error, warnings.texts


@rule("chat-template", "the chat template accepts a question", needs="tokenizer")
def broken_chat_templates(repository: Repository) -> Iterator[Finding]:
    for model, folder in _distinct_folders(repository):
        files = TokenizerFiles(folder)
        if refusal(partial(files.json, "tokenizer_config.json")) is not None:
            continue  # the rule that loads the tokenizer reports it
        try:
            template = find_chat_template(files)
            if template is not None and model.role == PREPROCESSING:
                render(template, [{"role": "user", "content": "?"}], files.special_tokens())
        except MissingDependencyError:
            return
        except TrtserveError as error:
            yield model.finding(
                error.message, "Correct chat_template.jinja, or chat_template in tokenizer_config.json."
            )
        except Exception as error:  # noqa: BLE001 - a template is third-party code
            yield model.finding(f"The chat template fails: {error}", "Correct chat_template.jinja.")


def _folders(repository: Repository) -> Iterator[tuple[ModelFolder, Path]]:
    """Every model with the folder of its tokenizer; models that encode come first."""
    for model in (*repository.of(PREPROCESSING), *repository.of(POSTPROCESSING)):
        text = model.parameters.get("tokenizer_dir", "")
        if text and (folder := repository.located(text, model.name)).is_dir():
            yield model, folder
    for model in repository.of(LLMAPI):
        name = str(model.core.settings.get("model", "")) if model.core is not None else ""
        if name and (folder := repository.located(name, model.name)).is_dir():
            yield model, folder


def _distinct_folders(repository: Repository) -> Iterator[tuple[ModelFolder, Path]]:
    """Every tokenizer folder once, with the first model that uses it."""
    first: dict[Path, tuple[ModelFolder, Path]] = {}
    for model, folder in _folders(repository):
        first.setdefault(folder.resolve(), (model, folder))
    yield from first.values()


def _with_engine(repository: Repository) -> Iterator[tuple[ModelFolder, Path, int]]:
    """Models that encode, with the folder of their tokenizer and the size of the engine's vocabulary."""
    for model, folder in _folders(repository):
        core = repository.models.get(model.name.replace(PREPROCESSING, CORE))
        size = core.engine.model.vocab_size if core is not None else None
        if isinstance(size, int) and model.role == PREPROCESSING:
            yield model, folder, size
