"""llama.cpp with random weights of the same shapes: GGUF files that need no tokenizer, and decoding in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Quantisation of the layers and of the output matrix. llama-quantize makes the output of q4_0 files q6_K, which the
# package gguf cannot write; q8_0 is what our int8 and int4 engines have there too.
TYPES: Mapping[str, tuple[str, str]] = {"f16": ("F16", "F16"), "q8_0": ("Q8_0", "Q8_0"), "q4_0": ("Q4_0", "Q8_0")}

# Rows of a matrix that are drawn; the others repeat them but for their first number or scale. Without that difference
# a host that merges equal pages of its machines would leave a matrix of a few pages, which fit into a cache.
_ROWS = 64
_Q8_0 = 8
_FLASH_ATTENTION = 1
_CONTEXT = 256


def is_installed() -> bool:
    """Whether llama-cpp-python and gguf can be imported."""
    return find_spec("llama_cpp") is not None and find_spec("gguf") is not None


def write_gguf(path: Path, sizes: Mapping[str, Any], kind: str) -> Path:
    """A Llama with these sizes (Hugging Face's names) and random weights at `path`, written once."""
    import gguf

    if path.exists():
        return path
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    layers, heads, hidden = sizes["num_hidden_layers"], sizes["num_attention_heads"], sizes["hidden_size"]
    writer.add_block_count(layers)
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    inside, head = (gguf.GGMLQuantizationType[name] for name in TYPES[kind])
    for seed, (name, shape) in enumerate(_shapes(sizes).items()):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            to = head if name == "output.weight" else inside
            writer.add_tensor(name, _quantised(shape, to, seed), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def _shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    return {
        "token_embd.weight": (vocab, hidden),
        **{
            f"blk.{number}.{part}.weight": shape
            for number in range(sizes["num_hidden_layers"])
            for part, shape in layer.items()
        },
        "output_norm.weight": (hidden,),
        "output.weight": (vocab, hidden),
    }


def _quantised(shape: tuple[int, ...], to: Any, seed: int) -> npt.NDArray[Any]:
    """Random numbers in the layout of type `to`, as rows of bytes (or of float16)."""
    from gguf.quants import quantize

    random = np.random.default_rng(seed)
    rows = quantize(random.standard_normal((_ROWS, shape[1]), np.float32) * np.float32(0.02), to)
    matrix = np.tile(rows, (-(-shape[0] // _ROWS), 1))[: shape[0]]
    own = (np.arange(shape[0]) % 997 + random.random(shape[0])).astype(np.float16) * np.float16(1e-5)
    width = np.dtype(np.float16).itemsize // matrix.dtype.itemsize
    matrix[:, :width] = own.view(matrix.dtype).reshape(shape[0], width)
    return matrix


class LlamaCppSide:
    """One model in llama.cpp, driven step by step in this thread: greedy, `streams` sequences in a batch."""

    def __init__(self, path: Path, *, streams: int, threads: int) -> None:
        import llama_cpp

        self._library: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}.")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = streams * _CONTEXT
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = streams
        settings.n_threads = settings.n_threads_batch = threads
        # The cache has 8 bits as ours has; for values that takes flash attention.
        settings.type_k = settings.type_v = _Q8_0
        settings.flash_attn_type = _FLASH_ATTENTION
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context for {path}.")
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first new token of all to the last."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        tokens = [self._prefill(prompt, number) for number, prompt in enumerate(prompts)]
        begin = time.perf_counter()
        for step in range(new - 1):
            entries = [
                (token, len(prompt) + step, number, True)
                for number, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            self._decode(entries)
            tokens = [self._best(number) for number in range(len(prompts))]
        return time.perf_counter() - begin

    def close(self) -> None:
        """Free context and model."""
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _prefill(self, prompt: list[int], sequence: int) -> int:
        last = len(prompt) - 1
        self._decode([(token, position, sequence, position == last) for position, token in enumerate(prompt)])
        return self._best(last)

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """One step over (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wanted
        if self._library.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp could not calculate a step.")

    def _best(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
