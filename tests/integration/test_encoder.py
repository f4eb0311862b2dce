"""Texts are encoded in processes of their own: transformers' ids, and a hostile tokenizer holds up nobody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import write_byte_tokenizer
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.gateway.openai.encoding import Encoder
from trtserve.gateway.openai.errors import ApiError

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
        longest, began = 0.0, time.monotonic()
        while not slow.done():  # the loop answers others meanwhile
            await asyncio.sleep(0.01)
            longest, began = max(longest, time.monotonic() - began), time.monotonic()
        with pytest.raises(ApiError, match="The text cannot be encoded: "):
            await slow
        assert await encoder.encode(["b"], special=False)
        return longest

    assert asyncio.run(both()) < 1.0
