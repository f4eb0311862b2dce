"""Chat templates are found in the tokenizer's folder and rendered as transformers does, without a second BOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import write_tiny_model
from trtserve.client.endpoint import Endpoint
from trtserve.client.spec import QuerySpec
from trtserve.client.tokenizer import (
    TokenizerFiles,
    chat_prompts,
    end_words,
    find_chat_template,
    find_tokenizer,
    messages,
    render,
)
from trtserve.errors import UsageError

TEMPLATES = {
    "llama": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] "
        "{{ message['content'] | trim }} [/INST]{% else %}"
        "<<SYS>>{{ message['content'] }}<</SYS>>{% endif %}{% endfor %}"
    ),
    "blocks": (
        "{%- for message in messages %}\n    {%- if loop.index0 == 5 %}{% break %}{% endif %}\n"
        "    {{- '<|' + message.role + '|>\\n' + message.content + eos_token }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|assistant|>\\n' }}\n{%- endif %}\n"
    ),
    "training": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}<é&'>",
    "namespace": (
        "{% set ns = namespace(system='none') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endfor %}{{ ns.system }}: {{ messages[-1]['content'].strip() }}"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def with_config(folder: Path, **settings: Any) -> TokenizerFiles:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return TokenizerFiles(folder)


def test_model_without_a_template(folder: Path) -> None:
    assert find_chat_template(TokenizerFiles(folder)) is None


def test_template_is_found_in_every_known_file(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "of a file"}')
    assert find_chat_template(TokenizerFiles(folder)) == "of a file"
    assert find_chat_template(with_config(folder, chat_template="of the config")) == "of the config"
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "the default"}]
    assert find_chat_template(with_config(folder, chat_template=several)) == "the default"
    (folder / "chat_template.jinja").write_text("its own file")
    assert find_chat_template(TokenizerFiles(folder)) == "its own file"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "Be <kind> & brief."])
def test_templates_are_rendered_as_transformers_does(folder: Path, name: str, system: str | None) -> None:
    files = with_config(folder, chat_template=TEMPLATES[name])
    conversation = messages("  What is 'ML'? é\n", system)
    expected = files.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert render(TEMPLATES[name], conversation, files.special_tokens()) == expected


def test_error_raised_by_a_template_is_shown() -> None:
    with pytest.raises(UsageError, match="no system, please") as caught:
        render("{{ raise_exception('no system, please') }}", messages("x", None), {})
    assert "--raw" in str(caught.value.hint)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages.__class__.__mro__ }}"])
def test_invalid_or_unsafe_template_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        render(template, messages("x", None), {})


def prompt_text(files: TokenizerFiles, template: str, *, adds_special: bool = True) -> str:
    prompt = chat_prompts(QuerySpec(prompts=("Hi",)), files, template, adds_special=adds_special)
    return prompt.texts[0]


@pytest.mark.parametrize("template", ["{{ bos_token }}[{{ messages[0].content }}]", "[{{ messages[0].content }}]"])
def test_prompt_has_one_bos(folder: Path, template: str) -> None:
    files = with_config(folder, chat_template=template)
    bos = files.tokenizer.bos_token_id
    ids = files.encode(prompt_text(files, template), special=True)
    assert ids.count(bos) == 1
    assert ids[1:] == files.encode("[Hi]", special=False)


def test_bos_of_the_template_stays_if_nothing_else_adds_one(folder: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    files = TokenizerFiles(folder)
    assert prompt_text(files, template, adds_special=False) == "<s>Hi"
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    bare = TokenizerFiles(folder)
    assert prompt_text(bare, template) == "<s>Hi"
    assert bare.encode(prompt_text(bare, template), special=True).count(1) == 1


_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize(
    "processor",
    [
        None,
        _BYTES,
        _TEMPLATE,
        {"type": "Sequence", "processors": [_BYTES, _TEMPLATE]},
        {**_TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}]},
        {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]},
    ],
)
def test_adds_bos_agrees_with_the_tokenizer(folder: Path, processor: Any) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": processor}))
    files = TokenizerFiles(folder)
    assert files.adds_bos() == (files.encode("a", special=True)[0] == files.tokenizer.bos_token_id)


def test_every_end_token_ends_the_turn(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1, 0]}')
    assert end_words(TokenizerFiles(folder)) == ("<s>", "<unk>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert end_words(TokenizerFiles(folder)) == ()


class NoServer:
    """A client that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_tokenizer_of_the_repository_is_used(folder: Path, tmp_path: Path) -> None:
    client = NoServer()
    assert find_tokenizer(None, Endpoint(), client) is None
    (tmp_path / "repository" / "preprocessing" / "1").mkdir(parents=True)
    folder.rename(tmp_path / "repository" / "preprocessing" / "1" / "tokenizer")
    found = find_tokenizer(None, Endpoint(repository=tmp_path / "repository"), client)
    assert found is not None
    assert found.special_tokens()["bos_token"] == "<s>"
    with pytest.raises(UsageError, match="expected the folder"):
        find_tokenizer(tmp_path / "nowhere", Endpoint(), client)


def test_broken_tokenizer_file_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not JSON"):
        find_chat_template(TokenizerFiles(folder))


def test_earlier_turns_come_before_the_question(folder: Path) -> None:
    history = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    spec = QuerySpec(prompts=("c",), system="S", history=history)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    prompt = chat_prompts(spec, TokenizerFiles(folder), template, adds_special=False)
    assert prompt.texts[0] == "[system]S[user]a[assistant]b[user]c"


def test_loops_of_a_template_keep_their_variables() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.role ~ ':' ~ m.content }}"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
    )
    assert render(template, messages("hi", None), {}) == "1/1Trueuser:hia12"
