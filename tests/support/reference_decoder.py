"""A decoder in plain NumPy (float64, full attention, one sequence at a time), to compare engines with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtserve.checkpoint.architectures.base import Decoder, Experts, LatentAttention, Streams
from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, Mixer, ShortConvolution, StateSpace
from trtserve.checkpoint.quantized import group_size
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.openvino.weight_quantization import Packing, quantize_in_groups

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


class ReferenceDecoder:
    """Logits of complete sequences, computed from the definition of the layers.

    `windows` are the sliding windows of the layers, repeated over them; by default the decoder's own everywhere. With a
    `cache_scale` keys and values are rounded to FP8 codes times that.
    """

    def __init__(
        self,
        decoder: Decoder,
        sizes: Sizes,
        weights: Mapping[str, Array],
        *,
        packing: Packing = None,
        windows: Sequence[int | None] = (),
        cache_scale: float | None = None,
    ) -> None:
        self._cache_scale = cache_scale
        self._windows = windows or decoder.windows or [None]
        self._decoder = decoder
        self._sizes = sizes
        self._weights = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
        if packing:
            inside = [name for name in weights if _is_packed(name, weights[name])]
            rounded = _rounded_to_int8 if packing == "int8" else _rounded_to_int4
            self._weights |= {name: rounded(self._weights[name]) for name in inside}
            self._weights["lm_head.weight"] = _rounded_to_int8(self._weights["lm_head.weight"])

    def logits(self, token_ids: npt.ArrayLike) -> Floats:
        """Logits [l, vocab] of the tokens [l] of one sequence."""
        ids = np.asarray(token_ids)
        hidden = self._weights["transformer.vocab_embedding.weight"][ids] * self._decoder.embedding_scale
        if self._decoder.positions == "learned":
            hidden = hidden + self._weights["transformer.position_embedding.weight"][: len(ids)]
        if self._decoder.embedding_norm:
            hidden = self._norm(hidden, "transformer.ln_embed")
        self._stored: dict[int, tuple[Floats, Floats]] = {}
        inputs = self._layer_inputs(ids, hidden) if self._decoder.layer_inputs else None
        if self._decoder.streams is not None:
            assert inputs is not None
            hidden = self._streamed(hidden, inputs, self._decoder.streams)
        else:
            for layer in range(self._sizes.layers):
                name = f"transformer.layers.{layer}."
                hidden = self._layer(hidden, layer)
                hidden = hidden if inputs is None else hidden + self._of_input(hidden, inputs[:, layer], name)
                hidden = hidden * self._weights.get(f"{name}scale", 1)
        if self._decoder.block != "post":
            hidden = self._norm(hidden, "transformer.ln_f")
        logits = self._linear(hidden, "lm_head") * self._decoder.logits_scale
        cap = self._decoder.logits_softcap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _layer_inputs(self, ids: Array, embedded: Floats) -> Floats:
        shape = len(ids), self._sizes.layers, self._decoder.layer_inputs
        own = self._weights["transformer.layer_embedding.weight"][ids].reshape(shape) * math.sqrt(shape[2])
        made = self._linear(embedded, "transformer.layer_projection").reshape(shape) / math.sqrt(self._sizes.hidden)
        both: Floats = (own + self._norm(made, "transformer.layer_norm")) / math.sqrt(2)
        return both

    def _of_input(self, hidden: Floats, own: Floats, name: str) -> Floats:
        gate = _ACTIVATIONS[self._decoder.activation](self._linear(hidden, f"{name}inputs.gate"))
        return self._norm(self._linear(gate * own, f"{name}inputs.proj"), f"{name}post_inputs_layernorm")

    def _streamed(self, embedded: Floats, inputs: Floats, streams: Streams) -> Floats:
        """States [n, l, hidden] through all layers, which see the active one, and their mean."""
        others = [self._linear(embedded, f"transformer.stream_entry.{n}") for n in range(1, streams.count)]
        states = np.stack([embedded, *(_as_large(embedded, other) for other in others)])
        for layer in range(self._sizes.layers):
            name = f"transformer.layers.{layer}."
            mixtures = self._linear(self._routed_states(states[streams.active], name), f"{name}streams.prediction")
            mixtures = mixtures.reshape(len(embedded), streams.count, streams.count)
            states = states + np.einsum("lij,jlh->ilh", mixtures, states)
            hidden = states[streams.active]
            normed = self._norm(hidden, f"{name}input_layernorm")
            low = self._linear(self._linear(normed, f"{name}beside.left"), f"{name}beside.right")
            attended = self._attention(normed, layer, self._windows[layer % len(self._windows)])
            total = hidden + self._norm(attended, f"{name}post_layernorm")
            total = (total + normed + self._norm(low, f"{name}post_beside_layernorm")) / math.sqrt(2)
            inner = self._mlp(self._norm(total, f"{name}pre_feedforward_layernorm"), f"{name}mlp.", layer)
            made = total + self._norm(inner, f"{name}post_feedforward_layernorm")
            factors = 1 + self._linear(self._routed_states(made, name), f"{name}streams.correction")
            states = states + factors.T[:, :, None] * (made - states[streams.active])
            seen = states[streams.active] * self._weights[f"{name}streams.scale"]
            states[1:] += self._of_input(seen, inputs[:, layer], name)
        made = [self._linear(each, f"transformer.stream_exit.{n}") for n, each in enumerate(states[1:], start=1)]
        mean: Floats = np.mean([states[0], *(_as_large(states[0], each) for each in made)], axis=0)
        return mean

    def _routed_states(self, hidden: Floats, name: str) -> Floats:
        normed = self._norm(hidden, f"{name}streams_layernorm") / self._sizes.hidden
        routed: Floats = np.tanh(self._linear(normed, f"{name}streams.router"))
        return routed

    def _layer(self, hidden: Floats, layer: int) -> Floats:
        name = f"transformer.layers.{layer}."
        block, mlp_norm = self._decoder.block, self._decoder.mlp_norm
        window = self._windows[layer % len(self._windows)]
        scale = self._decoder.residual_scale
        if layer in self._decoder.mlp_layers:
            lone: Floats = (
                hidden + self._mlp(self._norm(hidden, name + "input_layernorm"), name + "mlp.", layer) * scale
            )
            return lone
        normed = hidden if block in ("post", "branch") else self._norm(hidden, name + "input_layernorm")
        mixer = self._decoder.mixer_of(layer)
        attended = np.zeros_like(hidden) if mixer is None else self._mixed(normed, name + "mixer.", mixer)
        if mixer is None or self._decoder.mixer_beside:
            attended = attended + self._attention(normed, layer, window) * self._decoder.attention_factor
        if block == "single":
            mixed: Floats = hidden + attended * scale
            return mixed
        if block == "parallel":
            other = normed if mlp_norm is None else self._norm(hidden, name + mlp_norm)
            both: Floats = hidden + (attended + self._mlp(other, name + "mlp.", layer)) * scale
            return both
        if block == "post":
            hidden = self._norm(hidden + attended * scale, name + "input_layernorm")
            return self._norm(hidden + self._mlp(hidden, name + "mlp.", layer) * scale, name + "post_layernorm")
        around = block in ("sandwich", "branch")
        hidden = hidden + scale * (self._norm(attended, name + "post_layernorm") if around else attended)
        before = {"branch": None, "sandwich": "pre_feedforward_layernorm"}.get(block, mlp_norm)
        normed = hidden if before is None else self._norm(hidden, name + before)
        experts = self._decoder.experts_of(layer)
        if experts is not None and experts.apart:
            inner = self._apart(hidden, normed, name + "mlp.", experts)
        else:
            inner = self._mlp(normed, name + "mlp.", layer)
        total: Floats = hidden + scale * (self._norm(inner, name + "post_feedforward_layernorm") if around else inner)
        return total

    def _linear(self, hidden: Floats, name: str) -> Floats:
        product = hidden @ self._weights[f"{name}.weight"].T
        return product + self._weights[f"{name}.bias"] if f"{name}.bias" in self._weights else product

    def _norm(self, hidden: Floats, name: str, epsilon: float | None = None) -> Floats:
        weight = self._weights[f"{name}.weight"]
        weight = weight if weight.size == hidden.shape[-1] else weight.reshape(-1, hidden.shape[-1])
        if self._decoder.norm == "rms":
            scaled: Floats = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + (epsilon or self._sizes.epsilon))
            return scaled * weight
        centred = hidden - hidden.mean(-1, keepdims=True)
        normal: Floats = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self._sizes.epsilon)
        return normal * weight + self._weights.get(f"{name}.bias", np.zeros(1))

    def _attention(self, hidden: Floats, layer: int, window: int | None) -> Floats:
        name, sizes, length = f"transformer.layers.{layer}.attention.", self._sizes_of(layer), len(hidden)
        if self._decoder.latent is not None:
            return self._latent_attention(hidden, name, self._decoder.latent)
        query, key, value = self._states(hidden, layer, name)
        group = sizes.heads // sizes.kv_heads
        key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) * self._decoder.attention_scale
        if self._decoder.attention_softcap is not None:
            scores = np.tanh(scores / self._decoder.attention_softcap) * self._decoder.attention_softcap
        if self._decoder.alibi_slopes is not None:
            distance = np.arange(length)[:, None] - np.arange(length)
            scores -= np.array(self._decoder.alibi_slopes)[:, None, None] * distance
        scores = np.where(_visible(length, window, chunked=self._decoder.chunked), scores, -np.inf)
        sinks = self._weights[name + "sinks"] if self._decoder.attention_sinks else np.full(sizes.heads, -np.inf)
        sinks = sinks[:, None, None]
        highest = np.maximum(scores.max(-1, keepdims=True), sinks)
        weights = np.exp(scores - highest)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sinks - highest)
        attended = np.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)
        if self._decoder.attention_gate:
            attended = attended / (1 + np.exp(-self._linear(hidden, name + "gate")))
        return self._linear(attended, name + "dense")

    def _sizes_of(self, layer: int) -> Sizes:
        return self._sizes.of_layer(full=self._decoder.window(layer) is None)

    def _states(self, hidden: Floats, layer: int, name: str) -> tuple[Floats, Floats, Floats]:
        """Return queries, keys and values, normed and rotated: [l, heads, head]."""
        frequencies, sizes, length = self._decoder.rotation(layer), self._sizes_of(layer), len(hidden)
        fused = self._linear(hidden, name + "qkv").reshape(length, -1, sizes.head)
        query, key = fused[:, : sizes.heads], fused[:, sizes.heads : sizes.heads + sizes.kv_heads]
        value = fused[:, sizes.heads + sizes.kv_heads :]
        norm, shares = self._decoder.qk_norm, self._decoder.key_layer(layer) != layer
        if shares:  # only to be replaced
            key = value = query[:, : sizes.kv_heads]
        if self._decoder.value_norm:
            value = value / np.sqrt((value**2).mean(-1, keepdims=True) + sizes.epsilon)
        if norm == "bare" and frequencies is not None:
            query, key = (
                each / np.sqrt((each**2).mean(-1, keepdims=True) + sizes.epsilon)
                for each in (self._rotate(query, frequencies), self._rotate(key, frequencies))
            )
            frequencies = None
        if norm == "rotated":
            query, key = self._rotate(query, frequencies), self._rotate(key, frequencies)
        if norm not in (None, "bare"):
            query = self._norm_heads(query, name + "q_layernorm")
            key = key if shares else self._norm_heads(key, name + "k_layernorm")
        if norm != "rotated":
            query, key = self._rotate(query, frequencies), self._rotate(key, frequencies)
        if (growth := self._decoder.growth(layer)) is not None:
            turns = np.floor((np.arange(length) + growth.first) / growth.every)
            query = query * (1 + growth.beta * np.log1p(turns))[:, None, None]
        if self._cache_scale is not None:
            key, value = (_rounded_to_fp8(each, self._cache_scale) for each in (key, value))
        self._stored[layer] = key, value
        return query, *self._stored[self._decoder.key_layer(layer)]

    def _mixed(self, hidden: Floats, name: str, mixer: Mixer) -> Floats:
        """The layers with a state, token by token."""
        length, inputs = len(hidden), self._linear(hidden, name + "in_proj")
        if isinstance(mixer, ShortConvolution):
            before, after, x = np.split(inputs, 3, axis=-1)
            result: Floats = after * self._convolved(before * x, name)
        elif isinstance(mixer, DeltaNet):
            joined, gates = np.split(inputs, [mixer.channels], axis=-1)
            betas, steps = np.split(self._linear(hidden, name + "gates"), 2, axis=-1)
            parts = np.split(_silu(self._convolved(joined, name)), [mixer.keys, 2 * mixer.keys], axis=-1)
            query, key, value = (
                part.reshape(length, heads, -1)
                for part, heads in zip(parts, (mixer.key_heads, mixer.key_heads, mixer.value_heads), strict=True)
            )
            query, key = (np.repeat(_unit(part), mixer.value_heads // mixer.key_heads, axis=1) for part in (query, key))
            decays = np.exp(-np.exp(self._weights[name + "decay"]) * self._softplus(steps, name))
            state, outputs = np.zeros((mixer.value_heads, mixer.value, mixer.key)), []
            for token in range(length):
                state = state * decays[token][:, None, None]
                missing = value[token] - np.einsum("hvk,hk->hv", state, key[token])
                state = state + np.einsum("h,hv,hk->hvk", 1 / (1 + np.exp(-betas[token])), missing, key[token])
                outputs.append(np.einsum("hvk,hk->hv", state, query[token]) / math.sqrt(mixer.key))
            result = self._norm(np.stack(outputs), name + "norm").reshape(length, -1) * _silu(gates)
        else:
            result = self._scanned(inputs, name, mixer)
        return self._linear(result, name + "out_proj") * getattr(mixer, "factor", 1)

    def _scanned(self, inputs: Floats, name: str, mixer: StateSpace) -> Floats:
        length = len(inputs)
        inputs = inputs * np.array(mixer.input_factors or 1.0)
        gates, joined, steps = np.split(inputs, [mixer.inner, mixer.inner + mixer.channels], axis=-1)
        edges = [mixer.inner, mixer.inner + mixer.groups * mixer.state]
        x, b, c = np.split(_silu(self._convolved(joined, name)), edges, axis=-1)
        x = x.reshape(length, mixer.heads, mixer.head)
        b, c = (
            np.repeat(part.reshape(length, mixer.groups, -1), mixer.heads // mixer.groups, axis=1) for part in (b, c)
        )
        steps = self._softplus(steps, name)
        if mixer.time_limit is not None:
            steps = np.clip(steps, *mixer.time_limit)
        decays = np.exp(-np.exp(self._weights[name + "decay"]) * steps)
        state, outputs = np.zeros((mixer.heads, mixer.head, mixer.state)), []
        for token in range(length):
            fresh = np.einsum("h,hd,hs->hds", steps[token], x[token], b[token])
            state = state * decays[token][:, None, None] + fresh
            outputs.append(np.einsum("hds,hs->hd", state, c[token]) + self._weights[name + "skip"][:, None] * x[token])
        result: Floats = np.stack(outputs).reshape(length, -1)
        if not mixer.norm_groups:
            return result * _silu(gates)
        if not mixer.norm_first:
            result = result * _silu(gates)
        normed = self._norm(result.reshape(length, mixer.norm_groups, -1), name + "norm").reshape(length, -1)
        return normed * _silu(gates) if mixer.norm_first else normed

    def _convolved(self, inputs: Floats, name: str) -> Floats:
        weight = self._weights[name + "conv.weight"]
        taps = weight.shape[-1]
        padded = np.concatenate([np.zeros((taps - 1, inputs.shape[1])), inputs])
        taken = [padded[tap : tap + len(inputs)] * weight[:, tap] for tap in range(taps)]
        total: Floats = np.sum(taken, axis=0) + self._weights.get(name + "conv.bias", 0)
        return total

    def _softplus(self, steps: Floats, name: str) -> Floats:
        total: Floats = np.logaddexp(0, steps + self._weights[name + "time_bias"])
        return total

    def _latent_attention(self, hidden: Floats, name: str, latent: LatentAttention) -> Floats:
        """Keys and values of every head, made of the latent vectors."""
        length, heads = len(hidden), self._sizes.heads
        lower = hidden
        if f"{name}q_a.weight" in self._weights:
            lower = self._norm(self._linear(hidden, name + "q_a"), name + "q_a_layernorm", latent.epsilon)
        queries = self._linear(lower, name + "q_b").reshape(length, heads, -1)
        stored, turned = np.split(self._linear(hidden, name + "kv_a"), [latent.rank], axis=-1)
        made = self._linear(self._norm(stored, name + "kv_a_layernorm", latent.epsilon), name + "kv_b")
        keys, values = np.split(made.reshape(length, heads, -1), [latent.plain], axis=-1)
        frequencies = self._decoder.rope_inv_freq
        scores = np.einsum("qhd,khd->hqk", queries[..., : latent.plain], keys)
        rotated = self._rotate(queries[..., latent.plain :], frequencies)
        scores += np.einsum("qhd,kd->hqk", rotated, self._rotate(turned[:, None], frequencies)[:, 0])
        scores = np.where(_visible(length, None), scores * self._decoder.attention_scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(np.einsum("hqk,khd->qhd", weights, values).reshape(length, -1), name + "dense")

    def _norm_heads(self, states: Floats, name: str) -> Floats:
        """Norm [l, heads, head] over each head, or over all of them; some weights differ from head to head."""
        if self._decoder.qk_norm == "all":
            return self._norm(states.reshape(len(states), -1), name).reshape(states.shape)
        return self._norm(states, name)

    def _rotate(self, states: Floats, frequencies: Sequence[float] | None) -> Floats:
        """Each pair of numbers, as a complex number, times e^(i · position · frequency)."""
        if frequencies is None:
            return states
        size = 2 * len(frequencies)
        turned, rest = self._turn(states[..., :size], np.asarray(frequencies)), states[..., size:]
        turned = turned * (self._decoder.rope_scale if frequencies is self._decoder.rope_inv_freq else 1)
        return np.concatenate([turned, rest], axis=-1)

    def _turn(self, states: Floats, frequencies: Floats) -> Floats:
        angles = np.outer(np.arange(len(states)), frequencies)[:, None, :]
        half = len(frequencies)
        if self._decoder.rope_interleaved:
            turned = (states[..., 0::2] + 1j * states[..., 1::2]) * np.exp(1j * angles)
            neighbours: Floats = np.stack([turned.real, turned.imag], axis=-1)
            return neighbours.reshape(states.shape)
        turned = (states[..., :half] + 1j * states[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _apart(self, hidden: Floats, normed: Floats, name: str, experts: Experts) -> Floats:
        seen = self._norm(hidden, f"{name}router_norm") / math.sqrt(self._sizes.hidden)
        routed = self._routed(self._norm(hidden, f"{name}pre_experts_layernorm"), seen, name, experts)
        shared = self._norm(self._shared(normed, name, experts), f"{name}post_shared_layernorm")
        return shared + self._norm(routed, f"{name}post_experts_layernorm")

    def _experts(self, hidden: Floats, name: str, experts: Experts) -> Floats:
        routed = self._routed(hidden, hidden, name, experts)
        return routed + self._shared(hidden, name, experts) if experts.shared else routed

    def _routed(self, hidden: Floats, seen: Floats, name: str, experts: Experts) -> Floats:
        """Token by token: the experts that the router chooses of `seen`, one after another."""
        activate = _ACTIVATIONS[self._decoder.activation]
        summed = np.zeros_like(hidden)
        outer, inner = (self._of_experts(f"{name}{part}") for part in ("fc", "proj"))
        for token, row in enumerate(hidden):
            for expert, share in self._shares(seen[token], f"{name}router", experts).items():
                inward, outward = (share, 1.0) if experts.scaled_inputs else (1.0, share)
                joined = outer[expert] @ np.append(inward * row, 1)
                if experts.interleaved:
                    joined = np.concatenate([joined[1::2], joined[0::2]])
                up, gate = np.split(joined, 2)
                if not experts.gated:
                    states = activate(joined)
                elif experts.clamp is None:
                    states = up * activate(gate)
                else:
                    limit, gate = experts.clamp.limit, np.minimum(gate, experts.clamp.limit)
                    states = (np.clip(up, -limit, limit) + 1) * gate / (1 + np.exp(-experts.clamp.alpha * gate))
                summed[token] += outward * (inner[expert] @ np.append(states, 1))
        return summed

    def _shared(self, hidden: Floats, name: str, experts: Experts) -> Floats:
        activate = _ACTIVATIONS[self._decoder.activation]
        states = self._linear(hidden, f"{name}shared_expert.fc")
        if experts.gated:
            up, gate = np.split(states, 2, axis=-1)
            states = up * activate(gate)
        else:
            states = activate(states)
        shared = self._linear(states, f"{name}shared_expert.proj")
        return (
            shared / (1 + np.exp(-self._linear(hidden, f"{name}shared_expert_gate"))) if experts.shared_gate else shared
        )

    def _of_experts(self, name: str) -> Floats:
        """Return the matrices of all experts [experts, out, in + 1]; the last column is the bias."""
        weight = self._weights[f"{name}.weight"]
        bias = self._weights.get(f"{name}.bias", np.zeros((*weight.shape[:2], 1)))
        return np.concatenate([weight, bias], axis=-1)

    def _shares(self, row: Floats, router: str, experts: Experts) -> dict[int, float]:
        """Return the experts of a token and the factors of their outputs."""
        products = self._weights[f"{router}.weight"] @ row + self._weights.get(f"{router}.bias", 0)
        if experts.scores == "sigmoid":
            scores = 1 / (1 + np.exp(-products))
        else:
            scores = np.exp(products - products.max())
            scores /= scores.sum()
        wishes = scores + self._weights.get(f"{router}.correction", 0)
        members = np.arange(experts.count).reshape(experts.groups, -1)
        if experts.groups > 1:
            sums = np.sort(wishes[members], axis=-1)[:, -experts.group_scores :].sum(-1)
            members = members[np.argsort(-sums)[: experts.chosen_groups]]
        chosen = sorted(members.ravel(), key=lambda expert: -wishes[expert])[: experts.chosen]
        total = scores[chosen].sum() if experts.renormalized else 1.0
        factors = self._weights.get(f"{router}.scale", np.ones(experts.count)) * experts.scale
        return {int(expert): float(scores[expert] / total * factors[expert]) for expert in chosen}

    def _mlp(self, hidden: Floats, name: str, layer: int) -> Floats:
        experts = self._decoder.experts_of(layer)
        if experts is not None:
            return self._experts(hidden, name, experts)
        inner = self._linear(hidden, name + "fc") * self._decoder.gate_factor
        activate = _ACTIVATIONS.get(self._decoder.activation, _silu)
        if (threshold := self._decoder.gate_threshold(layer)) is not None:
            inner = np.maximum(inner - inner.mean(-1, keepdims=True) - threshold * inner.std(-1, keepdims=True), 0)
        if self._decoder.mlp == "fused":
            factor, gate = np.split(inner, 2, axis=-1)
            inner = factor * activate(gate)
        elif self._decoder.activation == "xielu":
            above, below = np.logaddexp(0, self._weights[name + "xielu"])
            curved = (below + 0.5) * (np.expm1(np.minimum(inner, 0)) - inner)
            inner = np.where(inner > 0, above * inner**2, curved) + inner / 2
        else:
            inner = activate(inner)
        if self._decoder.gated:
            inner = inner * self._linear(hidden, name + "gate")
        return self._linear(inner, name + "proj") * self._decoder.mlp_factor


def _visible(length: int, window: int | None, *, chunked: bool = False) -> npt.NDArray[np.bool_]:
    """Return which keys a query sees: its own and the `window - 1` before it, or those of its chunk."""
    if chunked and window:
        chunks = np.arange(length) // window
        same: npt.NDArray[np.bool_] = np.tril(chunks[:, None] == chunks)
        return same
    distance = np.arange(length)[:, None] - np.arange(length)
    seen: npt.NDArray[np.bool_] = (distance >= 0) & (distance < (window or length))
    return seen


def _unit(values: Floats) -> Floats:
    scaled: Floats = values / np.sqrt((values**2).sum(-1, keepdims=True) + 1e-6)
    return scaled


def _silu(values: Floats) -> Floats:
    return values / (1 + np.exp(-values))


def _gelu(values: Floats) -> Floats:
    share: Floats = np.vectorize(lambda value: (1 + math.erf(value / math.sqrt(2))) / 2)(values)
    return values * share


def _gelu_tanh(values: Floats) -> Floats:
    share: Floats = (1 + np.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3))) / 2
    return values * share


def _relu(values: Floats) -> Floats:
    return np.maximum(values, 0)


def _relu2(values: Floats) -> Floats:
    return _relu(values) * _relu(values)


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu, "relu2": _relu2}


def _as_large(like: Floats, made: Floats) -> Floats:
    """Scale `made` to the root mean square of `like`."""
    sizes = [np.sqrt((states**2).mean(-1, keepdims=True)) for states in (like, made)]
    scaled: Floats = made * sizes[0] / np.maximum(sizes[1], math.sqrt(1e-5))
    return scaled


def _is_packed(name: str, weight: Array) -> bool:
    """Routers of experts and biases are not quantised."""
    routes = name.endswith(("router.weight", "shared_expert_gate.weight", "kv_b.weight", "conv.weight", "gates.weight"))
    routes = routes or name.endswith(("streams.prediction.weight", "streams.correction.weight"))
    return ".layers." in name and name.endswith(".weight") and weight.ndim > 1 and not routes


def _rounded_to_fp8(states: Floats, scale: float) -> Floats:
    codes = np.clip(states / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    rounded: Floats = codes.astype(np.float64) * scale
    return rounded


def _rounded_to_int8(weight: Floats) -> Floats:
    """Round a matrix [..., out, in] to symmetric int8 per output channel."""
    scales: Floats = np.abs(weight).max(axis=-1, keepdims=True) / 127
    rounded: Floats = np.rint(weight / scales)
    return rounded * scales


def _rounded_to_int4(weight: Floats) -> Floats:
    """Return a matrix [..., out, in] rounded to int4 in groups; the groups have tests of their own."""
    flat = weight.astype(np.float32).reshape(-1, weight.shape[-1])
    rounded = quantize_in_groups(flat, group_size(flat.shape[1])).dequantized()
    return rounded.reshape(weight.shape).astype(np.float64)
