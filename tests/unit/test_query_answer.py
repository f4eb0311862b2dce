"""The responses of a request are collected into sequences by prompt, sample and beam, streamed or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.described_models import described
from tests.support.tiny_models import write_tiny_model
from trtserve.cli.query_output import Sink, as_json
from trtserve.client.answer import Answer, GeneratedSequence, Generation
from trtserve.client.endpoint import Endpoint
from trtserve.client.request import RequestContext
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import ModelDescription, Reply, text_array
from trtserve.client.tokenizer import PreparedPrompts, TokenizerFiles
from trtserve.errors import RequestError
from trtserve.repository.profiles import BLS, CORE

INTS = ("sequence_length", "batch_index", "sequence_index", "num_output_tokens", "num_input_tokens")


def reply(*texts: str, **outputs: Any) -> Reply:
    """A response with texts and further outputs, integers in Triton's shapes."""
    arrays: dict[str, Any] = {"text_output": text_array(texts)} if texts else {}
    for name, value in outputs.items():
        arrays[name] = np.array([[value]], np.int32) if name in INTS and isinstance(value, int) else value
    return Reply(outputs=arrays)


def ids(*beams: list[int], **outputs: Any) -> Reply:
    """A core model's response: [1, beams, longest] padded with -1, and the lengths [1, beams]."""
    longest = max(map(len, beams))
    table = np.array([[beam + [-1] * (longest - len(beam)) for beam in beams]], np.int32)
    return reply(output_ids=table, sequence_length=np.array([[len(beam) for beam in beams]], np.int32), **outputs)


def read(
    replies: Iterable[Reply],
    *,
    model: ModelDescription | None = None,
    prompts: PreparedPrompts | None = None,
    stream: bool = False,
    files: TokenizerFiles | None = None,
    pieces: list[str] | None = None,
    exclude_input: bool = True,
    **options: Any,
) -> Generation:
    rows = prompts or PreparedPrompts(texts=("p",))
    spec = QuerySpec(prompts=rows.texts, stream=stream, options=options, exclude_input=exclude_input)
    context = RequestContext(spec=spec, model=model or described(BLS), prompts=rows, tokenizer=files)
    answer = Answer(context)
    found = [text for each in replies if (text := answer.add(each))]
    if pieces is not None:
        pieces += [*found, *filter(None, [answer.rest()])]
    return answer.generation("id")


def texts(generation: Generation) -> list[tuple[int, int, int, str | None]]:
    return [(each.prompt, each.sequence, each.beam, each.text) for each in generation.sequences]


def test_streamed_pieces_are_joined() -> None:
    pieces: list[str] = []
    got = read([reply(" a"), reply(" b"), reply("")], stream=True, pieces=pieces)
    assert (got.text, pieces, got.responses, got.streamed) == ("a b", ["a", " b"], 3, True)
    assert got.time_to_first_token is not None


def test_json_reports_milliseconds() -> None:
    got = replace(read([reply("a")]), latency=0.25, time_to_first_token=0.125, output_tokens=2)
    described = as_json(got, {})
    assert (described["latency_ms"], described["time_to_first_token_ms"]) == (250, 125)
    assert described["tokens_per_second"] == 8
    assert not {"latency", "time_to_first_token"} & described.keys()
    assert as_json(read([reply("a")]), {})["time_to_first_token_ms"] is None


@pytest.mark.parametrize(
    ("tokens", "reason", "options", "reported"),
    [
        (3, "length", {}, True),
        (4, "length", {}, False),
        (3, "end_id", {}, False),
        (3, None, {}, False),
        (3, "length", {"draft_tokens_csv": "1,2"}, False),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["ids", "count"])
def test_an_answer_shortened_by_the_engine_is_reported(
    tokens: int,
    reason: str | None,
    options: dict[str, Any],
    reported: bool,
    known: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = GeneratedSequence(
        prompt=0, sequence=0, beam=0, text="t", token_ids=[5] * tokens if known else None, finish_reason=reason
    )
    got = replace(read([reply("a")]), sequences=(one,), output_tokens=tokens)
    spec = QuerySpec(prompts=("p",), options={"max_tokens": 4, **options})
    for json in (False, True):
        sink = Sink(stream=False, json=json, verbose=False)
        sink.add(got, spec)
        sink.finish(spec, Endpoint(http_port=1, grpc_port=2, model="tiny"))
        assert ("the engine reduced --max-tokens 4" in capsys.readouterr().err) == reported


def test_accumulated_responses_print_new_text_only() -> None:
    pieces: list[str] = []
    model = described(BLS, accumulate_tokens="true")
    got = read([reply(" a"), reply(" a b"), reply(" a b")], model=model, stream=True, pieces=pieces)
    assert (got.text, "".join(pieces)) == ("a b", "a b")


def test_streamed_beams_may_change_earlier_text() -> None:
    pieces: list[str] = []
    got = read([reply("a", "b"), reply("cd", "b!")], stream=True, pieces=pieces, beam_width=2)
    assert texts(got) == [(0, 0, 0, "cd"), (0, 0, 1, "b!")]
    assert pieces == []


def test_batch_rows_may_arrive_in_any_order() -> None:
    replies = [reply("second", batch_index=1), reply("first", batch_index=0)]
    assert texts(read(replies, prompts=PreparedPrompts(texts=("a", "b")))) == [(0, 0, 0, "first"), (1, 0, 0, "second")]


def test_batch_rows_may_arrive_in_one_response() -> None:
    got = read([reply("a0", "a1", "b0", "b1")], prompts=PreparedPrompts(texts=("a", "b")), beam_width=2)
    assert texts(got) == [(0, 0, 0, "a0"), (0, 0, 1, "a1"), (1, 0, 0, "b0"), (1, 0, 1, "b1")]


def test_samples_are_identified_by_sequence_index() -> None:
    replies = [reply("x", sequence_index=1), reply("y", sequence_index=0), reply("z", sequence_index=1)]
    got = read(replies, stream=True, num_return_sequences=2)
    assert texts(got) == [(0, 0, 0, "y"), (0, 1, 0, "xz")]


def test_prompt_is_removed_if_the_model_cannot_exclude_it() -> None:
    model = described(BLS, release="0.14")
    assert read([reply("p and more")], model=model).text == "and more"
    assert read([reply("p and more")], model=model, exclude_input=False).text == "p and more"
    core = described(CORE, release="0.12", exclude_input_in_output="${exclude_input_in_output}")
    got = read([ids([7, 8, 9])], model=core, prompts=PreparedPrompts(token_ids=((7, 8),)))
    assert got.sequences[0].token_ids == [9]


def test_padding_of_ids_is_removed_and_streams_are_joined() -> None:
    prompts = PreparedPrompts(token_ids=((1,),))
    whole = read([ids([4, 5], [6])], model=described(CORE), prompts=prompts)
    assert [each.token_ids for each in whole.sequences] == [[4, 5], [6]]
    streamed = read([ids([4]), ids([5, 6]), ids([])], model=described(CORE), prompts=prompts, stream=True)
    assert streamed.sequences[0].token_ids == [4, 5, 6]
    assert (streamed.output_tokens, streamed.input_tokens, streamed.sequences[0].text) == (3, 1, None)
    assert streamed.time_to_first_token is not None


def test_incomplete_characters_are_held_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = TokenizerFiles(write_tiny_model(tmp_path_factory.mktemp("tokenizer")))
    tokens = files.encode("aé", special=False)
    assert len(tokens) == 3  # é is two of them
    pieces: list[str] = []
    prompts = PreparedPrompts(token_ids=((1,),))
    replies = [ids([token]) for token in tokens]
    got = read(replies, model=described(CORE), prompts=prompts, stream=True, files=files, pieces=pieces)
    assert (got.text, pieces) == ("aé", ["a", "é"])


def test_a_core_models_text_ends_after_a_stop_word_that_its_tokens_hide(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = TokenizerFiles(write_tiny_model(tmp_path_factory.mktemp("tokenizer")))
    tokens = [files.encode(piece, special=False) for piece in ("so", "me te", "xt")]
    settings: dict[str, Any] = {
        "model": described(CORE),
        "prompts": PreparedPrompts(token_ids=((1,),)),
        "files": files,
        "stop_words": ["e t"],
    }
    pieces: list[str] = []
    got = read([ids(row) for row in tokens], stream=True, pieces=pieces, **settings)
    assert (got.text, pieces, got.sequences[0].finish_reason) == ("some t", ["so", "me t"], "stop_words")
    whole = read([ids([token for row in tokens for token in row], finish_reason=text_array(["length"]))], **settings)
    assert (whole.text, whole.sequences[0].finish_reason) == ("some t", "stop_words")


def test_log_probs_come_from_the_last_response() -> None:
    sums, prompts = np.array([[-3.0]], np.float32), PreparedPrompts(token_ids=((1,),))
    replies = [
        ids([4], cum_log_probs=np.array([[-1.0]]), output_log_probs=np.array([[[-1.0]]])),
        ids([5], cum_log_probs=sums, output_log_probs=np.array([[[-1.0, -2.0]]])),
    ]
    got = read(replies, model=described(CORE), prompts=prompts, stream=True, return_log_probs=True).sequences[0]
    assert (got.cum_log_prob, got.log_probs) == (-3.0, [-1.0, -2.0])
    assert read(replies, model=described(CORE), prompts=prompts, stream=True).sequences[0].log_probs is None


def test_padding_of_shorter_beams_is_not_a_log_prob() -> None:
    values = np.array([[[-0.5, -0.25], [-0.75, -1.0]]], np.float32)
    got = read(
        [reply("a", "b", cum_log_probs=np.array([[-1.0, -2.0]]), output_log_probs=values)],
        beam_width=2,
        return_log_probs=True,
    )
    assert [each.log_probs for each in got.sequences] == [[-0.5, -0.25], [-0.75]]


def test_streamed_logits_are_joined() -> None:
    steps = [np.full((1, 1, 1, 3), step, np.float32) for step in range(2)] + [np.full((1, 2, 1, 3), 7, np.float32)]
    replies = [reply(str(number), generation_logits=step) for number, step in enumerate(steps)]
    logits = read(replies, stream=True, return_generation_logits=True).outputs["generation_logits", 0, 0]
    assert logits.shape == (1, 1, 4, 3)
    assert logits[0, 0, :, 0].tolist() == [0, 1, 7, 7]
    assert read(replies, stream=True).outputs == {}


def test_finish_reason_comes_from_the_output_or_the_parameter() -> None:
    got = read([reply("a", "b", finish_reason=text_array(["length", "end_id"]))], beam_width=2)
    assert [each.finish_reason for each in got.sequences] == ["length", "end_id"]
    with_parameter = Reply(outputs=reply("a", "b").outputs, parameters={"finish_reason": "stop_words,length"})
    assert [each.finish_reason for each in read([with_parameter], beam_width=2).sequences] == ["stop_words", "length"]
    unfinished = [
        reply("a", finish_reason=text_array(["not_finished"])),
        reply("b", finish_reason=text_array(["length"])),
    ]
    assert read(unfinished, stream=True).sequences[0].finish_reason == "length"


def test_a_late_stop_does_not_mark_a_finished_answer_as_stopped() -> None:
    context = RequestContext(
        spec=QuerySpec(prompts=("p",)), model=described(BLS), prompts=PreparedPrompts(texts=("p",))
    )
    for reason, stopped in (("cancelled", True), ("length", False)):
        answer = Answer(context)
        answer.add(reply("a", finish_reason=text_array([reason])))
        assert answer.generation("id", stopped=True).stopped == stopped


def test_token_counts_are_added_up() -> None:
    replies = [reply("a", num_output_tokens=2, num_input_tokens=5), reply("b", num_output_tokens=1, num_input_tokens=5)]
    got = read(replies, stream=True)
    assert (got.output_tokens, got.input_tokens) == (3, 5)


def test_further_outputs_are_kept() -> None:
    got = read([reply("a", kv_cache_reused_blocks=np.array([[3]]))])
    assert got.outputs["kv_cache_reused_blocks", 0, 0].item() == 3


def test_missing_answer_is_an_error_unless_streamed() -> None:
    with pytest.raises(RequestError, match="without an answer"):
        read([])
    assert read([], stream=True).text == ""
