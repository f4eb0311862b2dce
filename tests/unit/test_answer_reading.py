"""Thoughts, text and calls in the answers of every family, whatever pieces the text comes in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from trtserve.gateway.openai.dialects import dialect_of
from trtserve.gateway.openai.reading import Call, Schemas, reader_of

TOOLS: Schemas = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "clock": {"type": "object", "properties": {}},
}
ULM = ("weather", {"city": 'Ulm "}]', "days": 2})
ARGUMENTS = json.dumps(ULM[1])
CLOCK: tuple[str, dict[str, Any]] = ("clock", {})
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
# Family → what its chat template contains, an answer with two calls, and the text around them.
CALLS: dict[str, tuple[str, str, str]] = {
    "Hermes, Qwen": (
        "<tool_call>",
        (
            f'Well.<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
            '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
        ),
        "Well.\n",
    ),
    "arguments before the name": (
        "",
        (
            f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>'
            '<tool_call>{"type": "function", "function": {"name": "clock", "parameters": "{}"}}</tool_call>'
        ),
        "",
    ),
    "Llama": (
        "<|python_tag|>",
        f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "clock", "parameters": {{}}}}',
        "",
    ),
    "Llama without a mark": (
        "<|python_tag|>",
        f'\n{{"id": "1", "name": "weather", "parameters": {ARGUMENTS}}};{{"name": "clock", "parameters": {{}} }}',
        "",
    ),
    "a list": (
        "",
        f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
        "",
    ),
    "Python": ("", """[weather(city='Ulm "}]', days=2), clock()]""", ""),
    "Llama 4": (
        "<|python_start|>",
        """A<|python_start|>[weather(city='Ulm "}]', days=2), clock()]<|python_end|>""",
        "A",
    ),
    "Mistral": (
        "[TOOL_CALLS]",
        f'Hm[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
        "Hm",
    ),
    "Mistral since 2025": (
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{ARGUMENTS}[TOOL_CALLS]clock{{}}",
        "",
    ),
    "Phi 4 mini": (
        "<|tool|>",
        f'functools[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
        "",
    ),
    "Phi 4 mini, Granite": (
        "<|tool_call|>",
        (
            f'<|tool_call|>[{{"name":"weather","arguments":{ARGUMENTS}}},{{"name":"clock","arguments":{{}}}}]'
            "<|/tool_call|>"
        ),
        "",
    ),
    "DeepSeek V3": (
        _DEEPSEEK[0],
        f"A{_DEEPSEEK[0]}{_V3.format('weather', ARGUMENTS)}\n{_V3.format('clock', '{}')}{_DEEPSEEK[1]}",
        "A",
    ),
    "DeepSeek V3.1": (
        _DEEPSEEK[0],
        f"{_DEEPSEEK[0]}{_V31.format('weather', ARGUMENTS)}{_V31.format('clock', '{}')}{_DEEPSEEK[1]}",
        "",
    ),
    "GLM": (
        "<tool_call>",
        (
            '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm "}]</arg_value>\n<arg_key>days</arg_key>\n'
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>"
        ),
        "\n",
    ),
    "Qwen Coder": (
        "<tool_call>",
        (
            '<tool_call>\n<function=weather>\n<parameter=city>\nUlm "}]\n</parameter>\n<parameter=days>\n2\n'
            "</parameter>\n</function>\n</tool_call>\n<tool_call><function=clock></function></tool_call>"
        ),
        "\n",
    ),
    "gpt-oss": (
        "<|channel|>",
        (
            "<|channel|>commentary<|message|>A<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            f"<|constrain|>json<|message|>{ARGUMENTS}<|call|><|start|>assistant to=functions.clock"
            "<|channel|>commentary json<|message|>{}<|call|>"
        ),
        "A",
    ),
}


def pieces(text: str, seed: int | None) -> list[str]:
    """Cut a text: not at all, after every character, or anywhere."""
    if seed is None:
        return [text]
    if seed == 0:
        return list(text)
    chance, made = random.Random(seed), list[str]()
    while text:
        size = chance.randrange(1, 12)
        made.append(text[:size])
        text = text[size:]
    return made


def read(
    template: str, text: str, seed: int | None = None, *, tools: Schemas = TOOLS, **options: bool
) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    """Return the thoughts, the text, the calls, and the kinds of parts in their order."""
    asked = {"thinks": False, "thoughts": True, "required": False, **options}
    reader = reader_of(dialect_of(template), tools, **asked)
    parts = [part for piece in pieces(text, seed) for part in reader.add(piece)] + list(reader.finish())
    calls: dict[int, Call] = {part.call.index: part.call for part in parts if part.call is not None}
    sent = dict.fromkeys(calls, "")
    for part in parts:
        if part.kind == "arguments" and part.call is not None:
            sent[part.call.index] += part.text
    assert [call.arguments for call in calls.values()] == list(sent.values())
    assert list(calls) == list(range(len(calls)))
    said = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "text")}
    return (
        said["reasoning"],
        said["text"],
        [(call.name, call.arguments) for call in calls.values()],
        [part.kind for part in parts],
    )


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("family", CALLS)
def test_calls(family: str, seed: int | None) -> None:
    template, text, said = CALLS[family]
    reasoning, found, calls, kinds = read(template, text, seed)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [ULM, CLOCK]
    assert (reasoning, found.strip()) == ("", said.strip())
    if seed == 0 and family not in ("Python", "Llama 4", "arguments before the name"):
        assert kinds.count("arguments") > 3  # they come as they are written


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("family", CALLS)
def test_an_unknown_function_is_no_call(family: str, seed: int | None) -> None:
    template, text, _ = CALLS[family]
    _, found, calls, _ = read(template, text, seed, tools={"other": {}})
    assert not calls
    assert "Ulm" in found
    if family != "gpt-oss":
        assert found == text
    _, same, calls, _ = read(template, text, seed, tools={})
    assert (same, calls) == (found, [])


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("template", "text", "thinks", "reasoning", "said"),
    [
        ("{% '<think>' %}", "<think>\nHm,\nwell.\n</think>\n\nYes.", False, "Hm,\nwell.", "Yes."),
        ("<think>", "\nHm.</think>Yes </think>.", True, "Hm.", "Yes </think>."),
        ("<think>", "Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("<think>", "<think>cut", False, "cut", ""),
        ("<think>", "<think></think>\n", False, "", ""),
        ("", "<think>a</think>b", False, "", "<think>a</think>b"),
        ("[THINK]", "[THINK]a [b][/THINK]c", False, "a [b]", "c"),
        ("<think>", '<think>a {</think>{"name": "clock", "arguments": {}}', False, "a {", ""),
        (
            "<|channel|>",
            "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes <|x.",
            False,
            "Hm <b>.",
            "Yes <|x.",
        ),
        ("<|channel|>", "a cat", False, "", "a cat"),
    ],
)
def test_thoughts(template: str, text: str, thinks: bool, reasoning: str, said: str, seed: int | None) -> None:
    assert read(template, text, seed, thinks=thinks)[:2] == (reasoning.strip(), said)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call>",
        '<tool_call>\n{"name": "other", "arguments": {}}</tool_call> and more',
        '{"a": {"name": "clock"}} and [1]',
        "[1] says so, [weather] too",
        "a <tool",
        "  [",
        "{",
        '{"name": "clock"}',
        "<tool_call>" * 5,
        "[TOOL_CALLS]x" * 300,
    ],
)
def test_text_that_only_looks_like_a_call(text: str, seed: int | None) -> None:
    assert read("[TOOL_CALLS]", text, seed)[1:3] == (text, [])


def test_a_call_that_was_cut() -> None:
    cut = '<tool_call>{"name": "weather", "arguments": {"city": "U'
    assert read("", cut)[1:3] == ("", [("weather", '{"city": "U')])
    assert read("", '{"name": "wea', required=True)[1:3] == ("", [])
    assert read("", '{"name": "wea')[1:3] == ('{"name": "wea', [])


def test_text_follows_calls() -> None:
    _, text, calls, kinds = read("", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>Then. {"a": 1}', 0)
    assert (text, calls) == ('Then. {"a": 1}', [("clock", "{}")])
    assert kinds[:2] == ["call", "arguments"]


@pytest.mark.parametrize("seed", range(200))
def test_no_answer_is_lost_or_hangs(seed: int) -> None:
    """Random answers of marks and letters: nothing is raised, and all pieces give the same result."""
    chance = random.Random(seed)
    words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "clock", "arguments": {',
        "}",
        "}}",
        "[",
        "]",
    ]
    words += ['"', "\\", "weather(", "clock()", "a", " ", "<|channel|>", "<|message|>", "<|end|>", "[TOOL_CALLS]", "<"]
    words += [
        "<arg_key>k</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<function=clock>",
        "<parameter=a>",
        "</parameter>",
    ]
    text = "".join(chance.choice(words) for _ in range(30))
    for template in ("<think>[TOOL_CALLS]", "<|channel|>"):
        first = read(template, text)[:3]
        for number in (0, 1, 2):
            assert read(template, text, number)[:3] == first, text
