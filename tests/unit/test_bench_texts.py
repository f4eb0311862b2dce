"""Prompts of exactly N tokens, and counting and timing the tokens of text answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.described_models import described
from tests.support.echo_targets import requests, target_at
from tests.support.tiny_models import write_byte_tokenizer
from trtserve.bench.echo_server import Echo
from trtserve.bench.messages import count_answers, text_tensors, token_arrivals, token_counts
from trtserve.bench.records import DecodedResponse, RequestRecord, TrafficLimits, TrafficRequest
from trtserve.bench.traffic import TextWriter, token_norm_dist
from trtserve.bench.transport import OpenAiLoad
from trtserve.bench.verdict import implausible
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import UsageError
from trtserve.specs import BenchSpec

DEMO = Path(__file__).parents[2] / "trtserve" / "demo"


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return TokenizerFiles(folder)


@pytest.fixture(scope="module")
def demo() -> TokenizerFiles:
    return TokenizerFiles(DEMO)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ["demo", "byte_tokens"])
def test_texts_have_the_exact_number_of_tokens(kind: str, special: bool, request: pytest.FixtureRequest) -> None:
    files: TokenizerFiles = request.getfixturevalue(kind)
    write = TextWriter(files, special=special, seed=1)
    for length in (2, 3, 17, 200):
        ids, text = write(length)
        assert text is not None
        assert len(ids) == length
        assert ids.tolist() == files.encode(text, special=special)
        assert (" " in text) == (kind == "demo") or length < 10


def test_same_seed_gives_the_same_text(demo: TokenizerFiles) -> None:
    first, again, other = (TextWriter(demo, special=True, seed=seed)(30)[1] for seed in (1, 1, 2))
    assert first == again != other


def test_length_without_a_matching_text_is_noted(byte_tokens: TokenizerFiles) -> None:
    """The shortest text is two tokens, <s> and a character; a note reports the difference."""
    spec = BenchSpec(input_mean=1, input_stdev=0, num_requests=3)
    traffic = token_norm_dist(spec, TrafficLimits(), write=TextWriter(byte_tokens, special=True, seed=0))
    assert [len(request.token_ids) for request in traffic.requests] == [2, 2, 2]
    assert traffic.notes[0].startswith("3 prompts do not have the drawn length")


def test_text_prompts_have_the_lengths_of_token_prompts(byte_tokens: TokenizerFiles) -> None:
    spec, limits = BenchSpec(input_mean=40, input_stdev=9), TrafficLimits(vocab_size=100, max_seq_len=60)
    ids = token_norm_dist(spec, limits)
    texts = token_norm_dist(spec, limits, write=TextWriter(byte_tokens, special=True, seed=0), end_id=-1)
    sizes = [[(len(each.token_ids), each.output_len) for each in traffic.requests] for traffic in (ids, texts)]
    assert sizes[0] == sizes[1]
    assert (texts.clipped_outputs, texts.notes) == (ids.clipped_outputs, ())
    assert {each.end_id for each in texts.requests} == {-1}


def test_tokenizer_without_usable_words_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = models.WordLevel(vocab={"<unk>": 0, "!": 1}, unk_token="<unk>")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    )
    with pytest.raises(UsageError, match="no words"):
        TextWriter(TokenizerFiles(tmp_path), special=True, seed=0)


PIECES = ["", "What", " is machine", "", " learning", "?", ""]


def test_tokens_count_for_the_piece_that_completes_them(demo: TokenizerFiles) -> None:
    counts = token_counts(demo, PIECES)
    assert sum(counts) == len(demo.encode("".join(PIECES), special=False))
    assert [count > 0 for count in counts] == [bool(piece) for piece in PIECES]
    assert token_counts(demo, ["", ""]) == [0, 0]


def test_tokens_may_span_pieces(byte_tokens: TokenizerFiles) -> None:
    assert token_counts(byte_tokens, ["ab", "", "c"]) == [2, 0, 1]


class Slow(TokenizerFiles):
    """A slow tokenizer, which reports no character offsets."""

    @property
    def tokenizer(self) -> Any:
        return type("Tokenizer", (), {"is_fast": False, "encode": super().tokenizer.encode})()


def test_slow_and_fast_tokenizers_count_alike(demo: TokenizerFiles) -> None:
    assert token_counts(Slow(DEMO), PIECES) == token_counts(demo, PIECES)


def responses(*parts: tuple[str, int | None]) -> list[DecodedResponse]:
    """Responses 1 ns after each other."""
    return [DecodedResponse(time_ns=time, text=text, tokens=tokens) for time, (text, tokens) in enumerate(parts, 1)]


def test_tokens_arrive_with_their_text() -> None:
    """The first bytes of a character have no text; the end token comes after the last text."""
    found = token_arrivals(responses(("", 1), ("", 1), ("é", 1), ("a", 1), ("", 1)), [1, 1, 1, 1, 1])
    assert found == [(3, 3), (4, 1), (5, 1)]
    assert token_arrivals(responses(("", 0)), [0]) == []
    assert token_arrivals([], []) == []


def record(texts: list[DecodedResponse], *, streamed: bool = True) -> RequestRecord:
    return RequestRecord(
        index=0, input_tokens=4, requested_tokens=3, status="completed", streamed=streamed, responses=texts
    )


def counted(each: RequestRecord, files: TokenizerFiles, *, release: str = "1.2", accumulate: str = "") -> Any:
    """Count one answer to the prompt "abc"."""
    model = described("ensemble", release=release, accumulate_tokens=accumulate)
    request = TrafficRequest(token_ids=files.tokenizer("abc", return_tensors="np")["input_ids"][0], output_len=3)
    return count_answers([each], [TrafficRequest(**{**vars(request), "text": "abc"})], model, files)


def test_server_counts_take_precedence(byte_tokens: TokenizerFiles) -> None:
    each = record(responses(("x", 1), ("", 1), ("y", 2)))
    result = counted(each, byte_tokens)
    assert (result.by, result.by_server, result.by_tokenizer) == ("server", 4, 2)
    assert each.arrivals == [(1, 1), (3, 3)]
    assert "counted 4 output tokens; the text alone gives 2" in result.notes(byte_tokens)[0]


def test_tokenizer_counts_if_the_server_does_not(byte_tokens: TokenizerFiles) -> None:
    each = record(responses(("xy", None), ("z", None)))
    result = counted(each, byte_tokens)
    assert (result.by, result.by_server, result.by_tokenizer) == ("tokenizer", None, 3)
    assert each.arrivals == [(1, 2), (2, 1)]
    assert str(byte_tokens.folder) in result.notes(byte_tokens)[0]


def test_prompt_repeated_in_an_answer_is_not_counted(byte_tokens: TokenizerFiles) -> None:
    """Releases before 0.16 repeat the prompt in unstreamed answers only."""
    whole = record(responses(("abcxy", None)), streamed=False)
    assert counted(whole, byte_tokens, release="0.12").by_tokenizer == 2
    streamed = record(responses(("abcxy", None)))
    assert counted(streamed, byte_tokens, release="0.12").by_tokenizer == 5


def test_accumulated_text_is_counted_once(byte_tokens: TokenizerFiles) -> None:
    each = record(responses(("x", None), ("xyz", None)))
    assert counted(each, byte_tokens, accumulate="true").by_tokenizer == 3
    assert each.arrivals == [(1, 1), (2, 2)]


def test_tokenizer_that_differs_from_the_servers_is_noted(byte_tokens: TokenizerFiles) -> None:
    each = record([DecodedResponse(time_ns=1, text="x", tokens=1, prompt_tokens=9)])
    assert any("not the server's tokenizer" in note for note in counted(each, byte_tokens).notes(byte_tokens))


@pytest.mark.parametrize(
    ("release", "excludes", "counts"), [("0.12", False, False), ("0.16", True, False), ("1.2", True, True)]
)
def test_text_model_inputs_by_release(release: str, excludes: bool, counts: bool, byte_tokens: TokenizerFiles) -> None:
    ids, text = TextWriter(byte_tokens, special=True, seed=0)(8)
    request = TrafficRequest(token_ids=ids, output_len=5, text=text, end_id=-1)
    model = described("ensemble", release=release)
    sent = {tensor.name: tensor.flat() for tensor in text_tensors(model, request, stream=True)}
    assert (sent["text_input"], sent["max_tokens"], sent["end_id"]) == ([text], [5], [-1])
    assert ("exclude_input_in_output" in sent, "return_num_output_tokens" in sent) == (excludes, counts)


def _chunk(delta: object, **more: object) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}], **more})}"


_CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
_USED = {"prompt_tokens": 3, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("events", "text", "arrivals"),
    [
        # Reasoning, by whatever name, is the first text; the usage at the end is divided among the parts.
        ([_chunk({"role": "assistant"}), _chunk({"reasoning": "ab"}), _chunk({"content": "cd"})], "abcd", [1, 2]),
        ([_chunk({"reasoning_content": "ab", "reasoning": "ab"}), _chunk({"content": "cd"})], "abcd", [0, 1]),
        ([_chunk({"thinking": "ab", "content": ""}), _chunk({"content": [{"text": "cd"}]})], "abcd", [0, 1]),
        ([_chunk({"refusal": "ab"}), _chunk({"refusal": "cd"})], "abcd", [0, 1]),
        ([_chunk({"tool_calls": [_CALL]}), _chunk({"tool_calls": [{"function": {"arguments": "{}"}}]})], "f{}", [0, 1]),
        ([_chunk({"function_call": {"name": "f"}}), _chunk({"function_call": {"arguments": "{}"}})], "f{}", [0, 1]),
        # Usage so far in every part, also before the first text.
        (
            [
                _chunk({"content": ""}, usage={"prompt_tokens": 3, "completion_tokens": 0}),
                _chunk({"content": "ab"}, usage={"prompt_tokens": 3, "completion_tokens": 1}),
                _chunk({"content": "cd"}, usage=_USED),
            ],
            "abcd",
            [1, 2],
        ),
        # Comments, names of events, carriage returns; a last part with nothing in it.
        ([": ping", f": x\nevent: message\r\nid: 1\r\n{_chunk({'content': 'abcd'})}", _chunk(None)], "abcd", [1]),
        (['data: {"choices": [{"text": "abcd"}]}', 'data: {"choices": null}'], "abcd", [0]),
        # What nobody understands is no text, and the tokens count when the answer ends.
        ([_chunk({"audio": {"data": "x"}}), _chunk(7), 'data: {"choices": [null]}'], "", [4]),
    ],
)
def test_every_dialect_of_streams_is_measured(
    events: list[str], text: str, arrivals: list[int], byte_tokens: TokenizerFiles
) -> None:
    target = target_at(Echo(spoken="openai-stream", text=True), 1)
    load = OpenAiLoad(target, timeout=1)
    last = f"data: {json.dumps({'choices': [], 'usage': _USED})}"
    records = []
    for _ in range(2):
        chunks = enumerate([*events, last, "data: [DONE]"])
        record = RequestRecord(index=0, input_tokens=3, requested_tokens=4, streamed=True, status="completed")
        record.responses = [load.read((time, event.encode())) for time, event in chunks]
        records.append(record)
    asked = requests(2, tokens=4, text=True)
    counts = count_answers(records, asked, target.model, byte_tokens, whole=True)
    assert [each.error for record in records for each in record.responses if each.error] == []
    assert ["".join(each.text or "" for each in record.responses) for record in records] == [text] * 2
    assert (counts.by, counts.by_server, counts.prompts_by_server) == ("server", 8, 6)
    for record in records:
        assert [time for time, _ in record.arrivals] == arrivals
        assert (record.server_tokens, record.output_tokens) == (4, 4)
    assert [note for note in implausible(records) if "count" in note] == []
