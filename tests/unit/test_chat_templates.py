"""Chat templates are found in the tokenizer's folder and rendered as transformers does, without a second BOS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from tests.support.described_models import described
from tests.support.tiny_models import write_tiny_model
from trtserve.client.endpoint import Endpoint
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply
from trtserve.client.tokenizer import (
    TokenizerFiles,
    chat_texts,
    end_words,
    find_chat_template,
    find_tokenizer,
    messages,
    prepare_prompts,
    render,
    takes_system,
)
from trtserve.errors import RequestError, UsageError
from trtserve.programs.shared.tokenizer import end_ids

if TYPE_CHECKING:
    from trtserve.client.transport import SyncClient

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


def test_named_templates_are_those_of_transformers(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "documents"}]
    files = with_config(folder, chat_template=several)
    assert find_chat_template(files, tools=True) == "tools"
    with pytest.raises(UsageError, match=r"has the chat templates rag, tool_use, and none of them is named default"):
        find_chat_template(files)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools of a file")
    (folder / "chat_template.jinja").write_text("the default")
    files = TokenizerFiles(folder)
    assert files.chat_templates == files.tokenizer.chat_template
    assert (find_chat_template(files), find_chat_template(files, tools=True)) == ("the default", "tools of a file")


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": {"image_token": "<image>", "boi_token": "<boi>"}},
        {"image_token": "<image>", "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}},
        {"model_specific_special_tokens": {"audio_token": "<audio>"}},
        {"extra_special_tokens": ["<a>", "<b>"], "cls_token": "<cls>"},
        {"additional_special_tokens": ["<a>"], "image_token": {"__type": "AddedToken", "content": "<image>"}},
        {"bos_token": None, "tokenizer_class": "Qwen2Tokenizer"},
    ],
    ids=str,
)
@pytest.mark.parametrize("mapped", [{}, {"bos_token": {"content": "<unk>"}, "sep_token": "<sep>"}], ids=str)
def test_special_tokens_are_those_of_transformers(
    folder: Path, settings: dict[str, Any], mapped: dict[str, Any]
) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    files = with_config(folder, **settings)
    assert files.special_tokens() == files.tokenizer.special_tokens_map


def test_tokens_that_only_the_tokenizers_class_names(folder: Path) -> None:
    files = with_config(folder, tokenizer_class="GPT2Tokenizer")
    content = {key: value for key, value in files.config.items() if key not in ("bos_token", "eos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    files = TokenizerFiles(folder)
    assert files.special_tokens() == files.tokenizer.special_tokens_map
    assert files.special_tokens()["bos_token"] == "<|endoftext|>"


def test_variables_of_a_template_are_those_of_transformers(folder: Path) -> None:
    template = (
        "{{ tools is none }}{{ documents is none }}{{ image_token }}{{ 'tool_calls' in messages[0] }}"
        "{{ messages[0].thinking ~ messages[0].reasoning_content }}{{ tools is defined and tools is not none }}"
        "{{ enable_thinking is defined }}{{ add_generation_prompt }}"
    )
    files = with_config(folder, chat_template=template, extra_special_tokens={"image_token": "<image>"})
    conversation = [{"role": "user", "content": "Hi", "tool_calls": None, "reasoning": "so"}]
    given: list[dict[str, Any]] = [
        {},
        {"enable_thinking": False},
        {"add_generation_prompt": False},
        {"image_token": "<mine>"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "documents": [{"title": "t", "text": "x"}]},
    ]
    for variables in given:
        known = {"add_generation_prompt": True, **variables}
        expected = files.tokenizer.apply_chat_template(conversation, tokenize=False, **known)
        assert render(template, conversation, files.special_tokens(), variables) == expected


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


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{{ messages[-1].content }}", False),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}", False),
        (None, False),
    ],
)
def test_a_template_without_system_messages_is_known(folder: Path, template: str | None, taken: bool) -> None:
    files = with_config(folder, chat_template=template)
    assert takes_system(files) == taken
    if template is not None and not taken:
        with pytest.raises(UsageError, match=r"no system|no place for a system message"):
            chat_texts(QuerySpec(prompts=("c",), system="S"), files, template)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ messages.__class__.__mro__ }}", "half a character: \ud800{{ messages[0].content }}"]
)
def test_invalid_or_unsafe_template_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        render(template, messages("x", None), {})


class Preprocessing:
    """A client of a server whose preprocessing model encodes with the tokenizer of a folder."""

    def __init__(self, folder: Path, *, adds_special: bool = True, core: bool = True) -> None:
        self.files, self.core = TokenizerFiles(folder), core
        self.adds_special = str(adds_special)
        self.asked = 0

    def describe(self, model: str) -> ModelDescription:
        if model == "tensorrt_llm" and not self.core:
            raise RequestError("no such model")
        return described(model, add_special_tokens=self.adds_special)

    def infer(self, request: ModelRequest) -> Iterator[Reply]:
        self.asked += 1
        ids = self.files.encode(request.tensors[0].flat()[0], special=True)
        yield Reply(outputs={"INPUT_ID": np.array([ids]), "REQUEST_INPUT_LEN": np.array([[len(ids)]])})

    def sent(self, model: str = "tensorrt_llm_bls", **settings: Any) -> list[int]:
        """Return the ids that the engine gets for the question `Hi`."""
        spec = QuerySpec(prompts=("Hi",), tokenizer=self.files.folder, **settings)
        client = cast("SyncClient", self)
        prompts, _, asked = prepare_prompts(spec, described(model), Endpoint(), client)
        if prompts.token_ids:
            assert asked.name == "tensorrt_llm"
            return list(prompts.token_ids[0])
        return self.files.encode(prompts.texts[0], special=self.adds_special == "True")


def piece(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def template_of(*pieces: Any) -> dict[str, Any]:
    """A post-processor that puts special tokens around a text."""
    return {
        "type": "TemplateProcessing",
        "single": list(pieces),
        "pair": [_TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<s>", 1), ("</s>", 2))
        },
    }


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
_BOS = template_of(piece("<s>"), _TEXT)
PROCESSORS = {
    "none": None,
    "bytes": _BYTES,
    "bos": _BOS,
    "bytes and bos": {"type": "Sequence", "processors": [_BYTES, _BOS]},
    "nothing": template_of(_TEXT),
    "eos": template_of(_TEXT, piece("</s>")),
    "both": template_of(piece("<s>"), _TEXT, piece("</s>")),
    "bert": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": "LlamaTokenizer"},
    {"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    {"tokenizer_class": "GemmaTokenizer", "add_bos_token": False},
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"tokenizer_class": "GPT2Tokenizer"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_template_becomes_the_ids_of_transformers_on_every_way(
    folder: Path, processor: str, settings: dict[str, Any]
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": PROCESSORS[processor]}))
    question = [{"role": "user", "content": "Hi"}]
    for begin, end in (("{{ bos_token }}[", "]"), ("[", "]"), ("", "</s>")):
        template = f"{begin}{{{{ messages[0].content }}}}{end}"
        files = with_config(folder, chat_template=template, **settings)
        expected = files.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        for adds_special in (True, False):
            server = Preprocessing(folder, adds_special=adds_special)
            assert server.sent() == expected
            assert server.sent("tensorrt_llm") == expected


def test_a_server_without_a_core_model_gets_the_text(folder: Path) -> None:
    with_config(folder, chat_template="{{ messages[0].content }}!")
    assert Preprocessing(folder, core=False).sent() == [1, *TokenizerFiles(folder).encode("Hi!", special=False)]


def test_a_server_that_adds_nothing_is_not_asked(folder: Path) -> None:
    with_config(folder, chat_template="{{ bos_token }}{{ messages[0].content }}")
    server = Preprocessing(folder, adds_special=False)
    assert server.sent()[:2] == [1, *server.files.encode("H", special=False)]
    assert server.asked == 0


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
    (text,) = chat_texts(spec, TokenizerFiles(folder), template)
    assert text == "[system]S[user]a[assistant]b[user]c"


def test_loops_of_a_template_keep_their_variables() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.role ~ ':' ~ m.content }}"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
    )
    assert render(template, messages("hi", None), {}) == "1/1Trueuser:hia12"


@pytest.mark.parametrize("settings", [{}, {"eos_token": "<unk>"}, {"eos_token": None}, {"eos_token": "e"}], ids=str)
def test_end_ids_are_those_of_the_preprocessing_model(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    files = with_config(folder, **settings)
    assert list(files.end_ids) == end_ids(TokenizerFiles(folder).tokenizer, folder)
    loaded = TokenizerFiles(folder)
    assert loaded.tokenizer is not None
    assert loaded.end_ids == files.end_ids
    (folder / "generation_config.json").unlink()
    assert list(TokenizerFiles(folder).end_ids) == end_ids(files.tokenizer, folder)


def test_token_ids_end_as_texts_do(folder: Path) -> None:
    spec = QuerySpec(token_ids=((5, 6),), tokenizer=folder)
    prompts, _, _ = prepare_prompts(spec, described("tensorrt_llm"), Endpoint(), cast("SyncClient", NoServer()))
    assert prompts.end_ids == (2,)


@pytest.mark.parametrize("added", [[{"id": 1}], [1], {"a": 1}, [{"id": "x", "content": "y"}]], ids=str)
def test_added_tokens_of_another_form_are_an_error(folder: Path, added: Any) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": added}))
    with pytest.raises(UsageError, match="cannot be loaded"):
        _ = TokenizerFiles(folder).end_ids
