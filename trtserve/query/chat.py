"""Chat templates: how a question becomes the text that a chat model was trained on.

Templates are Jinja, rendered as transformers renders them (its `apply_chat_template`), by Jinja alone: importing
transformers would take longer than most answers. They come with models of strangers, hence the sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtserve.errors import MissingDependencyError, UsageError
from trtserve.query.spec import QuerySpec
from trtserve.query.tokenizer import TokenizerFiles

_FILE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt in its template. `end_words` are the special tokens, beside the end id, that end the model's turn."""

    text: str
    end_words: tuple[str, ...] = field(default=())


def find_chat_template(files: TokenizerFiles) -> str | None:
    """The source of the tokenizer's default chat template; None for a model that is no chat model."""
    try:
        return (files.folder / _FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    template = files.config.get("chat_template") or files.json("chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def chat_prompts(spec: QuerySpec, files: TokenizerFiles, template: str, *, adds_special: bool) -> list[ChatPrompt]:
    """Every prompt of `spec` as the user's turn in the template.

    `adds_special`: the text will be encoded with special tokens, so a BOS that the tokenizer adds is taken off.
    """
    tokens = files.special_tokens()
    words = end_words(files)
    prompts = []
    for prompt in spec.prompts:
        text = render(template, messages(prompt, spec.system), tokens)
        if adds_special:
            text = without_bos(text, files, tokens.get("bos_token"))
        prompts.append(ChatPrompt(text=text, end_words=words))
    return prompts


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The conversation of one question."""
    said = [{"role": "system", "content": system}] if system is not None else []
    return [*said, {"role": "user", "content": prompt}]


def without_bos(text: str, files: TokenizerFiles, bos: str | None) -> str:
    """`text` without the BOS that the tokenizer is going to put in front of it again."""
    return text.removeprefix(bos) if bos and text.startswith(bos) and files.adds_bos() else text


def end_words(files: TokenizerFiles) -> tuple[str, ...]:
    """Texts of the tokens that end a turn, beside the tokenizer's EOS, which the server knows by itself."""
    eos = files.special_tokens().get("eos_token")
    texts = [files.decode_token(token) for token in files.end_ids()]
    return tuple(text for text in dict.fromkeys(texts) if text and text != eos)


def render(template: str, conversation: Sequence[dict[str, str]], special_tokens: dict[str, str]) -> str:
    """The conversation in the template, with the model's turn opened; UsageError with the template's own complaint."""
    environment = _environment()
    from jinja2 import TemplateError

    try:
        compiled = environment.from_string(template)
        text: str = compiled.render(messages=list(conversation), add_generation_prompt=True, **special_tokens)
    except TemplateError as error:
        raise UsageError(
            f"The model's chat template refuses this prompt: {error}", hint="--raw sends the prompt as it is."
        ) from None
    return text


def _environment() -> Any:
    try:
        from jinja2.ext import Extension
        from jinja2.nodes import CallBlock
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingDependencyError(
            "This model has a chat template, which needs the package jinja2.",
            hint="pip install jinja2, or send the prompt as it is with --raw.",
        ) from None

    class Generation(Extension):
        """`{% generation %}` marks the model's turns for training; here its body is rendered and nothing else."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained without that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
