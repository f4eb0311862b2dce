"""Engine folders and repositories of usual sizes with random weights: figures of speed do not depend on the weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from tests.support.stages import make_repository
from tests.support.tiny_models import write_byte_tokenizer
from trtserve.artifacts import Engine, ModelRepository
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.placement import Placement
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.executor.torch.runtime import TOKENS_PER_BLOCK, TorchRuntime
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.convert import Quantization

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_engine(
    folder: Path,
    hf: dict[str, Any],
    build: BuildSpec,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    quantize: Quantization = "none",
) -> Engine:
    """Write the engine of a model with random weights of bfloat16."""
    config = checkpoint_config(hf, ConvertSpec(dtype="bfloat16", tp_size=tp_size, pp_size=pp_size, quantize=quantize))
    placement = Placement(
        checkpoint_targets(config),
        layers=config.num_hidden_layers,
        tp_size=tp_size,
        pp_size=pp_size,
        dtype="bfloat16",
    )
    folder.mkdir(parents=True)
    content = TorchRuntime().plan(config, build).engine_config(tokens_per_block=TOKENS_PER_BLOCK)
    (folder / "config.json").write_text(json.dumps(content, indent=4), encoding="utf-8")
    for rank, header in enumerate(placement.headers):
        path = folder / f"rank{rank}.safetensors"
        path.write_bytes(header)
        with path.open("r+b") as file:
            file.truncate(placement.sizes[rank])
            for entry in TensorFile(path).entries.values():
                file.seek(entry.begin)
                _random(entry.shape, str(build.device)).tofile(file)
    return Engine(path=folder)


def _random(shape: tuple[int, ...], device: str) -> Any:
    """Return the bits of bfloat16 numbers; those of matrices keep the size of their inputs."""
    import torch

    values = torch.ones(shape, dtype=torch.bfloat16, device=device)
    if len(shape) > 1:
        values.normal_(std=1 / math.sqrt(shape[-1]))
    return values.view(torch.int16).cpu().numpy()


def core_repository(folder: Path, engine: Engine, **settings: str) -> ModelRepository:
    """Return a repository of the core model alone, which takes token ids.

    It is assembled around stand-ins for the rank files, because it would take minutes to compute their checksums.
    """
    tokenizer, light = folder / "tokenizer", folder / "light"
    for made in (tokenizer, light):
        made.mkdir(parents=True)
    write_byte_tokenizer(tokenizer, max_length=8192)
    (tokenizer / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy2(engine.path / "config.json", light)
    ranks = sorted(path.name for path in engine.path.glob("rank*.safetensors"))
    for name in ranks:
        (light / name).write_bytes(b"0")
    spec = RepositorySpec(name="random", settings=settings)
    whole = make_repository(Engine(path=light), tokenizer, spec, out=folder / "whole")
    core = folder / "repository" / "tensorrt_llm"
    shutil.copytree(whole.path / "tensorrt_llm", core)
    shutil.rmtree(whole.path)
    for name in ranks:
        (core / "1" / name).unlink()
        (core / "1" / name).hardlink_to(engine.path / name)
    config = core / "config.pbtxt"
    config.write_text(config.read_text().replace("preprocessing/1/tokenizer", str(tokenizer)))
    return ModelRepository(path=folder / "repository")
