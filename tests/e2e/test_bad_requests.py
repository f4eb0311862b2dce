"""Wrong requests on a real Triton server: each gets one clear error, and no other request is disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Stream, Tensors, flags, floats, integers
from tests.support.release_client import NEWEST
from tests.support.text_requests import MAX_SEQ_LEN, is_idle
from tests.support.waiting import wait_until

pytestmark = pytest.mark.triton

VOCABULARY, HIDDEN = 320, 64
PROMPT = [1, 60, 61, 62, 63]
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
NEIGHBOURS: dict[str, dict[str, int]] = {"greedy": {}, "sampled": {"top_k": 20, "seed": 7}}
_SAMPLED: dict[str, Tensors] = {
    "greedy": {},
    "sampled": {"runtime_top_k": integers(20), "seed": np.array([[7]], dtype=np.uint64)},
}
MOST = 2**31 - 1


@pytest.fixture(scope="module", autouse=True)
def neighbours(features: ModelServer, oracle: InProcess) -> Iterator[None]:
    """Send good requests again and again: their answers stay the same, and no block stays in use."""
    expected = {name: oracle.tokens(PROMPT, 24, sampling=sampling) for name, sampling in NEIGHBOURS.items()}
    over, disturbed, rounds = threading.Event(), list[str](), 0

    def go_on() -> None:
        nonlocal rounds
        with features.stream() as stream:
            while not over.wait(0.1):  # without a pause they take both cores
                disturbed.extend(name for name in NEIGHBOURS if _streamed(stream, name) != expected[name])
                rounds += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    yield
    over.set()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert rounds
    assert not disturbed
    wait_until(lambda: is_idle(features))


def _streamed(stream: Stream, name: str) -> list[int]:
    answers = stream.all("tensorrt_llm", NEWEST.core(PROMPT, 24, streaming=True) | _SAMPLED[name])
    return [token for answer in answers for token in answer["output_ids"].reshape(-1).tolist()]


@pytest.fixture(scope="module")
def refused(features: ModelServer) -> Iterator[Callable[[str, Tensors], str]]:
    """Send a request that must be refused and return the error message, its only answer."""
    from tritonclient.utils import InferenceServerException

    with features.stream() as stream:

        def ask(model: str, tensors: Tensors) -> str:
            stream.send(model, tensors, "bad")
            with pytest.raises(InferenceServerException) as caught:
                stream.next()
            stream.send("tensorrt_llm", NEWEST.core(PROMPT, 2), "good")
            _, _, number = stream.next()
            assert number == "good"  # no second answer has come between
            while not stream.next()[1]:
                pass
            message: str = caught.value.message()
            assert "Traceback" not in message
            assert "\n" not in message
            assert "/bls-" not in message  # an id that no client knows
            return message

        yield ask


def _words(ids: list[int], ends: list[int]) -> Any:
    return np.array([[ids, ends]], dtype=np.int32)


def _ids(*values: int) -> Any:
    return np.array([values], dtype=np.int32)


def _bias(value: float) -> Any:
    bias = np.zeros((1, VOCABULARY), dtype=np.float32)
    bias[0, 9] = value
    return bias


def _prompt(*ids: int) -> Tensors:
    return {"input_ids": _ids(*ids), "input_lengths": integers(len(ids))}


def _table(rows: int, hidden: int = HIDDEN, *, value: float = 0.1, extra: int = 2) -> Tensors:
    return {
        **_prompt(VOCABULARY, 60),
        "prompt_embedding_table": np.full((1, rows, hidden), value, dtype=np.float16),
        "prompt_table_extra_ids": np.full((1, extra), 3, dtype=np.uint64),
    }


def _guide(kind: bytes, guide: bytes) -> Tensors:
    return {
        "guided_decoding_guide_type": np.array([[kind]], dtype=np.object_),
        "guided_decoding_guide": np.array([[guide]], dtype=np.object_),
    }


def _adapter(row: list[int], *, rows: int = 1, width: int = 1024, value: float = 0.0) -> Tensors:
    return {
        "lora_task_id": np.array([[911]], dtype=np.uint64),
        "lora_weights": np.full((1, rows, width), value, dtype=np.float16),
        "lora_config": np.array([[row]], dtype=np.int32),
    }


def _draft(count: int, *, value: float = 0.0, vocabulary: int = VOCABULARY, rows: int | None = None) -> Tensors:
    shape = (1, count if rows is None else rows, vocabulary)
    return {"draft_input_ids": _ids(*range(5, 5 + count)), "draft_logits": np.full(shape, value, dtype=np.float32)}


def _ranges(starts: list[int], ends: list[int], priorities: list[int]) -> Tensors:
    values = {"starts": starts, "ends": ends, "priorities": priorities}
    return {f"retention_token_range_{name}": _ids(*value) for name, value in values.items()}


NAN, INFINITY = float("nan"), float("inf")
TOO_LONG = f"exceeds maximum input length ({MAX_SEQ_LEN - 1})"

CORE: dict[str, tuple[Tensors, str]] = {
    "prompt too long": (_prompt(*[60] * MAX_SEQ_LEN), f"Prompt length ({MAX_SEQ_LEN}) {TOO_LONG}."),
    "100 000 tokens": (_prompt(*[60] * 100_000), f"Prompt length (100000) {TOO_LONG}."),
    "id too large": (_prompt(1, VOCABULARY), "Token id 320 of the prompt is outside the vocabulary of 320"),
    "id below 0": (_prompt(1, -7), "Token id -7 of the prompt is outside the vocabulary of 320"),
    "no ids": ({"input_ids": np.zeros((1, 0), np.int32), "input_lengths": integers(0)}, "Invalid format for input_ids"),
    "length of others": ({"input_lengths": integers(9)}, "input_lengths is 9; expected 1 … 5"),
    "ids of 64 bits": ({"input_ids": np.array([PROMPT])}, "'input_ids' data-type is 'INT64'"),
    "axes": ({"input_ids": np.ones((1, 2, 5), np.int32)}, "unexpected shape for input 'input_ids'"),
    "no tokens wanted": ({"request_output_len": integers(0)}, "max_tokens is 0; it must be greater than 0"),
    "fewer than none": ({"request_output_len": integers(-(2**31))}, "max_tokens is -2147483648; it must be"),
    "beams": ({"beam_width": integers(5)}, "Requested beam width 5 is larger than configured max beam width 4"),
    "a thousand beams": ({"beam_width": integers(1000)}, "Requested beam width 1000 is larger than"),
    "beams below 0": ({"beam_width": integers(-1)}, "beam_width is -1; it must be between 1 and 1024"),
    "a flood": ({"num_return_sequences": integers(MOST)}, "num_return_sequences (2147483647) exceeds 1024"),
    "sequences below 0": ({"num_return_sequences": integers(-1)}, "num_return_sequences is -1; it must be"),
    "end id": ({"end_id": integers(VOCABULARY)}, "EndId (320) is not within acceptable range [-1, 320)"),
    "temperature": ({"temperature": floats(NAN)}, "temperature is nan; it must be 0 or more"),
    "endless temperature": ({"temperature": floats(INFINITY)}, "temperature is inf; expected a finite number"),
    "presence": ({"presence_penalty": floats(NAN)}, "presence_penalty is nan; expected a finite number"),
    "frequency": ({"frequency_penalty": floats(-INFINITY)}, "frequency_penalty is -inf; expected a finite number"),
    "frequency past numbers": ({"frequency_penalty": floats(-3e38)}, "it must be between -1000000000 and"),
    "hardly a repetition": ({"repetition_penalty": floats(1e-38)}, "it must be between 1e-09 and 1000000000"),
    "repetition": ({"repetition_penalty": floats(0.0)}, "repetition_penalty is 0.0; it must be greater than 0"),
    "top_k": ({"runtime_top_k": integers(-1)}, "top_k is -1; it must be 0 or more"),
    "top_p": ({"runtime_top_p": floats(2.0)}, "top_p is 2.0; it must be greater than 0 and at most 1"),
    "top_p NaN": ({"runtime_top_p": floats(NAN)}, "top_p is nan; it must be greater than 0 and at most 1"),
    "bias size": ({"embedding_bias": np.zeros((1, 7), np.float32)}, "bias has 7 entries; expected as many as the"),
    "bias type": ({"embedding_bias": np.zeros((1, VOCABULARY), np.float16)}, "'embedding_bias' data-type is 'FP16'"),
    "bias NaN": ({"embedding_bias": _bias(NAN)}, "The embedding bias has NaN or +infinity"),
    "bias infinite": ({"embedding_bias": _bias(INFINITY)}, "The embedding bias has NaN or +infinity"),
    "falling offsets": ({"stop_words_list": _words([5, 6, 7], [2, 1, -1])}, "stop_words_list has offsets [2, 1, -1]"),
    "offsets beyond": ({"bad_words_list": _words([5, 6, 7], [1, 9, -1])}, "bad_words_list has offsets [1, 9, -1]"),
    "everything banned": (
        {"bad_words_list": _words([*range(VOCABULARY)], [*range(1, VOCABULARY + 1)])},
        "no token is allowed as token 1 of the answer",
    ),
    "context logits": ({"return_context_logits": flags(True)}, "return_context_logits needs an engine that was built"),
    "no JSON": (_guide(b"json_schema", b"{"), "The guide of type JSON_SCHEMA is invalid"),
    "no regex": (_guide(b"regex", b"(a"), "The guide of type REGEX is invalid"),
    "no kind of guide": (_guide(b"yaml", b"a"), "guided_decoding_guide_type is 'yaml'; expected one of json"),
    "guide in Latin 1": (_guide(b"regex", b"\xe9"), "guided_decoding_guide is not valid UTF-8"),
    "guided beams": ({**_guide(b"regex", b"a"), "beam_width": integers(2)}, "not supported with beam search"),
    "table width": (_table(2, 63), "The prompt embedding table has hidden size 63; the model has 64"),
    "table rows": (_table(65), "has 65 rows, but the engine was built for 64 rows"),
    "table NaN": (_table(2, value=NAN), "The prompt embedding table has values that are not finite"),
    "extra ids": (_table(2, extra=1), "inputTokenExtraIds vector size (1) must be the same as input token vector"),
    "no extra ids": (
        {**_prompt(VOCABULARY, 60), "prompt_embedding_table": np.zeros((1, 1, HIDDEN), np.float16)},
        "Input token extra ids must be provided when enabling kv cache reuse with prompt table",
    ),
    "not cached": (
        {"lora_task_id": np.array([[2**64 - 1]], np.uint64)},
        "LoRA task 18446744073709551615 not found in cache. Please send LoRA weights with request",
    ),
    "adapter rows": (_adapter([1, 0, 8], rows=2), "Expected lora_weights and lora_config to have the same number of"),
    "adapter width": (_adapter([1, 0, 8], width=1000), "lora_weights has too few values for attn_q"),
    "adapter layer": (_adapter([1, 9, 8]), "Expected layerId to be in the range [0, 2); lora_config has 9"),
    "adapter module": (_adapter([4, 0, 8]), "lora module attn_dense not enabled for this model"),
    "adapter rank": (_adapter([1, 0, 9]), "Invalid low_rank (9). low_rank must be smaller than mMaxLowRank (8)"),
    "adapter NaN": (_adapter([1, 0, 8], value=NAN), "lora_weights has values for attn_q that are not finite"),
    "draft": ({"draft_input_ids": _ids(*[5] * 9)}, "Draft tokens length (9) exceeds maximum draft tokens length (8)."),
    "draft ids": ({"draft_input_ids": _ids(5, VOCABULARY)}, "A draft token is outside the vocabulary of 320"),
    "draft logits": (_draft(2, vocabulary=319), "The draft logits cover 319 tokens; the vocabulary has 320"),
    "draft rows": (_draft(2, rows=3), "draft logits have shape (3, 320); expected [2, vocab_size]"),
    "draft NaN": ({**_draft(2, value=NAN), "runtime_top_k": integers(5)}, "The draft logits have NaN, +infinity"),
    "drafted beams": ({**_draft(2), "beam_width": integers(2)}, "Draft tokens need beam width 1"),
    "threshold": ({**_draft(2), "draft_acceptance_threshold": floats(1.5)}, "acceptance_threshold is 1.5; it must be"),
    "overlapping ranges": (_ranges([0, 1], [2, 4], [10, 90]), "token ranges must be sorted by start, must not overlap"),
    "range below 0": (_ranges([-4], [2], [10]), "token range starts at -4; expected 0 or more"),
    "range priority": (_ranges([0], [2], [101]), "priority is 101; it must be between 0 and 100"),
    "lookahead": (
        {f"lookahead_{name}": _ids(4) for name in ("window_size", "ngram_size", "verification_set_size")},
        "lookahead_config (Triton: lookahead_window_size) is not supported by the embedded executor",
    ),
}


@pytest.mark.parametrize("case", CORE)
def test_bad_tensors_fail(refused: Callable[[str, Tensors], str], case: str) -> None:
    change, message = CORE[case]
    assert message in refused("tensorrt_llm", {**NEWEST.core(PROMPT, 4), **change})


def test_rows_of_a_batch_fail_alone(features: ModelServer, oracle: InProcess) -> None:
    from tritonclient.utils import InferenceServerException

    tensors = {name: np.repeat(value, 2, axis=0) for name, value in NEWEST.core(PROMPT, 4).items()}
    answers: list[Tensors] = []
    with features.stream() as stream:
        stream.send("tensorrt_llm", {**tensors, "end_id": integers(2, 900)})
        with pytest.raises(InferenceServerException, match=r"EndId \(900\)"):
            stream.next()
        final = False
        while not final:
            outputs, final, _ = stream.next()
            answers += [outputs] if outputs else []
    (answer,) = answers
    assert answer["batch_index"].item() == 0
    assert answer["output_ids"].reshape(-1)[-4:].tolist() == oracle.tokens(PROMPT, 4)


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_ten_thousand_words(features: ModelServer, oracle: InProcess, name: str) -> None:
    """Each word has two tokens, the first of which never comes."""
    plain = oracle.tokens(PROMPT, 6)
    never = next(token for token in range(3, VOCABULARY) if token not in (*plain, *PROMPT))
    words = _words([never, 5] * 10_000, [*range(2, 20_001, 2), *[-1] * 10_000])
    with features.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", {**NEWEST.core(PROMPT, 6), name: words})
    assert answer["output_ids"].reshape(-1)[-6:].tolist() == plain


def test_max_tokens_beyond_the_engine_is_cut(features: ModelServer) -> None:
    """Reduced, not refused."""
    with features.stream() as stream:
        tensors = {**NEWEST.core([60] * (MAX_SEQ_LEN - 6), MOST), "end_id": integers(-1)}
        (answer,) = stream.all("tensorrt_llm", tensors)
    assert answer["sequence_length"].item() == MAX_SEQ_LEN


TEXT: dict[str, tuple[dict[str, Any], str]] = {
    "a megabyte": ({"text_input": "x" * 1_000_000}, "exceeds maximum input length: at most"),
    "more than fits": ({"text_input": "x" * 10 * MAX_SEQ_LEN}, "exceeds maximum input length"),
    "stop words": ({"stop_words": ["x"] * 1025}, "stop_words has 1025 words; at most 1024 are allowed"),
    "a stop word": ({"stop_words": ["x" * 1025]}, "stop_words has a word of 1025 bytes; at most 1024 are allowed"),
    "bad words": ({"bad_words": ["x"] * 1025}, "bad_words has 1025 words"),
    "bias words": (
        {"embedding_bias_words": ["x"] * 1025, "embedding_bias_weights": [1.0] * 1025},
        "embedding_bias_words has 1025 words",
    ),
    "no tokens wanted": ({"max_tokens": 0}, "max_tokens"),
    "fewer than none": ({"max_tokens": -5}, "max_tokens"),
    "temperature": ({"temperature": -1.0}, "temperature is -1.0; it must be 0 or more"),
    "top_p": ({"top_p": 2.0}, "top_p is 2.0; it must be greater than 0 and at most 1"),
    "top_k": ({"top_k": -1}, "top_k is -1; it must be 0 or more"),
    "beams": ({"beam_width": 5}, "Requested beam width 5 is larger than configured max beam width 4"),
    "a flood": ({"num_return_sequences": MOST}, "num_return_sequences (2147483647) exceeds 1024"),
    "end id": ({"end_id": 320}, "EndId (320) is not within acceptable range [-1, 320)"),
    "context logits": ({"return_context_logits": True}, "return_context_logits needs an engine that was built"),
    "adapter": ({"lora_task_id": 987}, "LoRA task 987 not found in cache. Please send LoRA weights with request"),
    "path of an adapter": ({"lora_name": "../../model"}, "lora_name is '../../model'"),
    "guide": ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"}, "guide of type REGEX is invalid"),
    "empty guide": ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": ""}, "guide"),
    "guide of no kind": ({"guided_decoding_guide": "a+"}, "guided_decoding_guide needs guided_decoding_guide_type"),
    "no text": ({"text_input": []}, "text_input"),
    "bias without weights": ({"embedding_bias_words": ["a"]}, "must be given together"),
    "bias of another length": (
        {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
        "both must have the same length",
    ),
}


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("case", TEXT)
def test_bad_texts_fail(features: ModelServer, model: str, case: str) -> None:
    change, message = TEXT[case]
    status, answer = features.generate(model, {"text_input": "What?", "max_tokens": 4, **change})
    assert status >= 400
    assert message in answer["error"]
    assert "Traceback" not in answer["error"]
    assert "\n" not in answer["error"]
    assert len(answer["error"]) < 500


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("name", ["text_input", "stop_words", "bad_words", "lora_name"])
def test_texts_in_latin_1(refused: Callable[[str, Tensors], str], model: str, name: str) -> None:
    tensors = {**NEWEST.text("What?", 4), name: np.array([[b"caf\xe9"]], dtype=np.object_)}
    assert f"{name} is not valid UTF-8" in refused(model, tensors)
