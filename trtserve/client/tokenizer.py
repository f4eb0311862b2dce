"""The tokenizer of a server, if its files are here, and the prompts that it makes: chat template and token ids.

Templates are rendered with Jinja as transformers' `apply_chat_template` does, but without importing transformers, which
would take longer than most answers. Templates come from untrusted model authors, hence the process of their own.
"""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtserve.client.endpoint import Endpoint
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import CORE_MODEL, IDS_INPUT, TEXT_INPUT, VLLM_INPUT, ModelDescription, ModelRequest
from trtserve.client.transport import SyncClient
from trtserve.errors import MissingDependencyError, RequestError, TrtserveError, UsageError
from trtserve.files import LARGEST_TEXT, optional_json_object, read_text, whole_number
from trtserve.process.answering import AnsweringProcess
from trtserve.programs.shared.tokenizer import configured_end_ids, decode, encode, open_tokenizer

PREPROCESSING = "preprocessing"
NO_SYSTEM = "The model's chat template has no place for a system message: it would be dropped."
_FALSE_WORDS = ("false", "0", "f", "n", "no")

TEMPLATE_SECONDS = 5.0  # longest time that a template may compute
TEMPLATE_CHARACTERS = 8 << 20  # longest text that a template may make
_TEMPLATE_FILE, _TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"
_STANDARD_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Encode = Callable[[str], list[int]]


class SlowTemplateError(UsageError):
    """A chat template computes longer than it may."""


def template_process() -> AnsweringProcess:
    """Return a process that renders templates, in at most 1 GiB of memory."""
    return AnsweringProcess((sys.executable, "-m", "trtserve.client.template_process", str(1 << 30)))


_RENDERER = template_process()


class TokenizerFiles:
    """The folder of a Hugging Face tokenizer; the tokenizer itself is only loaded when it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.json("tokenizer_config.json")

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the content of a JSON file, or {} if the file does not exist."""
        return optional_json_object(self.folder / name, UsageError, limit=LARGEST_TEXT)

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of `bos_token`, `image_token` … by name, as transformers gives them to chat templates."""
        merged = dict(self.config)
        if "added_tokens_decoder" not in merged:  # written by transformers before 4.34
            merged |= self.json("special_tokens_map.json")
        for key in ("model_specific_special_tokens", "extra_special_tokens"):
            if isinstance(named := merged.get(key), Mapping):
                merged |= named
        texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in merged.items()}
        tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        if not {"bos_token", "eos_token"} <= merged.keys():  # the class of the tokenizer may have its own
            own: Mapping[str, Any] = self.tokenizer.special_tokens_map
            tokens = {name: str(own[name]) for name in _STANDARD_TOKENS if isinstance(own.get(name), str)} | tokens
        return tokens

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """Return the sources of the chat templates by name; a single one is called `default`."""
        files = {path.name.removesuffix(".jinja"): path for path in (self.folder / _TEMPLATES_FOLDER).glob("*.jinja")}
        if (own := self.folder / _TEMPLATE_FILE).is_file():
            files["default"] = own
        if files:
            return {name: read_text(path, UsageError) for name, path in sorted(files.items())}
        found = self.config.get("chat_template") or self.json("chat_template.json").get("chat_template")
        if isinstance(found, list):
            found = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        named = found if isinstance(found, Mapping) else {"default": found}
        return {str(name): text for name, text in named.items() if isinstance(text, str)}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded as the preprocessing model does: local files only, no remote code."""
        try:
            return open_tokenizer(self.folder)
        except ModuleNotFoundError as error:
            raise missing_packages(self.folder, error) from None
        except Exception as error:  # noqa: BLE001 - what transformers and tokenizers raise depends on the damage
            if not any(self.folder.glob("tokenizer*")):
                names = "tokenizer.json, tokenizer.model or tokenizer_config.json"
                raise UsageError(f"{self.folder} contains no tokenizer: it has no {names}.") from None
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UsageError(f"The tokenizer in {self.folder} cannot be loaded: {first}") from None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of `text`; `special` adds BOS and other special tokens, as for a prompt."""
        try:
            return encode(self.tokenizer, text, special=special)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        return decode(self.tokenizer, ids, skip_special_tokens=True)

    def added_tokens(self) -> list[Mapping[str, Any]]:
        """Return the entries of `added_tokens` in tokenizer.json that have an `id`."""
        entries = self.json("tokenizer.json").get("added_tokens")
        listed = entries if isinstance(entries, list) else []
        return [entry for entry in listed if isinstance(entry, Mapping) and type(entry.get("id")) is int]

    @cached_property
    def _added(self) -> Mapping[int, str]:
        """The texts of the added tokens, special ones among them."""
        decoder = self.config.get("added_tokens_decoder")
        decoder = decoder if isinstance(decoder, Mapping) else {}
        entries: list[tuple[int, Any]] = [(entry["id"], entry) for entry in self.added_tokens()]
        entries += [(number, entry) for key, entry in decoder.items() if (number := whole_number(key)) is not None]
        found = {number: entry.get("content") for number, entry in entries if isinstance(entry, Mapping)}
        return {number: text for number, text in found.items() if isinstance(text, str)}

    def decode_token(self, token: int) -> str:
        """Return the text of one added token, or "" for any other token."""
        return self._added.get(token, "")

    def configured_end_ids(self) -> list[int]:
        """Return the end token ids of generation_config.json, else those of config.json."""
        try:
            return configured_end_ids(self.folder)
        except ValueError as error:
            raise UsageError(f"The model's files in {self.folder} do not say what ends an answer: {error}.") from None

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer, the tokenizer's own first, as the preprocessing model has them."""
        own = self._end_id()
        return tuple(dict.fromkeys([*([] if own is None else [own]), *self.configured_end_ids()]))

    def _end_id(self) -> int | None:
        if "tokenizer" not in self.__dict__:  # its library takes a second to load
            text = self.special_tokens().get("eos_token")
            found = next((number for number, content in self._added.items() if content == text), None)
            if found is not None:
                return found
        eos = self.tokenizer.eos_token_id
        return None if eos is None else int(eos)


def missing_packages(folder: Path, error: ModuleNotFoundError) -> MissingDependencyError:
    """Return the error for a tokenizer that needs packages which are not installed."""
    return MissingDependencyError(
        f"The tokenizer in {folder} cannot be loaded: {error}.",
        hint=f"pip install {error.name}, or save the tokenizer as tokenizer.json, which needs no further package.",
    )


def find_tokenizer(
    given: Path | None,
    server: Endpoint,
    client: SyncClient | None,
    *,
    preprocessing: str = PREPROCESSING,
    model: ModelDescription | None = None,
) -> TokenizerFiles | None:
    """Return the tokenizer of `--tokenizer`, else the one in the server's repository, or None if that is unknown.

    `client` can ask where the repository's tokenizer is; without one it is where `repo` puts it. A `model` of NVIDIA's
    backend `vllm` has its own, in the folder that its model.json names.
    """
    if given is not None:
        if not given.is_dir():
            raise UsageError(f"--tokenizer is {given}; expected the folder of a tokenizer.")
        return TokenizerFiles(given)
    if server.repository is None:
        return None
    if model is not None and VLLM_INPUT in model.inputs:
        from trtserve.executor.vllm.arguments import MODEL_JSON

        settings = optional_json_object(server.repository / model.name / "1" / MODEL_JSON)
        folder = server.repository / str(settings.get("tokenizer") or settings.get("model") or "?")
        return TokenizerFiles(folder) if folder.is_dir() else None
    folder = server.repository / preprocessing / "1" / "tokenizer"
    if client is not None and not folder.is_dir():
        folder = server.repository / _parameters(client, preprocessing).get("tokenizer_dir", "?")
    return TokenizerFiles(folder) if folder.is_dir() else None


def server_adds_special_tokens(client: SyncClient, *, preprocessing: str = PREPROCESSING) -> bool:
    """Return whether the server's preprocessing model adds special tokens to prompts (the default)."""
    return _parameters(client, preprocessing).get("add_special_tokens", "").lower() not in _FALSE_WORDS


def _parameters(client: SyncClient, model: str) -> Mapping[str, str]:
    try:
        return client.describe(model).parameters
    except TrtserveError:  # a repository without a preprocessing model
        return {}


@dataclass(frozen=True, kw_only=True)
class PreparedPrompts:
    """The rows of one request, as texts, or as token ids for a core model."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    end_words: tuple[str, ...] = ()
    """Texts of the tokens that end an answer in addition to the one that the server knows."""
    end_ids: tuple[int, ...] = ()  # the ids that end an answer, for a core model, which knows none

    @property
    def rows(self) -> int:
        """Batch size."""
        return len(self.texts) or len(self.token_ids)

    def split(self) -> list[PreparedPrompts]:
        """Return one request per row."""
        texts = [replace(self, texts=(text,)) for text in self.texts]
        return texts or [replace(self, token_ids=(ids,)) for ids in self.token_ids]


def require_tokenizer(files: TokenizerFiles | None, model: ModelDescription, what: str) -> TokenizerFiles:
    """Return the tokenizer. Raises UsageError if there is none, because a core model needs it for `what`."""
    if files is None:
        raise UsageError(
            f"{what} needs a tokenizer: the model {model.name!r} takes token ids, and no tokenizer is available here.",
            hint="Give the tokenizer's folder with --tokenizer, or the prompt as ids with --input-tokens-csv.",
        )
    return files


def find_chat_template(files: TokenizerFiles, *, tools: bool = False) -> str | None:
    """Return the source of the tokenizer's chat template, or None for a model without one.

    `tools`: prefer the template for conversations with tools, if the tokenizer has one of its own. Raises UsageError
    if there are several and none is the default.
    """
    named = files.chat_templates
    if tools and "tool_use" in named:
        return named["tool_use"]
    if named and "default" not in named:
        raise UsageError(
            f"The tokenizer has the chat templates {', '.join(sorted(named))}, and none of them is named default.",
            hint="Name one of them default in the tokenizer's folder, or send the prompt without a template: --raw.",
        )
    return named.get("default")


def chat_texts(spec: QuerySpec, files: TokenizerFiles, template: str) -> tuple[str, ...]:
    """Render every prompt of `spec` as the user's turn of the template."""
    tokens = files.special_tokens()
    if spec.system is not None:
        require_system(template, spec.system, tokens)
    return tuple(render(template, messages(prompt, spec.system, spec.history), tokens) for prompt in spec.prompts)


def require_system(template: str, system: str, special_tokens: Mapping[str, str]) -> None:
    """Raise UsageError for a chat template that refuses system messages, or drops them without a word."""
    first, second = (render(template, messages("?", each), special_tokens) for each in (system, None))
    if first == second and system.strip():
        raise UsageError(NO_SYSTEM, hint="Write it into the question.")


def takes_system(files: TokenizerFiles) -> bool:
    """Return whether conversations may have a system message."""
    try:
        template = find_chat_template(files)
        if template is not None:
            require_system(template, "Answer briefly.", files.special_tokens())
    except TrtserveError:
        return False
    return template is not None


def messages(prompt: str, system: str | None, history: Sequence[Mapping[str, str]] = ()) -> list[Mapping[str, str]]:
    """Return the conversation that ends with a question."""
    system_turn = [{"role": "system", "content": system}] if system is not None else []
    return [*system_turn, *history, {"role": "user", "content": prompt}]


def text_to_send(text: str, ids: Sequence[int], bos: str | None, encode: Encode) -> str | None:
    """Return a text that `encode`, which adds special tokens, turns into `ids`: a rendered template contains its own.

    None: there is no such text, for example because the tokenizer adds a token that the template does not want.
    """
    shorter = text.removeprefix(bos or "")
    return next((each for each in dict.fromkeys((text, shorter)) if each and encode(each) == list(ids)), None)


def ids_without_added(text: str, tokens: Mapping[str, str], encode: Encode) -> list[int]:
    """Return the ids of a rendered template, from an encoder that adds special tokens: without those that it adds.

    A BOS that comes twice where the text has one was added.
    """
    ids, bos, eos = encode(text), tokens.get("bos_token"), tokens.get("eos_token")
    if bos:
        first = ids if text.startswith(bos) else encode(bos + text)
        ids = ids[1:] if first[:1] == first[1:2] else ids
    if eos:
        last = ids if text.endswith(eos) else encode(text + eos)
        ids = ids[:-1] if last[-1:] == last[-2:-1] else ids
    return ids


def end_words(files: TokenizerFiles) -> tuple[str, ...]:
    """Return the texts of the tokens that end a turn, except the tokenizer's EOS, which the server handles."""
    eos = files.special_tokens().get("eos_token")
    texts = [files.decode_token(token) for token in files.configured_end_ids()]
    return tuple(text for text in dict.fromkeys(texts) if text and text != eos)


def render(
    template: str,
    conversation: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any] | None = None,
    *,
    most: int = TEMPLATE_CHARACTERS,
    seconds: float = TEMPLATE_SECONDS,
    process: AnsweringProcess = _RENDERER,
) -> str:
    """Render the conversation and open the model's turn; `variables` are further ones of the template, such as `tools`.

    Raises UsageError with the reason the template gives, and for one that makes more than `most` characters;
    SlowTemplateError for one that takes longer than `seconds`.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise MissingDependencyError(
            "This model has a chat template, which needs the package jinja2.",
            hint="pip install jinja2, or send the prompt without a template: --raw.",
        )
    given = {
        **special_tokens,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **(variables or {}),
        "messages": [_as_templates_expect(message) for message in conversation],
    }
    try:
        answer = process.ask({"template": template, "variables": given, "seconds": seconds, "most": most})
    except TimeoutError:
        answer = {"late": True}
    except ChildProcessError as error:
        answer = {"error": f"the process that renders it {error}"}
    if late := "late" in answer:
        answer = {"error": f"it takes longer than {seconds:g} s"}
    if "error" in answer:
        raise (SlowTemplateError if late else UsageError)(
            f"The model's chat template rejects this prompt: {answer['error']}",
            hint="--raw sends the prompt without a template.",
        )
    text: str = answer["text"]
    return text


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without absent values, and with its reasoning under each name that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in ("reasoning_content", "thinking", "reasoning") if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def prepare_prompts(
    spec: QuerySpec, model: ModelDescription, server: Endpoint, client: SyncClient
) -> tuple[PreparedPrompts, TokenizerFiles | None, ModelDescription]:
    """Return the prompts to send, the tokenizer if its files are available, and the model to send to.

    That is `model`, or the core model behind it if only token ids can say what the chat template makes. Raises
    UsageError for an empty prompt, for --system without a chat template, for token ids where the model expects text.
    """
    if not spec.rows or any(not prompt.strip() for prompt in spec.prompts):
        raise UsageError("The prompt is empty.", hint='Give one: trtserve query "What is ML?"')
    if spec.token_ids and IDS_INPUT not in model.inputs:
        raise UsageError(
            f"The model {model.name!r} takes text, not token ids.", hint="Query the core model: --model tensorrt_llm."
        )
    preprocessing = model.parameters.get("preprocessing_model_name") or PREPROCESSING
    files = find_tokenizer(spec.tokenizer, server, client, preprocessing=preprocessing, model=model)
    core = TEXT_INPUT not in model.inputs
    if spec.token_ids:
        return PreparedPrompts(token_ids=spec.token_ids, end_ids=() if files is None else files.end_ids), files, model
    template = None if files is None or spec.raw else find_chat_template(files)
    if template is None and spec.system is not None:
        raise UsageError(
            "A system message needs a chat template, and none is available for this model.",
            hint="Chat models have one. If this is one, start the command with --tokenizer FOLDER.",
        )
    # The server is asked only where the answer makes a difference.
    asked = files is not None and (core or template is not None)
    adds_special = server_adds_special_tokens(client, preprocessing=preprocessing) if asked else True
    texts = spec.prompts if files is None or template is None else chat_texts(spec, files, template)
    if core:
        files = require_tokenizer(files, model, "A prompt")
        # The rendered template already contains its special tokens.
        special = adds_special and template is None
        return _as_ids([files.encode(text, special=special) for text in texts], files), files, model
    words = () if files is None or template is None else end_words(files)
    if files is None or template is None or not adds_special:
        return PreparedPrompts(texts=texts, end_words=words), files, model
    encode = _encoder(client, preprocessing, files)
    tokens = files.special_tokens()
    ids = [ids_without_added(text, tokens, encode) for text in texts]
    found = [text_to_send(text, row, tokens.get("bos_token"), encode) for text, row in zip(texts, ids, strict=True)]
    behind = _core_model(client, model) if None in found else None
    if behind is not None:
        return _as_ids(ids, files), files, behind
    sent = tuple(text if other is None else other for text, other in zip(texts, found, strict=True))
    return PreparedPrompts(texts=sent, end_words=words), files, model


def _as_ids(rows: Sequence[Sequence[int]], files: TokenizerFiles) -> PreparedPrompts:
    return PreparedPrompts(token_ids=tuple(map(tuple, rows)), end_ids=files.end_ids)


def core_name(model: ModelDescription) -> str:
    """Return the name of the core model that runs the engine for a model."""
    return model.name if model.has(IDS_INPUT) else model.parameters.get("tensorrt_llm_model_name") or CORE_MODEL


def _core_model(client: SyncClient, model: ModelDescription) -> ModelDescription | None:
    """Return the core model behind a text model, or None where the text model runs the engine itself."""
    try:
        core = client.describe(core_name(model))
    except RequestError:
        return None
    return core if core.has(IDS_INPUT) else None


def _encoder(client: SyncClient, preprocessing: str, files: TokenizerFiles) -> Encode:
    """Return what turns texts into ids as the server does: its preprocessing model, which takes milliseconds.

    Without one it is the tokenizer here, whose library takes a second to load.
    """
    try:
        model = client.describe(preprocessing)
    except RequestError:
        return lambda text: files.encode(text, special=True)

    def encode(text: str) -> list[int]:
        tensors = [model.row_tensor("QUERY", [[text]]), model.row_tensor("REQUEST_OUTPUT_LEN", [[1]])]
        outputs = ("INPUT_ID", "REQUEST_INPUT_LEN")
        (reply,) = client.infer(ModelRequest(model=model, tensors=tensors, id=uuid.uuid4().hex, outputs=outputs))
        length = int(reply.outputs["REQUEST_INPUT_LEN"].reshape(-1)[0])
        ids: list[int] = reply.outputs["INPUT_ID"].reshape(-1)[:length].tolist()
        return ids

    return encode
