"""Check what a model takes of its GPU's memory, and which kernels it compiles later: `python -m tests.gpu.memory`.

Prints a line for each check and ends with 1 if one fails.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before Triton is imported: nothing that earlier runs compiled may be found.
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch

from tests.gpu.random_engines import LLAMA_8B, write_engine
from trtserve.executor.engine.limits import EngineOptions
from trtserve.executor.engine.model import single_sequence
from trtserve.executor.torch.ranked_model import load_model
from trtserve.specs import BuildSpec
from trtserve.specs.convert import Quantization

SMALL = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 2816}
LLAMA: dict[str, Any] = LLAMA_8B | SMALL | {"num_key_value_heads": 4}
EXPERTS: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
TOKENS = 4096
BUILD = BuildSpec(
    runtime="torch", device="cuda", max_batch_size=256, max_seq_len=2048, max_input_len=2000, max_num_tokens=TOKENS
)
BLOCKS = 64


def compiled() -> int:
    return sum(path.suffix == ".cubin" for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*"))


def used(gpu: int) -> int:
    free, total = torch.cuda.mem_get_info(gpu)
    return int(total - free)


def check(
    name: str, hf: dict[str, Any], folder: Path, gpu: int, quantize: Quantization = "none"
) -> list[tuple[str, bool]]:
    """Load a model on a GPU, warm it up, and run the largest step."""
    gc.collect()
    torch.cuda.empty_cache()
    before = [used(each) for each in range(torch.cuda.device_count())]
    engine = write_engine(folder / f"{name}{gpu}", hf, BUILD, quantize=quantize)
    model: Any = load_model(engine.path, EngineOptions(device_ids=(gpu,)))
    model.allocate(BLOCKS)
    torch.cuda.empty_cache()
    held, planned = used(gpu), model._step_bytes
    model.warm_up()
    kernels = compiled()
    long = TOKENS // 2
    blocks = [number % BLOCKS for number in range(-(-long // model.tokens_per_block))]
    for new in (100, 700, long):
        model.forward(single_sequence([0] * new, blocks[: -(-new // model.tokens_per_block)], rows=[new - 1]))
    torch.cuda.synchronize()
    taken, others = used(gpu) - held, [used(each) - before[each] for each in range(len(before)) if each != gpu]
    print(f"{name} on GPU {gpu}: steps take {taken >> 20} MiB of {planned >> 20} planned", flush=True)
    return [
        (f"{name}: no more memory than planned", taken <= planned),
        (f"{name}: nothing on other GPUs", all(each < 64 << 20 for each in others)),
        (f"{name}: no kernel is compiled after warming up", compiled() == kernels),
    ]


def main() -> int:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for gpu in range(min(2, torch.cuda.device_count())):
            results += check("llama", LLAMA, Path(folder), gpu)
            results += check("experts", EXPERTS, Path(folder), gpu)
            results += check("latent", LATENT, Path(folder), gpu)
            results += check("int4", LLAMA, Path(folder), gpu, "int4")
            results += check("int8", LLAMA, Path(folder), gpu, "int8")
    for name, right in results:
        print(f"{'ok' if right else 'WRONG'}: {name}", flush=True)
    return 0 if all(right for _, right in results) else 1


if __name__ == "__main__":
    sys.exit(main())
