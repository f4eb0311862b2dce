"""Guides with small real tokenizers: allowed tokens, ends, and invalid guides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import trtserve
from tests.support.guide_trials import TrialInThisProcess
from tests.support.tiny_models import write_byte_tokenizer
from trtserve.executor.engine import guided
from trtserve.executor.engine.guide_trial import PlainVocabulary
from trtserve.executor.engine.guide_trial import compiled as compile_grammar
from trtserve.executor.engine.guided import CompiledGuide, Guide, GuideFactory
from trtserve.executor.engine.limits import GuideTokenizer
from trtserve.executor.engine.logits_processing import LogitsProcessor
from trtserve.executor.engine.requests import GuideSource, GuideType
from trtserve.executor.engine.sampling import EXHAUSTED, SamplingParameters, SamplingRow, choose_tokens
from trtserve.executor.interface.convert import sampling_parameters
from trtserve.executor.interface.requests import SamplingConfig

VOCAB = 320
"""Vocabulary size of the engine, larger than the tokenizers'."""
END = 2
FACTORIES: list[GuideFactory] = []


def byte_tokenizer(folder: Path) -> Tokenizer:
    write_byte_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def sentencepiece_tokenizer(_folder: Path) -> Tokenizer:
    """A tokenizer like Llama 2's: ▁ for spaces, byte tokens for characters without a token."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'abct{}":,0123456789', "▁a", "ab", "tab"]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[("▁", "a"), ("a", "b"), ("t", "ab")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def factory_of(tokenizer: Any, vocab_size: int = VOCAB, **settings: Any) -> GuideFactory:
    settings = {"text": tokenizer.to_str()} | settings
    return factory_with(GuideTokenizer(**settings), vocab_size)


def factory_with(settings: GuideTokenizer | None, vocab_size: int) -> GuideFactory:
    FACTORIES.append(GuideFactory(settings, vocab_size))
    return FACTORIES[-1]


@pytest.fixture(autouse=True)
def _closed_factories() -> Iterator[None]:
    yield
    while FACTORIES:
        FACTORIES.pop().close()


@pytest.fixture(params=[byte_tokenizer, sentencepiece_tokenizer])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path)


@pytest.fixture
def bytes_alone(tmp_path: Path) -> Any:
    return byte_tokenizer(tmp_path)


def allowed(guide: Guide, vocab_size: int = VOCAB) -> list[int]:
    row = np.zeros(vocab_size, dtype=np.float32)
    guide.mask(row)
    assert set(row.tolist()) <= {0.0, -np.inf}
    tokens: list[int] = np.flatnonzero(row == 0).tolist()
    return tokens


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def accepts(guide: Guide, tokenizer: Any, text: str) -> bool:
    """True when `guide` allows `text` token by token and may end after it."""
    for token in ids_of(tokenizer, text):
        if token not in allowed(guide):
            return False
        guide.accept(token)
    return END in allowed(guide)


def generate(guide: Guide, tokenizer: Any, *, seed: int, count: int = 200) -> str | None:
    """The text of a model without preferences under `guide`; None when it does not end."""
    random = np.random.default_rng(seed)
    parameters = sampling_parameters(SamplingConfig(top_p=1.0, seed=seed))
    processor = LogitsProcessor(parameters, np.zeros(0, dtype=np.int64), vocab_size=VOCAB, end_id=END, guide=guide)
    generated: list[int] = []
    row = SamplingRow(parameters, processor, generated)
    for _ in range(count):
        (choice,) = choose_tokens(random.standard_normal((1, VOCAB)).astype(np.float32), [row])
        processor.accept(choice.token)
        if choice.token == END:
            return str(tokenizer.decode(generated))
        assert choice.token != EXHAUSTED
        generated.append(choice.token)
    return None


def guide_of(factory: GuideFactory, source: GuideSource, *, end_id: int = -1) -> Guide:
    """Compile a guide, and wait for it."""
    found = factory.ready(source)
    if found is None:
        answer: Queue[CompiledGuide] = Queue()
        factory.compile(source, answer.put, lambda: True)
        found = answer.get()
    return factory.guide(found, end_id)


def params(kind: GuideType, guide: str = "") -> GuideSource:
    return GuideSource(kind, guide)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["ab", "b"]}, "c": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["a", "c"],
    "additionalProperties": False,
}


def test_text_follows_a_regular_expression(tokenizer: Any) -> None:
    factory = factory_of(tokenizer)
    expression = "(tab|ab|é )[0-9]{2,3}"
    texts = {
        generate(guide_of(factory, params(GuideType.REGEX, expression), end_id=END), tokenizer, seed=n)
        for n in range(8)
    }
    assert len(texts) > 3
    assert all(text is not None and re.fullmatch(expression, text) for text in texts)


def test_text_follows_a_schema(tokenizer: Any) -> None:
    factory = factory_of(tokenizer)
    guides = [guide_of(factory, params(GuideType.JSON_SCHEMA, json.dumps(SCHEMA)), end_id=END) for _ in range(8)]
    texts = [text for seed, guide in enumerate(guides) if (text := generate(guide, tokenizer, seed=seed))]
    assert len(texts) > 4
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"a", "c"}
        assert value["a"] in ("ab", "b")
        assert 10 <= value["c"] <= 99


def test_guide_type_json_allows_any_object(tokenizer: Any) -> None:
    factory = factory_of(tokenizer)
    for text in ("{}", '{"a": [1, {"b": null}], "c": "é"}', '{ "a":true}'):
        assert accepts(guide_of(factory, params(GuideType.JSON), end_id=END), tokenizer, text), text
    for text in ("[1]", "1", '{"a"}', '{"a": 1', "a", ""):
        assert not accepts(guide_of(factory, params(GuideType.JSON), end_id=END), tokenizer, text), text


def test_white_space_of_json_is_bounded(tokenizer: Any) -> None:
    """Else a model that has nothing to say writes blanks up to max_tokens."""
    factory = factory_of(tokenizer)
    for source in (params(GuideType.JSON), params(GuideType.JSON_SCHEMA, '{"type": "object"}')):
        for text in ("{}", "{ }", "{\n}", '{ "a": 1}', '{\n    "a": 1\n}'):
            assert accepts(guide_of(factory, source, end_id=END), tokenizer, text), text
        for text in ("{  }", "{\n\n}", "{\t}", f"{{\n{' ' * 33}}}"):
            assert not accepts(guide_of(factory, source, end_id=END), tokenizer, text), text


GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "one rule": ('root ::= "a" [0-9]+ ("x" | "y")*', ["a1", "a12xyx"], ["a", "x", "a1z"]),
    "rules over several lines": (
        '# a list\nroot ::= item (", " item)*  # of items\n\nitem ::= "x"\n   | "#"   # not a comment\n   | [a-c"]\n',
        ["x", "a, b", "#, x", '"'],
        ["", "x,", "d", "x, "],
    ),
    "recursion": ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "())"]),
    "escapes": (
        r'root ::= "\u0041\x42\"\\\n\'" [^\n\u0061-z]{2} ([\-\^\]x] | "\x01\u00a0\U0001F600\t")',
        ["AB\"\\\n'é1-", "AB\"\\\n'é1\x01\xa0😀\t", "AB\"\\\n'  ^", "AB\"\\\n'AA]"],
        ["AB\"\\\n'ab-", "AB\"\\\n'AAy", 'AB"'],
    ),
    "names with signs": ('root ::= my-rule yourRule?\nmy-rule ::= "m"\nyourRule ::= "y"', ["m", "my"], ["y", ""]),
    "Lark, as TensorRT-LLM's LLGUIDANCE backend takes it": (
        'start: WORD ("," WORD)*\nWORD: /[ab]+/',
        ["a", "ab,ba"],
        [",", "c", "a,"],
    ),
}


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_text_follows_a_grammar(bytes_alone: Any, grammar: str, good: list[str], bad: list[str]) -> None:
    factory = factory_of(bytes_alone)
    for text in good + bad:
        guide = guide_of(factory, params(GuideType.EBNF_GRAMMAR, grammar), end_id=END)
        assert accepts(guide, bytes_alone, text) == (text in good), text


WRONG: dict[str, tuple[GuideType, str, str]] = {
    "expression": (GuideType.REGEX, "([", "unclosed character class"),
    "look-ahead": (GuideType.REGEX, "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
    "schema that is no JSON": (GuideType.JSON_SCHEMA, "{", "Expecting property name"),
    "schema that is no object": (GuideType.JSON_SCHEMA, "[1]", "schema must be an object or boolean"),
    "schema of an unknown type": (GuideType.JSON_SCHEMA, '{"type": "zz"}', "Invalid type: zz"),
    "grammar without a root": (GuideType.EBNF_GRAMMAR, 'x ::= "a"', "No 'root' rule found"),
    "grammar with a missing rule": (GuideType.EBNF_GRAMMAR, "root ::= a", "Rule 'a' not found"),
    "grammar that is not closed": (GuideType.EBNF_GRAMMAR, 'root ::= ("a"', "Expected ')'"),
    "no grammar at all": (GuideType.EBNF_GRAMMAR, "hello", "Expected ::="),
    "wrong Lark": (GuideType.EBNF_GRAMMAR, "start: missing", "missing"),
    "grammar without an end": (GuideType.EBNF_GRAMMAR, "root ::= root", "no text matches it"),
    "grammar with no such character": (GuideType.EBNF_GRAMMAR, r'root ::= "\UFFFFFFFF"', "too large"),
    "grammar with half a character": (GuideType.EBNF_GRAMMAR, r'root ::= "\uD800"', "surrogates not allowed"),
    "grammar of many brackets": (GuideType.EBNF_GRAMMAR, "root ::= " + "(" * 9000, "recursion"),
    "schema of many brackets": (GuideType.JSON_SCHEMA, "[" * 100_000, "nested too deeply"),
    "schema with a key that changes nothing elsewhere": (GuideType.JSON_SCHEMA, '{"uniqueItems": true}', "uniqueItems"),
    "schema that nothing fits": (GuideType.JSON_SCHEMA, '{"$ref": "#"}', "no text matches it"),
    "structural tag": (GuideType.STRUCTURAL_TAG, "{}", "not supported"),
}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "password"},  # Pydantic's SecretStr
        {"type": "string", "format": None},
        {"type": "string", "format": "email", "pattern": r"^(?!\.)[a-z]+@b\.c$"},  # zod
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},  # zod
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "x-guidance": {"lenient": True}},
        {"type": "object", "properties": {"format": {"type": "integer"}, "uniqueItems": {"const": False}}},
    ],
)
def test_keys_of_a_schema_that_ask_for_nothing_are_left_out(bytes_alone: Any, schema: dict[str, Any]) -> None:
    guide = guide_of(factory_of(bytes_alone), params(GuideType.JSON_SCHEMA, json.dumps(schema)))
    texts = {"string": '"a@b.c"', "array": '["a"]', "object": '{"a": 1}'}
    text = '{"format": 1, "uniqueItems": false}' if "properties" in schema else texts[schema["type"]]
    assert accepts(guide, bytes_alone, text)


def test_a_schema_that_ends_in_itself_is_named_where_the_text_reaches_it(bytes_alone: Any) -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": {"$ref": "#/$defs/A"}}}
    guide = guide_of(factory_of(bytes_alone), params(GuideType.JSON_SCHEMA, json.dumps({"type": "object", **schema})))
    assert not accepts(guide, bytes_alone, '{"a": 1}')
    guide.allowed()
    assert "no text matches it, as where a schema refers only to itself" in str(guide.failure)


@pytest.mark.parametrize(("kind", "guide", "reason"), WRONG.values(), ids=WRONG.keys())
def test_invalid_guide_is_refused_with_a_one_line_error(
    bytes_alone: Any, kind: GuideType, guide: str, reason: str
) -> None:
    factory = factory_of(bytes_alone)
    message = f"^The guide of type {kind.name} is invalid: .*{re.escape(reason)}"
    with pytest.raises(RuntimeError, match=message) as caught:
        guide_of(factory, params(kind, guide))
    assert "\n" not in str(caught.value)
    assert allowed(guide_of(factory, params(GuideType.JSON)))  # the factory still works


def test_guides_need_a_guided_decoding_config() -> None:
    with pytest.raises(RuntimeError, match=r"GuidedDecoder is not setup\. Please provide a valid GuidedDecodingConfig"):
        guide_of(factory_with(None, VOCAB), params(GuideType.JSON))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"text": "{"}, "cannot be read"),
        ({"ends": [1000]}, "EOS token ID 1000 is out of range"),
        ({"text": None}, "needs tokenizer_str, or encoded_vocab and stop_token_ids"),
        ({"text": None, "vocabulary": ["a"]}, "needs tokenizer_str, or encoded_vocab and stop_token_ids"),
    ],
)
def test_config_without_a_tokenizer_is_refused(bytes_alone: Any, settings: Any, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        guide_of(factory_of(bytes_alone, **settings), params(GuideType.JSON))


def test_tokens_outside_the_tokenizer_are_never_allowed(bytes_alone: Any) -> None:
    anything = params(GuideType.REGEX, "(?s:.*)")
    size = bytes_alone.get_vocab_size()
    assert size < VOCAB
    assert max(allowed(guide_of(factory_of(bytes_alone), anything, end_id=END))) < size


def test_engine_with_a_smaller_vocabulary_than_the_tokenizer(bytes_alone: Any) -> None:
    guide = guide_of(factory_of(bytes_alone, vocab_size=100), params(GuideType.REGEX, "[a-z~\xa0-\xff]+"))
    tokens = allowed(guide, vocab_size=100)
    assert [bytes_alone.decode([token]) for token in tokens] == sorted("abcdefghijklmnopqrstuvwxyz~")


def test_end_id_of_the_request_ends_the_guide(bytes_alone: Any) -> None:
    """At the end of the guide only end_id is allowed, even if the tokenizer has another end token."""
    factory = factory_of(bytes_alone)
    expression = params(GuideType.REGEX, "ab?")
    a, b = ids_of(bytes_alone, "ab")
    for end_id, may_end in ((-1, [END]), (END, [END]), (300, [300]), (1, [1])):
        guide = guide_of(factory, expression, end_id=end_id)
        assert allowed(guide) == [a]
        guide.accept(a)
        assert allowed(guide) == sorted([b, *may_end])
        guide.accept(b)
        assert allowed(guide) == may_end
        for _ in range(2):
            guide.accept(may_end[0])
            assert allowed(guide) == may_end
        assert guide.failure is None


def test_end_id_inside_the_guide_is_ignored(bytes_alone: Any) -> None:
    guide = guide_of(factory_of(bytes_alone), params(GuideType.REGEX, "ab?"), end_id=300)
    (a,) = ids_of(bytes_alone, "a")
    guide.accept(a)
    guide.accept(300)
    assert guide.failure is None


def test_stop_token_ids_end_the_guide(bytes_alone: Any) -> None:
    factory = factory_of(bytes_alone, ends=[1, 2])
    assert allowed(guide_of(factory, params(GuideType.REGEX, ""))) == [1, 2]


def test_token_outside_the_guide_makes_it_fail(bytes_alone: Any) -> None:
    guide = guide_of(factory_of(bytes_alone), params(GuideType.REGEX, "ab"), end_id=END)
    (c,) = ids_of(bytes_alone, "c")
    guide.accept(c)
    assert guide.failure == f"The guide cannot be followed any further: token {c} does not fit it"
    assert allowed(guide) == []
    parameters = SamplingParameters()
    processor = LogitsProcessor(parameters, np.zeros(0, dtype=np.int64), vocab_size=VOCAB, end_id=END, guide=guide)
    assert processor.failure == guide.failure
    (choice,) = choose_tokens(np.zeros((1, VOCAB), np.float32), [SamplingRow(parameters, processor, [])])
    assert choice.token == EXHAUSTED


def test_end_of_a_guide_overrides_min_tokens(bytes_alone: Any) -> None:
    guide = guide_of(factory_of(bytes_alone), params(GuideType.REGEX, ""), end_id=END)
    parameters = sampling_parameters(SamplingConfig(min_tokens=5, top_p=1.0))
    processor = LogitsProcessor(parameters, np.zeros(0, dtype=np.int64), vocab_size=VOCAB, end_id=END, guide=guide)
    (choice,) = choose_tokens(np.zeros((1, VOCAB), np.float32), [SamplingRow(parameters, processor, [], log_prob=True)])
    assert (choice.token, choice.log_prob) == (END, 0.0)


def test_fork_is_independent(bytes_alone: Any) -> None:
    factory = factory_of(bytes_alone)
    trunk = guide_of(factory, params(GuideType.REGEX, "(ab|cd)+"), end_id=END)
    a, b, c, d = ids_of(bytes_alone, "abcd")
    trunk.accept(a)
    branch = trunk.fork()
    branch.accept(b)
    branch.accept(c)
    assert (allowed(trunk), allowed(branch)) == ([b], [d])
    assert allowed(guide_of(factory, params(GuideType.REGEX, "(ab|cd)+"), end_id=END)) == sorted([a, c])


def test_guides_with_an_encoded_vocabulary() -> None:
    config = GuideTokenizer(vocabulary=["<eos>", "a", "b", "ab", "é", ""], ends=[0])
    guide = guide_of(factory_with(config, 8), params(GuideType.REGEX, "[ab]+é"), end_id=0)
    for token, expected in ((3, [1, 2, 3]), (2, [1, 2, 3, 4]), (4, [1, 2, 3, 4]), (0, [0])):
        assert allowed(guide, 8) == expected
        guide.accept(token)


def test_encoded_vocabulary_uses_the_longest_token() -> None:
    vocabulary = PlainVocabulary(["<eos>", "a", "ab", "b", "ab"], [0])
    assert vocabulary(b"abba?b") == [2, 3, 1, 3]


def test_guides_with_the_demo_tokenizer(tmp_path: Path) -> None:
    text = (Path(trtserve.__file__).parent / "demo" / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    factory = factory_of(tokenizer, vocab_size=tokenizer.get_vocab_size())
    guide = guide_of(factory, params(GuideType.REGEX, "Once upon a time, [a-z]+"))
    for token in ids_of(tokenizer, "Once upon a time, there"):
        assert token in allowed(guide, tokenizer.get_vocab_size())
        guide.accept(token)
    assert tokenizer.token_to_id("</s>") in allowed(guide, tokenizer.get_vocab_size())


def test_compiled_guides_are_kept_up_to_a_size(bytes_alone: Any) -> None:
    factory = factory_of(bytes_alone)
    compiled: list[str] = []

    def counting(tokenizer: Any, grammar: str) -> Any:
        compiled.append(grammar)
        return compile_grammar(tokenizer, grammar)

    with patch.object(guided, "compiled", counting), patch.object(guided, "CACHED_BYTES", 10 * guided._LEAST_BYTES):
        for _ in range(3):
            guide_of(factory, params(GuideType.REGEX, "a"))
        for number in range(20):
            guide_of(factory, params(GuideType.REGEX, f"b{number}"))
            guide_of(factory, params(GuideType.REGEX, "a"))
    assert len(compiled) == 21
    assert len(factory._known) == 10
    assert factory._bytes == 10 * guided._LEAST_BYTES


def test_guides_from_many_threads(bytes_alone: Any) -> None:
    factory = factory_of(bytes_alone)

    def work(number: int) -> bool:
        text = "ab" * (number % 3 + 1)
        return accepts(guide_of(factory, params(GuideType.REGEX, "(ab)+"), end_id=END), bytes_alone, text)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_a_guide_that_no_processor_was_free_for_is_refused_for_the_moment(bytes_alone: Any) -> None:
    """The second of its attempts has 20 s; a later request gets an attempt of its own."""
    starved = [{"starved": True}, {"starved": True}]

    class BusyMachine(TrialInThisProcess):
        def ask(self, request: Mapping[str, Any]) -> Any:
            return starved.pop() if starved else super().ask(request)

    factory, source, found = factory_of(bytes_alone), params(GuideType.REGEX, "a+"), Queue[CompiledGuide]()
    with patch.object(guided, "_trial", BusyMachine):
        factory.compile(source, found.put, lambda: True)
        error = found.get(timeout=60).error
        assert error is not None
        assert re.search("REGEX was not compiled within 20 s, because other processes .* try again later", error)
        assert accepts(guide_of(factory, source, end_id=END), bytes_alone, "aa")
