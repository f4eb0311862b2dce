"""Small checkpoints, engines and model repositories for tests of the doubles, written without the product.

Names and shapes are NVIDIA's; config.pbtxt has the parameters that every release has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.doubles.containers import CONTAINERS
from tests.doubles.engine import EngineHeader, write_config, write_engine

HIDDEN, HEADS, VOCABULARY, LAYERS = 8, 2, 16, 2


def checkpoint_config(tp: int = 1, pp: int = 1, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny LLaMA checkpoint."""
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "position_embedding_type": "rope_gpt_neox",
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **changes,
    }


def _shapes(stage: int, tp: int, pp: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS // pp):
        prefix = f"transformer.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_layernorm.weight": (HIDDEN,),
            f"{prefix}.attention.qkv.weight": (3 * HIDDEN // tp, HIDDEN),
            f"{prefix}.attention.dense.weight": (HIDDEN, HIDDEN // tp),
            f"{prefix}.mlp.fc.weight": (4 * HIDDEN // tp, HIDDEN),
            f"{prefix}.mlp.gate.weight": (4 * HIDDEN // tp, HIDDEN),
            f"{prefix}.mlp.proj.weight": (HIDDEN, 4 * HIDDEN // tp),
        }
    if stage == 0:
        shapes["transformer.vocab_embedding.weight"] = (VOCABULARY, HIDDEN)
    if stage == pp - 1:
        shapes |= {"transformer.ln_f.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY // tp, HIDDEN)}
    return shapes


def write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16", item: int = 2) -> None:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = item
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_checkpoint(folder: Path, *, tp: int = 1, pp: int = 1, **changes: Any) -> Path:
    """A checkpoint of tp × pp ranks; `changes` are keys of config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(checkpoint_config(tp, pp, **changes), indent=4), encoding="utf-8")
    for rank in range(tp * pp):
        write_zeros(folder / f"rank{rank}.safetensors", _shapes(rank // tp, tp, pp))
    return folder


def write_engine_folder(
    folder: Path, *, tp: int = 1, pp: int = 1, container: str = "25.04", sm: int = 90, gpus_per_node: int = 8
) -> Path:
    """An engine folder as the double of trtllm-build leaves it."""
    folder.mkdir(parents=True)
    found = CONTAINERS[container]
    build = {"max_batch_size": 8, "max_input_len": 32, "max_seq_len": 64, "max_beam_width": 1, "plugin_config": {}}
    mapping = {**checkpoint_config(tp, pp)["mapping"], "gpus_per_node": gpus_per_node}
    write_config(folder, found.tensorrt_llm, checkpoint_config(tp, pp, mapping=mapping), build)
    for rank in range(tp * pp):
        header = EngineHeader(
            rank=rank,
            world_size=tp * pp,
            tensorrt_llm=found.tensorrt_llm,
            tensorrt=found.tensorrt,
            sm=sm,
            size=64,
        )
        write_engine(folder / f"rank{rank}.engine", header)
    return folder


def core_config(name: str, engine: str, **parameters: str) -> str:
    """config.pbtxt of a core model with the C++ backend; parameters are added or replaced."""
    values = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine,
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
        **parameters,
    }
    lines = [
        f'name: "{name}"\nbackend: "tensorrtllm"\nmax_batch_size: 4',
        "model_transaction_policy { decoupled: false }",
        'input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true } ]',
        'input [ { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } } ]',
        'input [ { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } } ]',
        'output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]',
        'output [ { name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] } ]',
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    lines += [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in values.items()]
    return "\n".join(lines) + "\n"


def write_core_model(repository: Path, name: str, engine: str, **parameters: str) -> Path:
    """One core model of a repository."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(core_config(name, engine, **parameters), encoding="utf-8")
    return repository
