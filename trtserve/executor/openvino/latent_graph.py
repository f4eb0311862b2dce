"""Latent attention (MLA) in OpenVINO's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from openvino import opset13 as ops

from trtserve.checkpoint.architectures.base import LatentAttention
from trtserve.executor.openvino.graph_parts import cut, float_tensor, integers

if TYPE_CHECKING:
    from trtserve.executor.openvino.graph import GraphBuilder


def latent_attention(builder: GraphBuilder, hidden: Any, name: str, layer: int, latent: LatentAttention) -> Any:
    """Attend with one key per token for all heads: its rotated part and its latent vector, which is the value too.

    The matrices that make keys and values of the latent vector are applied to queries and results instead.
    """

    def norm(states: Any, name: str) -> Any:
        return builder.normed(states, name, latent.epsilon)

    heads, size = builder.sizes.heads, latent.rotated + latent.rank
    lower, packing = hidden, builder.packing
    if f"{name}.q_a.weight" in builder.names:
        lower = norm(builder.linear(hidden, f"{name}.q_a", packing=packing), f"{name}.q_a_layernorm")
    queries = builder.linear(lower, f"{name}.q_b", packing=packing)
    queries = ops.transpose(
        ops.reshape(queries, integers(0, 0, heads, latent.plain + latent.rotated), special_zero=True),
        integers(0, 2, 1, 3),
    )
    plain, turned = cut(queries, latent.plain, latent.rotated)
    of_heads = builder.floats(f"{name}.kv_b.weight").reshape(heads, -1, latent.rank)
    keys, values = (
        float_tensor(np.ascontiguousarray(part), f"{name}.{kind}")
        for kind, part in (("keys", of_heads[:, : latent.plain]), ("values", of_heads[:, latent.plain :]))
    )
    assert builder.rotation is not None
    query = ops.concat([builder.rotation.rotate(turned), ops.matmul(plain, keys, False, False)], -1)
    stored, turned = cut(builder.linear(hidden, f"{name}.kv_a", packing=builder.packing), latent.rank, latent.rotated)
    turned = builder.rotation.rotate(ops.unsqueeze(turned, integers(1)))
    stored = ops.unsqueeze(norm(stored, f"{name}.kv_a_layernorm"), integers(1))
    key = ops.concat([turned, stored], -1).output(0)
    key, value = (
        builder.repeat_heads(
            builder.append_to_state(key, f"past_key_values.{layer}.{kind}", builder.sizes), builder.sizes
        )
        for kind in ("key", "value")
    )
    scale = ops.constant(np.float32(builder.decoder.attention_scale))
    attended = ops.scaled_dot_product_attention(query, key, value, builder.masks[None], scale, causal=False)
    kept = ops.slice(attended, integers(latent.rotated), integers(size), integers(1), integers(3))
    result = ops.transpose(ops.matmul(kept, values, False, True), integers(0, 2, 1, 3))
    joined = ops.reshape(result, integers(0, 0, heads * latent.value), special_zero=True)
    return builder.linear(joined.output(0), f"{name}.dense", packing=builder.packing)
