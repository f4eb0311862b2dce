"""A checkpoint run as whole sequences has the logits of an independent decoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.reference_decoder import ReferenceDecoder
from tests.support.tiny_decoders import DECODERS, LLAMA, tiny_decoder
from trtserve.executor.reference_model import ReferenceModel

# Engines leave the edge of a window to paged attention: only this model has it in its mask.
NAMES = sorted({*list(DECODERS)[::4], *(name for name in DECODERS if "window" in name or "chunks" in name)})


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_for_several_sequences(name: str) -> None:
    tiny = DECODERS[name]
    model = ReferenceModel(tiny.decoder, tiny.sizes, tiny, packing=tiny.packing, threads=1)
    reference = ReferenceDecoder(tiny.decoder, tiny.sizes, tiny.tensors, packing=tiny.packing)
    random = np.random.default_rng(7)
    for length in (1, 19, 5):
        ids = [int(token) for token in random.integers(0, tiny.sizes.vocab, length)]
        np.testing.assert_allclose(model.logits(ids), reference.logits(ids), atol=2e-4)


def test_attention_softcap_is_applied() -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = {}
    for cap in (None, 1e6, 0.5):
        tiny = tiny_decoder(replace(LLAMA, attention_softcap=cap))
        logits[cap] = ReferenceModel(tiny.decoder, tiny.sizes, tiny, threads=1).logits(ids)
    np.testing.assert_allclose(logits[1e6], logits[None], atol=1e-4)
    assert np.abs(logits[0.5] - logits[None]).max() > 1e-2
