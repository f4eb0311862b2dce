"""Texts are encoded in processes of their own: transformers' ids, and a hostile tokenizer holds up nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import string
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support import python_backend
from tests.support.tiny_models import write_byte_tokenizer
from trtserve.client.tokenizer import SlowTemplateError, TokenizerFiles
from trtserve.gateway.openai.encoding import Encoder
from trtserve.gateway.openai.errors import ApiError
from trtserve.programs.shared.encoding import EncodingProcess
from trtserve.server.engine_fit import encoder_memory

TEXTS = ["", "Hello", " a  b\n", "é 👩‍👩‍👧 漢", "<s>x</s>", "x" * 30_000]


@pytest.fixture
def encoder_of(tmp_path: Path) -> Iterator[Callable[..., Encoder]]:
    """Makes the encoder of a tokenizer whose file has these changes."""
    made: list[Encoder] = []

    def make(**changes: Any) -> Encoder:
        write_byte_tokenizer(tmp_path)
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        made.append(Encoder(TokenizerFiles(tmp_path)))
        return made[-1]

    yield make
    for encoder in made:
        encoder.close()


def test_ids_are_those_of_transformers(encoder_of: Callable[..., Encoder], tmp_path: Path) -> None:
    encoder, files = encoder_of(truncation=None, padding=None), TokenizerFiles(tmp_path)
    for special in (True, False):
        expected = [files.encode(text, special=special) for text in TEXTS]
        assert asyncio.run(encoder.encode(TEXTS, special=special)) == expected
    assert asyncio.run(encoder.run(lambda encode: encode("Hello"))) == files.encode("Hello", special=False)


def test_the_memory_of_a_helper_is_what_the_plan_counts() -> None:
    pieces = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    pairs = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=2)]
    merges = [[pair[0], pair[1]] for pair in pairs] + [[piece[:2], piece[2]] for piece in pieces]
    vocabulary = {token: number for number, token in enumerate([*string.ascii_lowercase, *pairs, *pieces])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": False}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model}, indent=2)
    before = set(psutil.Process().children())
    encoding = EncodingProcess(text)
    try:
        assert encoding.encode(["abc" * 1000], special=False, seconds=60)[0][0] == [vocabulary["abc"]] * 1000
        (child,) = set(psutil.Process().children()) - before
        memory = [
            int(re.findall(r"Pss_Anon: *(\d+) kB", Path(f"/proc/{each.pid}/smaps_rollup").read_text())[0]) << 10
            for each in (child, *child.children())
        ]
    finally:
        encoding.close()
    assert sum(memory) == pytest.approx(encoder_memory(len(text)), rel=0.3)


def test_a_text_is_encoded_again_when_its_process_was_stopped_and_killed(encoder_of: Callable[..., Encoder]) -> None:
    encoder, before = encoder_of(), set(psutil.Process().children())

    async def encoded_by_another() -> list[list[int]]:
        (child,) = set(psutil.Process().children()) - before
        child.suspend()
        child.children()[0].suspend()
        answer = asyncio.create_task(encoder.encode(["Hello"], special=True))
        assert await asyncio.wait([answer], timeout=0.5) == (set(), {answer})
        os.killpg(child.pid, signal.SIGKILL)  # as the supervisor does
        return await asyncio.wait_for(answer, 60)

    expected = asyncio.run(encoder.encode(["Hello"], special=True))
    assert asyncio.run(encoded_by_another()) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_gets_the_ids_of_another_text_after_a_waiting_fork_was_killed(
    encoder_of: Callable[..., Encoder], number: signal.Signals
) -> None:
    encoder, before = encoder_of(), set(psutil.Process().children())
    texts = ["one", "two", "three"]
    expected = [asyncio.run(encoder.encode([text], special=True)) for text in texts]
    (child,) = set(psutil.Process().children()) - before
    (waiting,) = child.children()
    waiting.send_signal(number)
    waiting.wait(60)
    if number == signal.SIGTERM:  # nobody knows that it was not for this text
        with pytest.raises(ApiError, match="was ended by signal 15"):
            asyncio.run(encoder.encode(["one"], special=True))
    assert [asyncio.run(encoder.encode([text], special=True)) for text in texts] == expected


GROWING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}] * 12,
}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("part", [{"normalizer": GROWING}, {"pre_tokenizer": BACKTRACKING}], ids=["grows", "tries"])
def test_a_hostile_tokenizer_costs_a_bounded_time(
    encoder_of: Callable[..., Encoder], part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of them are refused when they are loaded.
    monkeypatch.setattr("trtserve.programs.shared.tokenizer.require_bounded", lambda _: None)
    encoder = encoder_of(**part)

    async def both() -> float:
        slow = asyncio.ensure_future(encoder.encode(["a" * 40], special=False))
        await asyncio.sleep(0)
        turns, began = 0, time.thread_time()
        while not slow.done():  # the loop answers others meanwhile
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 10
        spent = time.thread_time() - began
        with pytest.raises(ApiError, match="The text cannot be encoded: "):
            await slow
        assert await encoder.encode(["b"], special=False)
        return spent

    assert asyncio.run(both()) < 1.0


SLOW = {"type": "Split", "pattern": {"Regex": r"\p{L}*\p{L}*\p{L}*\p{N}"}, "behavior": "Isolated", "invert": False}
ENDLESS = (
    "{% if messages[0].content == 'hostile' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}x"
)


def test_nobody_waits_for_what_others_send(encoder_of: Callable[..., Encoder]) -> None:
    """Four endless conversations and four texts that a slow expression splits cost others the time of a first look."""
    encoder = encoder_of(pre_tokenizer=SLOW)

    async def other() -> None:
        assert await encoder.render(ENDLESS, [{"role": "user", "content": "hi"}], {}, {}) == "x"
        assert await encoder.encode(["hello"], special=False)

    async def measured() -> tuple[float, float]:
        await other()  # processes have started
        hostile: list[asyncio.Future[Any]] = []
        for _ in range(4):
            asked = encoder.render(ENDLESS, [{"role": "user", "content": "hostile"}], {}, {})
            hostile.append(asyncio.ensure_future(asked))
            hostile.append(asyncio.ensure_future(encoder.encode(["a" * 300], special=False)))
        await asyncio.sleep(0)
        began = time.monotonic()
        await other()
        waited = time.monotonic() - began
        results = await asyncio.gather(*hostile, return_exceptions=True)
        assert all(isinstance(each, ApiError | SlowTemplateError) for each in results), results
        return waited, time.monotonic() - began

    waited, everything = asyncio.run(measured())
    assert waited < everything / 4


class Asked:
    """A request to `preprocessing`, and what its sender was given."""

    def __init__(self, text: str) -> None:
        values = {"QUERY": np.array([[text.encode()]], dtype=object), "REQUEST_OUTPUT_LEN": np.array([[4]])}
        self._tensors = [python_backend.Tensor(name, value) for name, value in values.items()]
        self.response: Any = None
        self.answered = threading.Event()

    def inputs(self) -> list[python_backend.Tensor]:
        return self._tensors

    def get_response_sender(self) -> Asked:
        return self

    def send(self, response: Any, flags: int) -> None:
        assert flags == python_backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.response = response
        self.answered.set()


def test_preprocessing_bounds_its_tokenizer_and_answers_others_first(
    encoder_of: Callable[..., Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder_of(pre_tokenizer=SLOW)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", python_backend)
    from trtserve.programs.preprocessing.model import TritonPythonModel

    parameters = {"tokenizer_dir": {"string_value": str(tmp_path)}}
    config = {"parameters": parameters, "output": [{"name": "INPUT_ID", "data_type": "TYPE_INT32"}]}
    names = {"model_repository": str(tmp_path / "r" / "preprocessing"), "model_version": "1"}
    model = TritonPythonModel()
    model.initialize({"model_config": json.dumps(config), **names})
    try:
        hostile, other = [Asked("a" * 300) for _ in range(3)], Asked("hello")
        assert model.execute([*hostile, other]) is None
        assert other.answered.wait(30)
        assert not hostile[0].answered.is_set()
        assert other.response.output_tensors()[0].as_numpy().tolist() == [
            [1, *TokenizerFiles(tmp_path).encode("hello", special=False)]
        ]
        for each in hostile:
            assert each.answered.wait(60)
            assert "cannot encode this text: it takes more than 1" in each.response.error().message()
    finally:
        model.finalize()
