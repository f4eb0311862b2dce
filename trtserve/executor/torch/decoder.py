"""A decoder in PyTorch: made from a `Decoder` and the tensors of one rank, it computes the logits of a step.

Nothing here reads a tensor on the host, so that a CUDA graph can capture steps that only decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtserve.checkpoint.architectures.base import Decoder, QueryGrowth
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.latent import LatentOutput, LatentProjection
from trtserve.executor.torch.layer_inputs import LayerInput, LayerInputs, NormedValues
from trtserve.executor.torch.mixers import LayerCache, MixerLayer, StepStates, Unprojected, keys_of, tables_of
from trtserve.executor.torch.modules import (
    Embedding,
    JoinedNorms,
    Linear,
    Mlp,
    Norm,
    Rotated,
    WeightMatrix,
    make_mlp,
)
from trtserve.executor.torch.operations import HeadNorms, Operations, RotationTables, Scores
from trtserve.executor.torch.packed import FP8, Fp8Codes
from trtserve.executor.torch.plain_operations import rotate
from trtserve.executor.torch.rank_group import RankGroup
from trtserve.executor.torch.streams import StreamEnds, StreamLayer
from trtserve.executor.torch.weights import EngineWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A step of t new tokens of s sequences on the device; `ModelRunner.forward` explains the order."""

    token_ids: Tensor
    """i64[t]; an id of the vocabulary's size + n is row n of `prompt_table`."""
    positions: Tensor
    """i64[t]; with LongRoPE, those of long sequences are in the second half of the rotation table."""
    cache_places: Tensor
    """i64[t], where the keys and values of each token are written."""
    block_tables: Tensor
    """i32[s, m], the blocks of each sequence."""
    past_lengths: Tensor
    """i32[s]."""
    lengths: Tensor
    """i32[s], past and new tokens."""
    begins: Tensor
    """i32[s + 1], the first token of each sequence."""
    most_new: int
    """The largest number of new tokens of a sequence."""
    decoding: int = 0
    """The last sequences of a step with prompts that have one new token each and take the kernel of decode steps."""
    rows: Tensor | None = None
    """i64[r], the tokens whose logits are needed; None: all."""
    prompt_table: Tensor | None = None
    adapters: Adapters | None = None
    states: StepStates | None = None
    hidden: Tensor | None = None
    """[t, hidden], what the stage before computed; None on the first."""

    @property
    def prompts(self) -> int:
        """How many sequences take the kernel of prompts."""
        return 0 if self.most_new == 1 else len(self.lengths) - self.decoding


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The parts of a layer."""

    norms: dict[str, Norm]
    qkv: Linear | LatentProjection | Unprojected
    own_qkv: Linear | None
    """Of attention beside a state, where `qkv` returns its inputs."""
    dense: Linear | LatentOutput | None
    mixer: MixerLayer | None
    head_norms: HeadNorms | None
    prepared: JoinedNorms | Rotated | NormedValues | None
    """What queries and keys go through before `Operations.rotate_and_store`, which has the usual norms and rotation."""
    rotation: RotationTables | None
    scores: Scores
    mlp: Mlp | None
    shares: bool
    """Whether it uses the keys and values of another layer."""
    inputs: LayerInput | None
    streams: StreamLayer | None
    scale: float
    """What the layer's result is multiplied by."""
    factor: float
    """What attention's result is multiplied by."""
    growth: QueryGrowth | None


_NORMS = (
    *("input_layernorm", "post_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "post_inputs_layernorm",
)


class TorchDecoder:
    """The layers of one rank. `layers` are their numbers in the whole model, `windows` repeat over all layers.

    With `narrow_cache` keys and values are kept in FP8.
    """

    def __init__(
        self,
        decoder: Decoder,
        sizes: Sizes,
        weights: EngineWeights,
        operations: Operations,
        group: RankGroup,
        *,
        layers: range,
        max_position: int,
        windows: Sequence[int | None] = (None,),
        narrow_cache: bool = False,
    ) -> None:
        self._decoder = decoder
        self._narrow_cache = narrow_cache
        self._sizes = sizes
        self._operations = operations
        self._group = group
        self._ranks = group.tp_size
        self._heads = sizes.heads // group.tp_size
        self._is_first, self._is_last = group.stage == 0, group.stage == group.stages - 1
        if self._is_first:
            self._tokens = Embedding(weights, "transformer.vocab_embedding", group)
            learned = decoder.positions == "learned"
            self._positions = Embedding(weights, "transformer.position_embedding", group) if learned else None
            self._embedding_norm = self._norm(weights, "transformer.ln_embed") if decoder.embedding_norm else None
            self._like = self._tokens.weight
            self._inputs = LayerInputs(decoder, sizes, weights, operations) if decoder.layer_inputs else None
        else:
            first = f"transformer.layers.{layers[0]}"
            self._like = weights.tensor(
                next(f"{first}.{each}.weight" for each in _NORMS if f"{first}.{each}.weight" in weights)
            )
        # A decoder with streams has one stage.
        self._ends = None if decoder.streams is None else StreamEnds(decoder.streams, weights, operations)
        rotations = _rotations(decoder, max_position, self._like.device)
        self._layers = [self._layer(weights, number, rotations, windows[number % len(windows)]) for number in layers]
        if self._is_last:
            self._final_norm = None if decoder.block == "post" else self._norm(weights, "transformer.ln_f")
            tied = self._is_first and _is_tied(weights, self._tokens.weight)
            matrix = WeightMatrix(self._tokens.weight, operations) if tied else None
            self._head = Linear(weights, ["lm_head"], operations, matrix=matrix)

    @property
    def dtype(self) -> Any:
        """The type of hidden states."""
        return self._like.dtype

    @property
    def cache_dtype(self) -> Any:
        """The type of keys and values in the cache."""
        return FP8 if self._narrow_cache else self.dtype

    def _norm(self, weights: EngineWeights, name: str) -> Norm:
        return Norm(weights, name, self._decoder.norm, self._sizes.epsilon, self._operations)

    def _layer(
        self,
        weights: EngineWeights,
        number: int,
        rotations: tuple[RotationTables | None, RotationTables | None],
        window: int | None,
    ) -> _Layer:
        decoder, name = self._decoder, f"transformer.layers.{number}"
        norms = dict.fromkeys((*_NORMS, *([decoder.mlp_norm] if decoder.mlp_norm else [])))
        attention, own_window = f"{name}.attention", decoder.window(number)
        rotation = rotations[0 if own_window is None else 1] if decoder.rotation(number) is not None else None
        mixer = decoder.mixer_of(number)
        head_norms, prepared = None, None
        lone = number in decoder.mlp_layers
        if (mixer is None or decoder.mixer_beside) and not lone:
            head_norms, prepared = self._query_key_norms(weights, attention, rotation, number)
        qkv: Linear | LatentProjection | Unprojected
        dense: Linear | LatentOutput | None
        beside = decoder.mixer_beside and mixer is not None
        own_qkv = None
        if beside:
            own_qkv = Linear(weights, [f"{attention}.qkv"], self._operations, layer=number)
            qkv = Unprojected()
            dense = Linear(weights, [f"{attention}.dense"], self._operations, layer=number, group=self._group)
        elif mixer is not None or lone:
            qkv, dense = Unprojected(), None
        elif decoder.latent is None:
            parts = ["qkv", "gate"] if decoder.attention_gate else ["qkv"]
            qkv = Linear(weights, [f"{attention}.{part}" for part in parts], self._operations, layer=number)
            dense = Linear(weights, [f"{attention}.dense"], self._operations, layer=number, group=self._group)
        else:
            qkv = LatentProjection(decoder.latent, weights, attention, number, self._operations)
            dense = LatentOutput(decoder.latent, weights, attention, number, self._operations, self._group)
        return _Layer(
            norms={each: self._norm(weights, f"{name}.{each}") for each in norms if f"{name}.{each}.weight" in weights},
            qkv=qkv,
            own_qkv=own_qkv,
            dense=dense,
            mixer=None
            if mixer is None
            else MixerLayer(mixer, weights, f"{name}.mixer", number, self._operations, self._sizes.epsilon),
            head_norms=head_norms,
            prepared=prepared,
            rotation=None if isinstance(prepared, Rotated) else rotation,
            scores=Scores(
                scale=decoder.attention_scale,
                window=window,
                chunked=decoder.chunked,
                slopes=self._slopes(),
                soft_cap=decoder.attention_softcap,
                sinks=weights.tensor(f"{attention}.sinks").float() if decoder.attention_sinks and dense else None,
                turned=0 if decoder.latent is None else decoder.latent.rotated,
                cache_scale=weights.cache_scale(f"transformer.layers.{decoder.key_layer(number)}.attention")
                if self._narrow_cache and dense is not None
                else 1.0,
            ),
            mlp=None
            if decoder.block == "single" and not lone
            else make_mlp(decoder, weights, number, self._operations, self._group, self._sizes.epsilon),
            shares=decoder.key_layer(number) != number,
            inputs=LayerInput(decoder, weights, number, self._operations) if decoder.layer_inputs else None,
            streams=None
            if decoder.streams is None
            else StreamLayer(decoder.streams, self._sizes, weights, number, self._operations),
            scale=float(weights.tensor(f"{name}.scale")) if decoder.layer_scales else 1.0,
            factor=decoder.attention_factor,
            growth=decoder.growth(number),
        )

    @property
    def cache_parts(self) -> int:
        """2 for keys and values, 1 where keys are values too."""
        return 2 if self._decoder.latent is None else 1

    def cache_shape(self, number: int) -> tuple[int, int]:
        """Return key/value heads of this rank and the size of a head, of a layer of the whole model."""
        sizes = self._sizes.of_layer(full=self._decoder.window(number) is None)
        return max(1, sizes.kv_heads // self._ranks), sizes.head

    def _query_key_norms(
        self, weights: EngineWeights, attention: str, rotation: RotationTables | None, number: int
    ) -> tuple[HeadNorms | None, JoinedNorms | Rotated | NormedValues | None]:
        decoder = self._decoder
        sizes = self._sizes.of_layer(full=decoder.window(number) is None)
        kv_heads, _ = self.cache_shape(number)
        if decoder.qk_norm is None:
            return None, None
        if decoder.qk_norm == "bare":
            if rotation is None:
                return None, None
            ones = torch.ones(sizes.head, dtype=self._like.dtype, device=self._like.device)
            norms = HeadNorms(query=ones, key=ones, epsilon=sizes.epsilon)
            return norms, Rotated(rotation, self._heads + kv_heads, kv_heads)
        parts = "qk" if decoder.key_layer(number) == number else "qq"
        query, key = (weights.tensor(f"{attention}.{part}_layernorm.weight") for part in parts)
        usual = decoder.norm == "rms" and query.numel() == sizes.head and decoder.qk_norm != "all"
        if usual:
            norms = HeadNorms(query=query, key=key, epsilon=sizes.epsilon)
            if decoder.value_norm:
                return norms, NormedValues(kv_heads * sizes.head, sizes.head, sizes.epsilon)
            before = decoder.qk_norm == "rotated" and rotation is not None
            return norms, Rotated(rotation, self._heads + kv_heads, kv_heads) if before and rotation else None
        counts = (sizes.heads, self._heads), (sizes.kv_heads, kv_heads)
        own = [
            weight if weight.numel() == sizes.head else self._own_heads(weight.view(heads, -1), count)
            for weight, (heads, count) in zip((query, key), counts, strict=True)
        ]
        return None, JoinedNorms(
            query=own[0],
            key=own[1],
            heads=(self._heads, kv_heads),
            decoder=decoder,
            epsilon=sizes.epsilon,
            group=self._group,
        )

    def _own_heads(self, of_heads: Tensor, count: int) -> Tensor:
        """Return this rank's rows of weights [heads, head]; ranks beyond the number of heads share one."""
        first = self._group.tp_rank * len(of_heads) // self._group.tp_size
        return of_heads[first : first + count]

    def _slopes(self) -> Tensor | None:
        """Return the ALiBi slopes of this rank's heads."""
        if self._decoder.alibi_slopes is None:
            return None
        first = self._group.tp_rank * self._heads
        slopes = self._decoder.alibi_slopes[first : first + self._heads]
        return torch.tensor(slopes, dtype=torch.float32, device=self._like.device)

    # A step

    def forward(self, inputs: Inputs, caches: Sequence[LayerCache]) -> Tensor:
        """Return logits f32[r, vocab], on stages before the last hidden states [t, hidden].

        `caches` are those of this rank's layers: keys and values, or the tables of states.
        """
        blocks = {
            "parallel": self._parallel,
            "post": self._post_normed,
            "sandwich": self._sandwich,
            "branch": self._branch,
            "streamed": self._streamed,
            "single": self._single,
        }
        run: Callable[..., tuple[Tensor, Tensor | None]] = blocks.get(self._decoder.block, self._sequential)
        hidden, residual = self._enter(inputs), None
        own = self._inputs(inputs.token_ids, hidden) if self._is_first and self._inputs else None
        hidden = hidden if self._ends is None else self._ends.enter(hidden)
        shared = self._share_keys(inputs, caches)
        # Beyond the last layer in which tokens see each other, only those whose logits are needed are computed.
        mixing = [number for number, layer in enumerate(self._layers) if layer.dense or layer.mixer]
        last = mixing[-1] if mixing and self._is_last else -1
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            attention = _Attention(self, layer, inputs, cache, shared, rows=inputs.rows if number == last else None)
            attention.input = None if own is None else attention.kept(own[:, number])
            hidden, residual = run(layer, attention, hidden, residual)
            if layer.streams is None and attention.input is not None:
                hidden = hidden if residual is None else hidden + residual
                hidden, residual = hidden + self._of_input(layer, attention, hidden), None
            if layer.scale != 1.0:
                hidden, residual = (hidden if residual is None else hidden + residual) * layer.scale, None
        if not self._is_last:
            return hidden if residual is None else hidden + residual
        if last < 0 and inputs.rows is not None:
            hidden = (hidden if residual is None else hidden + residual)[inputs.rows]
            residual = None
        return self._logits(hidden, residual)

    @staticmethod
    def _of_input(layer: _Layer, attention: _Attention, hidden: Tensor) -> Tensor:
        """Return what a layer makes of its input."""
        assert layer.inputs is not None and attention.input is not None  # noqa: PT018
        return layer.norms["post_inputs_layernorm"](layer.inputs(hidden, attention.input))

    def _share_keys(self, inputs: Inputs, caches: Sequence[LayerCache]) -> dict[int | None, Any]:
        """Return how the keys of the sequences that decode are shared out, by the windows of the layers."""
        lengths, found = inputs.lengths[inputs.prompts :], dict[int | None, Any]()
        for layer, cache in zip(self._layers, caches, strict=True):
            keys, scores = keys_of(cache), layer.scores
            if keys is not None and len(lengths) and scores.window not in found:
                most_keys = inputs.block_tables.shape[1] * keys.shape[2]
                found[scores.window] = self._operations.share_keys(lengths, keys, most_keys, scores, self._heads)
        return found

    def _enter(self, inputs: Inputs) -> Tensor:
        """Return the hidden states that the first layer of this stage takes: [t, hidden]."""
        if inputs.hidden is not None:
            return inputs.hidden
        ids, table = inputs.token_ids, inputs.prompt_table
        hidden = self._tokens(ids if table is None else ids.clamp(max=self._sizes.vocab - 1))
        if table is not None:
            rows = table[(ids - self._sizes.vocab).clamp(min=0)].to(hidden.dtype)
            hidden = torch.where((ids < self._sizes.vocab).unsqueeze(1), hidden, rows)
        if self._positions is not None:
            hidden = hidden + self._positions(inputs.positions)
        hidden = _scaled(hidden, self._decoder.embedding_scale)
        return hidden if self._embedding_norm is None else self._embedding_norm(hidden)

    @staticmethod
    def _mlp(layer: _Layer) -> Mlp:
        assert layer.mlp is not None  # only single blocks have layers without
        return layer.mlp

    # Each kind of block takes and returns (hidden, residual): states whose sum, if there is a residual, is the layer's
    # input or output. The sum is formed together with the next norm.

    def _sequential(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        qkv, residual = layer.norms["input_layernorm"].then(layer.qkv, hidden, residual, attention.all_adapters)
        norm = layer.norms[str(self._decoder.mlp_norm)]
        scale = self._decoder.residual_scale
        attended = _scaled(attention(qkv), scale)
        output, residual = self._mlp(layer).after_norm(norm, attended, attention.kept(residual), attention.adapters)
        return _scaled(output, scale), residual

    def _sandwich(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        qkv, residual = layer.norms["input_layernorm"].then(layer.qkv, hidden, residual, attention.all_adapters)
        scale, norm = self._decoder.residual_scale, layer.norms["pre_feedforward_layernorm"]
        attended = _scaled(layer.norms["post_layernorm"](attention(qkv)), scale)
        output, residual = self._mlp(layer).after_norm(norm, attended, attention.kept(residual), attention.adapters)
        return _scaled(layer.norms["post_feedforward_layernorm"](output), scale), residual

    def _branch(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        total = hidden if residual is None else hidden + residual
        attended = attention(layer.qkv(total, attention.all_adapters))
        scale = self._decoder.residual_scale
        total = attention.kept(total) + _scaled(layer.norms["post_layernorm"](attended), scale)
        output = layer.norms["post_feedforward_layernorm"](self._mlp(layer)(total, attention.adapters))
        return _scaled(output, scale), total

    def _parallel(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = layer.norms["input_layernorm"].add(hidden, residual)
        attended = attention(layer.qkv(normed, attention.all_adapters))
        residual, own = attention.kept(residual), self._decoder.mlp_norm
        other = attention.kept(normed) if own is None else layer.norms[own](residual)
        return _scaled(attended + self._mlp(layer)(other, attention.adapters), self._decoder.residual_scale), residual

    def _streamed(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        streams = layer.streams
        assert streams is not None
        predictions = streams.predict(hidden)
        active = streams.active(predictions)
        normed = layer.norms["input_layernorm"](active)
        attended = layer.norms["post_layernorm"](attention(layer.qkv(normed, attention.all_adapters)))
        total = (attention.kept(active) + attended + streams.beside(attention.kept(normed))) * math.sqrt(0.5)
        inner = self._mlp(layer)(layer.norms["pre_feedforward_layernorm"](total), attention.adapters)
        made = total + layer.norms["post_feedforward_layernorm"](inner)
        states, seen = streams.correct(attention.kept(predictions), made)
        change = self._of_input(layer, attention, seen).unsqueeze(1)
        return torch.cat([states[:, :1], states[:, 1:] + change], 1), residual

    def _single(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        norm = layer.norms["input_layernorm"]
        if layer.mlp is not None:
            output, residual = layer.mlp.after_norm(norm, hidden, residual, attention.adapters)
        else:
            qkv, residual = norm.then(layer.qkv, hidden, residual, attention.all_adapters)
            output, residual = attention(qkv), attention.kept(residual)
        return _scaled(output, self._decoder.residual_scale), residual

    def _post_normed(
        self, layer: _Layer, attention: _Attention, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert residual is None
        qkv = layer.qkv(hidden, attention.all_adapters)
        normed, _ = layer.norms["input_layernorm"].add(attention(qkv), attention.kept(hidden))
        inner = self._mlp(layer)(normed, attention.adapters)
        return layer.norms["post_layernorm"].add(inner, normed)[0], None

    def without_gates(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries, keys and values, and what gates the heads, which the layer's product has behind them."""
        if not self._decoder.attention_gate:
            return qkv, None
        gates = self._heads * self._sizes.head
        return qkv[:, :-gates].contiguous(), qkv[:, -gates:]

    def attend(
        self,
        layer: _Layer,
        qkv: Tensor,
        inputs: Inputs,
        cache: Tensor,
        shared: Mapping[int | None, Any],
        rounding: Fp8Codes | None,
    ) -> Tensor:
        """Store the new keys and values and return what each token's heads attend to: [t, heads · head].

        In steps without prompts it may be rounded to FP8 for the matrix `rounding`.
        """
        if layer.shares:
            query = self._query(layer, qkv, inputs.positions)
        else:
            query = self._operations.rotate_and_store(
                qkv if layer.prepared is None else layer.prepared(qkv, inputs.positions),
                inputs.positions,
                cache,
                inputs.cache_places,
                heads=self._heads,
                rotation=layer.rotation,
                norms=layer.head_norms,
                cache_scale=layer.scores.cache_scale,
            )
        if (growth := layer.growth) is not None:
            turns = torch.floor((inputs.positions + growth.first) / growth.every)
            query = query * (1 + growth.beta * torch.log1p(turns)).view(-1, 1, 1).to(query.dtype)
        sequences, prompts = len(inputs.lengths), inputs.prompts
        tokens = len(query) - (sequences - prompts)
        parts = []
        if prompts:
            parts.append(
                self._operations.prompt_attention(
                    query[:tokens],
                    cache,
                    inputs.block_tables[:prompts],
                    inputs.past_lengths[:prompts],
                    inputs.begins[: prompts + 1],
                    layer.scores,
                    most_new=inputs.most_new,
                )
            )
        if prompts < sequences:
            parts.append(
                self._operations.decode_attention(
                    query[tokens:],
                    cache,
                    inputs.block_tables[prompts:],
                    inputs.lengths[prompts:],
                    layer.scores,
                    shared[layer.scores.window],
                    None if prompts else rounding,
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.flatten(1)

    def _query(self, layer: _Layer, states: Tensor, positions: Tensor) -> Tensor:
        """Return normed and rotated queries [t, H, D] of a layer that uses another one's keys."""
        query = states.view(len(states), self._heads, -1)
        if (norms := layer.head_norms) is not None:
            query = self._operations.rms_norm(query, norms.query, norms.epsilon)
        return query if layer.rotation is None else rotate(query, positions, layer.rotation)

    def _logits(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        hidden = hidden if self._ends is None else self._ends.leave(hidden)
        if self._final_norm is not None:
            hidden, _ = self._final_norm.add(hidden, residual)
        logits = self._head(hidden)
        if logits.shape[-1] < self._sizes.vocab:
            logits = self._group.all_gather(logits)
        logits = _scaled(logits[:, : self._sizes.vocab].float(), self._decoder.logits_scale).contiguous()
        cap = self._decoder.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class _Attention:
    """The attention of one layer in a step. In the last layer it drops the tokens whose logits are not needed.

    After it tokens are independent of each other, so the last MLP and the head only compute what is needed.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        layer: _Layer,
        inputs: Inputs,
        cache: LayerCache,
        shared: Mapping[int | None, Any],
        *,
        rows: Tensor | None,
    ) -> None:
        self._decoder = decoder
        self._layer = layer
        self._inputs = inputs
        self._cache = cache
        self._shared = shared
        self._rows = rows
        self.input: Tensor | None = None
        """The layer's own input [t, n] of the tokens that are kept."""
        self.all_adapters = adapters = inputs.adapters
        self.adapters = adapters if adapters is None or rows is None else adapters.of_rows()

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return what the layer adds to its input, made of its projection of the input."""
        layer, inputs = self._layer, self._inputs
        if layer.mixer is not None:
            assert inputs.states is not None
            mixed = self.kept(layer.mixer(qkv, inputs.states, tables_of(self._cache)))
            return mixed if layer.own_qkv is None else mixed + self._attended(layer.own_qkv(qkv))
        return self._attended(qkv)

    def _attended(self, qkv: Tensor) -> Tensor:
        layer, inputs, keys = self._layer, self._inputs, keys_of(self._cache)
        assert keys is not None and layer.dense is not None  # noqa: PT018
        qkv, gates = self._decoder.without_gates(qkv)
        rounding = None
        if isinstance(layer.dense, Linear) and gates is None and self.adapters is None:
            rounding = layer.dense.matrix.rounding
        attended = self._decoder.attend(layer, qkv, inputs, keys, self._shared, rounding)
        if gates is not None:
            attended = attended * gates.sigmoid()
        return _scaled(layer.dense(self.kept(attended), self.adapters), layer.factor)

    def kept(self, states: Tensor) -> Tensor:
        """Return the states of the tokens that are needed."""
        return states if self._rows is None else states[self._rows]


def _scaled(states: Tensor, factor: float) -> Tensor:
    return states if factor == 1.0 else states * factor


def _is_tied(weights: EngineWeights, embedding: Tensor) -> bool:
    """Return whether the head is the embedding: the checkpoint has no other, or a copy, which needs no memory."""
    if "lm_head.weight" not in weights:
        return True
    head = weights.tensor("lm_head.weight")
    return head.shape == embedding.shape and head.dtype == embedding.dtype and bool(torch.equal(head, embedding))


def _rotations(decoder: Decoder, positions: int, device: Any) -> tuple[RotationTables | None, RotationTables | None]:
    """Return the rotations of layers without and with a window."""
    if decoder.rope_inv_freq is None:
        return None, None
    tables = [_cos_sin(decoder.rope_inv_freq, positions, decoder.rope_scale, device)]
    if decoder.long_rope is not None:
        tables.append(_cos_sin(decoder.long_rope.inv_freq, positions, decoder.rope_scale, device))
    usual = RotationTables(cos_sin=torch.cat(tables), interleaved=decoder.rope_interleaved)
    if decoder.local_rope_inv_freq is None:
        return usual, usual
    local = _cos_sin(decoder.local_rope_inv_freq, positions, 1.0, device)
    return usual, RotationTables(cos_sin=local, interleaved=decoder.rope_interleaved)


def _cos_sin(frequencies: Sequence[float], positions: int, scale: float, device: Any) -> Tensor:
    """Return f32[positions, 2 · pairs]: scaled cosines, then sines."""
    numbers = torch.arange(positions, dtype=torch.float32, device=device)
    angles = torch.outer(numbers, torch.tensor(frequencies, dtype=torch.float32, device=device))
    return torch.cat([angles.cos(), angles.sin()], -1) * scale
