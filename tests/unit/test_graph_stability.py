"""Graphs of the first families stay as they are, node for node, while the builder learns others."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import openvino as ov
import pytest

from tests.support.tiny_decoders import DECODERS
from trtserve.executor.graph import build_graph

# Number of operations and the start of the digest, as the graphs were when only Llama, Mistral and GPT-2 existed; the
# packed ones as they are since lm_head is int8.
RECORDED: dict[str, tuple[int, str]] = {
    "llama": (371, "09f74418c555d65d"),
    "llama, biases": (391, "6be9ce39cdbcec9f"),
    "llama, every head its own": (303, "7a70c6ce591f4ccb"),
    "llama, one key head": (215, "bd3818c914be8346"),
    "llama, window": (375, "1653aafb53963248"),
    "llama, window over blocks": (375, "26898babb8ec30b7"),
    "llama, gelu": (373, "e65a2c7d4eec6577"),
    "llama, neighbouring pairs": (391, "8505cc015d19c036"),
    "llama, int8": (404, "2cccfd3ab4cc89bc"),
    "llama, int4": (424, "9cbb968e07cf1347"),
    "llama, float16": (388, "54c6dd75e8b6dd35"),
    "gpt2": (207, "1acd0e28e2936bcc"),
    "gpt2, relu, int8": (234, "431ccbe1d04a5434"),
}

_SMALL = 64


def _described(node: Any, numbers: dict[str, int]) -> list[Any]:
    """What makes a node: its kind, attributes, inputs, shapes, and the values of small constants."""
    inputs = [(numbers[source.get_node().get_name()], source.get_index()) for source in node.input_values()]
    attributes = {key: str(value) for key, value in sorted(node.get_attributes().items())}
    outputs = [(str(port.get_element_type()), str(port.get_partial_shape())) for port in node.outputs()]
    small = node.get_type_name() == "Constant" and node.get_data().size <= _SMALL
    return [node.get_type_name(), attributes, inputs, outputs, node.get_data().tolist() if small else None]


def _fingerprint(graph: ov.Model) -> tuple[int, str]:
    nodes = graph.get_ordered_ops()
    numbers = {node.get_name(): number for number, node in enumerate(nodes)}
    text = json.dumps([_described(node, numbers) for node in nodes])
    return len(nodes), hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", RECORDED)
def test_graph_is_what_it_was(name: str) -> None:
    tiny = DECODERS[name]
    assert _fingerprint(build_graph(tiny.decoder, tiny.sizes, tiny, packing=tiny.packing)) == RECORDED[name]
