"""The operations of a decoder layer in plain PyTorch, on any device; `operations.Operations` describes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation, ClampedGate, Experts
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.operations import ExpertWeights, HeadNorms, Matrix, RotationTables, Rows, Scores
from trtserve.executor.torch.packed import FP8, LARGEST_FP8, Fp8Codes, Fp8Rows, PackedWeight


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, epsilon), total


def rounded(x: Tensor, matrix: Fp8Codes) -> Rows:
    """Return x [t, in] in FP8, as the matrix that follows needs it."""
    if matrix.input_scale is not None:
        return _fp8(x / matrix.input_scale)
    groups = functional.pad(x.float(), (0, -x.shape[1] % matrix.group)).unflatten(1, (-1, matrix.group))
    scales = groups.abs().amax(-1).clamp(min=1e-12) / LARGEST_FP8
    return Fp8Rows(_fp8(groups / scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]], scales.T.contiguous())


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def linear(x: Rows, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Fp8Codes):
        rows = rounded(x, weight) if isinstance(x, Tensor) and x.dtype != FP8 else x
        if weight.input_scale is not None:
            assert isinstance(rows, Tensor)
            product = multiply_static(rows, weight)
        else:
            assert isinstance(rows, Fp8Rows)
            product = (rows.floats() @ weight.floats(torch.float32).T).to(weight.dtype)
        return product if bias is None else product + bias
    assert isinstance(x, Tensor)
    return functional.linear(x, weight.floats(x.dtype) if isinstance(weight, PackedWeight) else weight, bias)


def multiply_static(codes: Tensor, weight: Fp8Codes) -> Tensor:
    """Return the product of inputs f8[t, in] that have the matrix's own scale."""
    assert weight.input_scale is not None
    one = functional.ScalingType.TensorWise
    return functional.scaled_mm(
        codes, weight.codes.T, weight.input_scale, one, weight.scale, one, output_dtype=weight.dtype
    )


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    epsilon: float,
    weight: Matrix,
    bias: Tensor | None,
    activation: Activation | None = None,
    *,
    factor_first: bool = False,
    rounding: Fp8Codes | None = None,
) -> tuple[Rows, Tensor]:
    total = x if residual is None else x + residual
    product = linear(rms_norm(total, norm, epsilon), weight, bias)
    if activation is not None:
        product = gated(product, activation, factor_first=factor_first)
    return product if rounding is None else rounded(product, rounding), total


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    cache_places: Tensor,
    *,
    heads: int,
    rotation: RotationTables | None,
    norms: HeadNorms | None,
    cache_scale: float = 1.0,
) -> Tensor:
    _, parts, tokens_per_block, kv_heads, size = kv_layer.shape
    query, key, *values = qkv.view(len(qkv), -1, size).split([heads, *[kv_heads] * parts], dim=1)
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.epsilon), rms_norm(key, norms.key, norms.epsilon)
    if rotation is not None:
        query, key = (rotate(states, positions, rotation) for states in (query, key))
    blocks, offsets = cache_places // tokens_per_block, cache_places % tokens_per_block
    for part, states in enumerate([key, *values]):
        kv_layer[blocks, part, offsets] = _fp8(states.float() * (1 / cache_scale)) if kv_layer.dtype == FP8 else states
    rotated: Tensor = query.contiguous()
    return rotated


def rotate(states: Tensor, positions: Tensor, tables: RotationTables) -> Tensor:
    """Rotate the first numbers of each head [t, heads, D] by positions i64[t]; the rest stays."""
    cos, sin = tables.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    rotated, rest = states.float().tensor_split([2 * cos.shape[-1]], dim=-1)
    if tables.interleaved:
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = rotated.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if tables.interleaved else torch.cat(turned, -1)
    return torch.cat([joined, rest], -1).to(states.dtype)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation function of each number."""
    if activation == "silu":
        return functional.silu(x)
    if activation in ("relu", "relu2"):
        positive = functional.relu(x)
        return positive if activation == "relu" else positive.square()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the activation whose two learned numbers are f32[2] `numbers` (see `base.Activation`)."""
    above, below = functional.softplus(numbers).unbind()
    wide = x.float()
    negative = wide.clamp(max=0)
    curve = torch.where(wide > 0, above * wide.square(), (below + 0.5) * (negative.expm1() - negative))
    return (curve + 0.5 * wide).to(x.dtype)


def gated(joined: Tensor, activation: Activation, *, factor_first: bool = False) -> Tensor:
    first, second = joined.chunk(2, dim=-1)
    return first * activate(second, activation) if factor_first else activate(first, activation) * second


def share_keys(lengths: Tensor, kv_layer: Tensor, most_keys: int, scores: Scores, heads: int) -> None:
    del lengths, kv_layer, most_keys, scores, heads


def decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scores: Scores,
    shared: None = None,
    rounding: Fp8Codes | None = None,
) -> Tensor:
    del shared, rounding
    begins = torch.arange(len(query) + 1)
    return prompt_attention(query, kv_layer, block_tables, lengths - 1, begins, scores, most_new=1)


def prompt_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    past_lengths: Tensor,
    begins: Tensor,
    scores: Scores,
    *,
    most_new: int,
) -> Tensor:
    del most_new
    attended = torch.zeros_like(query[..., scores.turned :])
    edges, size = begins.tolist(), kv_layer.shape[2]
    for number, past in enumerate(past_lengths.tolist()):
        first, stop = edges[number], edges[number + 1]
        if first == stop:  # padding
            continue
        total = past + stop - first
        blocks = kv_layer[block_tables[number, : -(-total // size)]]
        keys, values = (blocks[:, part].flatten(0, 1)[:total] for part in (0, -1))
        attended[first:stop] = _attend(query[first:stop], keys, values[..., scores.turned :], scores)
    return attended


def _attend(query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """Return the attention of the last tokens `query` [t, H, D] over keys [n, KV, D] and values [n, KV, V]."""
    new, heads, size = query.shape
    total, kv_heads, _ = keys.shape
    grouped = query.float().view(new, kv_heads, -1, size).permute(1, 2, 0, 3)  # [KV, H / KV, t, D]
    products = grouped @ keys.float().permute(1, 2, 0).unsqueeze(1) * (scores.scale * scores.cache_scale)
    if scores.soft_cap is not None:
        products = torch.tanh(products / scores.soft_cap) * scores.soft_cap
    key_index = torch.arange(total, device=query.device)
    if scores.slopes is not None:
        products += scores.slopes.view(kv_heads, -1, 1, 1) * key_index
    query_index = torch.arange(total - new, total, device=query.device).unsqueeze(1)
    hidden = key_index > query_index
    if scores.window is not None:
        seen = query_index % scores.window + 1 if scores.chunked else scores.window
        hidden |= key_index <= query_index - seen
    products = products.masked_fill(hidden, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.view(kv_heads, -1, 1, 1).expand(*products.shape[:-1], 1)
        products = torch.cat([products, sinks], -1)
    shares = products.softmax(-1)[..., :total]
    attended = shares @ values.float().transpose(0, 1).unsqueeze(1) * scores.cache_scale  # [KV, H / KV, t, D]
    return attended.permute(2, 0, 1, 3).reshape(new, heads, -1).to(query.dtype)


def clamped(joined: Tensor, clamp: ClampedGate) -> Tensor:
    """Return the product of the halves [factors, gates] of the last dimension, as `ClampedGate` says."""
    factor, gate = joined.chunk(2, dim=-1)
    gate = gate.clamp(max=clamp.limit)
    return (factor.clamp(-clamp.limit, clamp.limit) + 1) * (gate * torch.sigmoid(clamp.alpha * gate))


def begin_adapters(x: Tensor, adapters: Adapters, layer: int, matrix: int, parts: int) -> Callable[[Tensor], None]:
    def add(product: Tensor) -> None:
        for place, first, count in adapters.spans[adapters.spans[:, 2] > 0].tolist():
            for part, columns in enumerate(product.chunk(parts, 1)):
                a, b = adapters.store.held[place][layer, matrix + part]
                tokens = slice(first, first + count)
                columns[tokens] += x[tokens] @ a.T @ b

    return add


def route(logits: Tensor, correction: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1) if experts.scores == "softmax" else logits.float().sigmoid()
    wishes = scores if correction is None else scores + correction
    if experts.groups > 1:
        grouped = wishes.unflatten(-1, (experts.groups, -1))
        sums = grouped.topk(experts.group_scores, dim=-1).values.sum(-1)
        best = sums.topk(experts.chosen_groups, dim=-1).indices
        others = torch.ones_like(sums, dtype=torch.bool).scatter(-1, best, False)
        wishes = grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)
    chosen = wishes.topk(experts.chosen, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * experts.scale


def expert_mlp(x: Tensor, matrices: ExpertWeights, chosen: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if expert < len(matrices.outer):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            outer_bias, inner_bias = (
                None if bias is None else bias[expert] for bias in (matrices.outer_bias, matrices.inner_bias)
            )
            joined = functional.linear(x[tokens], matrices.outer[expert], outer_bias)
            if joined.shape[-1] == matrices.inner.shape[-1]:
                states = activate(joined, activation)
            elif matrices.clamp:
                states = clamped(joined, matrices.clamp)
            else:
                states = gated(joined, activation, factor_first=True)
            output = functional.linear(states, matrices.inner[expert], inner_bias).float()
            total.index_add_(0, tokens, output * weights[tokens, place].unsqueeze(-1))
    return total.to(x.dtype)
