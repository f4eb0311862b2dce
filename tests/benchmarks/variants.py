"""Random odd models of every family against transformers, in float32 on OpenVINO.

`make variants ARGS="--count 600"` draws models, one per seed: every key of config.json that transformers' class of the
family has takes odd but legal values. transformers names the tensors, so a key that we do not read cannot hide. All
logits of prompts of 5 to 700 tokens, in chunks and batches, and greedy tokens after a reused beginning are compared.
Where float32 itself is coarse, both are compared with float64. Every verdict is a line of the log; a second run goes on
after its last seed, and compares again what differed. The code is 1 when a model differs.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.families import FAMILIES, Config, cases
from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import random_weights, read_safetensors, write_safetensors, write_tiny_model
from tests.support.transformers_oracle import ENGINES, Oracle, engine_of, greedy_tokens
from trtserve.errors import UnsupportedModelError
from trtserve.specs import BuildSpec, ConvertSpec

BOUND = 2e-5
"""Largest difference of a token's logits: root mean square over the vocabulary ÷ standard deviation of all logits."""
LENGTHS = {"a": 700, "b": 250, "c": 60, "d": 5}
SCHEDULE = [{"a": 256}, {"a": 200, "b": 56}, {"a": 128, "b": 100, "c": 28}, {"c": 20, "d": 5}, {"a": 64, "b": 64}]
SCHEDULE += [{"a": 1, "b": 1, "c": 1}] * 4 + [{"a": 48, "b": 26, "c": 8}]
NEW_TOKENS = 6
BOTH = (False, True)
SCALES = (0.07, 0.5, 3.0, 12.0)
ROTATIONS: tuple[Config, ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 16.0, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.1, "truncate": False},
)
HEADS = ((4, 2), (6, 2), (6, 1), (5, 5), (3, 1), (8, 4), (7, 7))
ODD: dict[str, Sequence[Any]] = {
    "vocab_size": (320, 323, 401),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), (72, 100, 136, 200)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, 2, 3, 5)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"), (1e-6, 1e-4, 0.02)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")),
    **dict.fromkeys(("activation_function", "mlp_hidden_act"), ("gelu_new", "gelu", "relu", "relu2", "silu")),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (24, 40, 72)),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), (24, 40, 72)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (4, 6, 8)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), (1, 2, 4)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), (1, 2)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), (0, 1, 2)),
    **dict.fromkeys(("moe_layer_interval", "decoder_sparse_step"), (1, 2)),
    **dict.fromkeys(("n_group", "topk_group"), (1, 2)),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "router_scaling_factor"), (0.5, 1.0, 2.5)),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "logit_scale"), SCALES),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), (0.1, 0.3, 24)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias", "use_qkv_bias"), BOTH),
    **dict.fromkeys(
        ("norm_topk_prob", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "rope_interleave"), BOTH
    ),
    **dict.fromkeys(("parallel_attn", "new_decoder_architecture", "multi_query", "alibi", "bias", "enable_bias"), BOTH),
    **dict.fromkeys(("do_layer_norm_before", "apply_residual_connection_post_layernorm", "mup_enabled"), BOTH),
    **dict.fromkeys(("use_sliding_window", "conv_bias", "mamba_conv_bias", "mamba_proj_bias", "use_conv_bias"), BOTH),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "use_expert_bias"), BOTH),
    **dict.fromkeys(("use_post_norm", "use_double_wide_mlp", "attention_k_eq_v", "tie_word_embeddings"), BOTH),
    **dict.fromkeys(("block_auto_adjust_ff_dim", "layer_norm_elementwise_affine"), BOTH),
    "rope_local_base_freq": (300.0, 10000.0),
    "sliding_window": (7, 16, 33, 100, 300, None),
    "max_window_layers": (0, 1, 2),
    "sliding_window_pattern": (2, 3),
    "no_rope_layer_interval": (2, 3),
    "attention_chunk_size": (7, 33, 100, 300, None),
    "attn_temperature_tuning": BOTH,
    "attn_scale": (0.1, 0.6),
    "floor_scale": (8, 50),
    "interleave_moe_layer_step": (1, 2),
    "intermediate_size_mlp": (72, 136),
    "global_attn_every_n_layers": (2, 3),
    "mlp_only_layers": ([], [0]),
    "final_logit_softcapping": (None, 5.0, 30.0),
    "attn_logit_softcapping": (None,),
    "swiglu_limit": (0.7, 7.0),
    "clip_qkv": (None, 0.8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input"), (16, 24, 40)),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim"), (8, 16, 24)),
    **dict.fromkeys(("linear_value_head_dim", "mamba_head_dim", "ssm_state_size", "mamba_d_state"), (8, 12, 24)),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache", "mamba_d_conv", "conv_kernel"), (2, 3, 4)),
    "linear_num_value_heads": (2, 4, 6),
    "num_kv_shared_layers": (0, 1, 2),
    "altup_num_inputs": (1, 2, 4),
    "altup_active_idx": (0, 1, 2),
    "altup_correct_scale": BOTH,
    "laurel_rank": (3, 16),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rotary_pct": (0.25, 0.5, 1.0),
    "rope_theta": (300.0, 10000.0, 1000000.0),
    "eos_token_id": (2, [2, 7]),
    "bos_token_id": (1, None),
}
# These families have a fixed scaling, or other rotations per kind of layer.
UNSCALED = ("gemma3_text", "gemma3n_text", "gemma4_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "phi3", "gptj")
PER_LAYER = (
    "layer_types",
    "no_rope_layers",
    "mlp_layer_types",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "moe_topk",
    "activation_sparsity_pattern",
)


def variant(chance: random.Random, config: Config, known: Config) -> Config:
    """Return random changes of a family's config.json; `known` is what transformers' class has."""
    fixed = any(key in config for key in PER_LAYER)
    made: Config = {"max_position_embeddings" if "n_positions" not in config else "n_positions": 1024}
    for key, values in ODD.items():
        # Most families have one or two activations, and refuse others.
        share = 0.06 if key.endswith(("act", "activation")) else 0.35
        alias = key == "num_local_experts" and key not in config
        if (key in known or key in config) and chance.random() < share and not (alias or (fixed and "layer" in key)):
            made[key] = chance.choice(values)
    if "layer_types" in config and "sliding_attention" in config["layer_types"] and chance.random() < 0.5:
        made["layer_types"] = [chance.choice(("sliding_attention", "full_attention")) for _ in config["layer_types"]]
    if chance.random() < 0.5 and "num_attention_heads" in config:
        heads, kv_heads = chance.choice(HEADS)
        kv_heads = heads if config.get("num_key_value_heads") == config["num_attention_heads"] else kv_heads
        made |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        if "head_dim" in known or "kv_lora_rank" in known:
            made |= {"hidden_size": chance.choice((48, 64, 72, 96))}
            made |= {"head_dim": chance.choice((8, 16, 24, 32, 40, 64))} if "head_dim" in known else {}
        else:
            made["hidden_size"] = heads * chance.choice((8, 16, 24))
    if {"rope_parameters", "rope_scaling", "rope_theta"} & known.keys() and config["model_type"] not in UNSCALED:
        scaling = chance.choice(ROTATIONS) if chance.random() < 0.5 else None
        if scaling is not None:
            whole = scaling["rope_type"] in ("default", "linear", "dynamic")
            made["rope_scaling"] = scaling | ({} if whole else {"original_max_position_embeddings": 64})
            made["rope_theta"] = chance.choice(ODD["rope_theta"])
    return made


def write_model(folder: Path, config: Config, seed: int, centre: float) -> bool:
    """Write a model whose tensors transformers names, and return whether it can."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    described = copy.deepcopy(config)
    try:
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))
        made.to(torch.float32).save_pretrained(folder)
        generator = np.random.default_rng(seed)
        shapes = {name: each.shape for name, each in sorted(read_safetensors(folder / "model.safetensors").items())}
        tensors = {
            name: random_weights(generator, name, shape, "float32", 1.0, centre) for name, shape in shapes.items()
        }
        write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config))
        Oracle(folder).logits([3, 4, 5])
    except Exception:  # noqa: BLE001 - whatever transformers raises: the config is not legal
        return False
    return True


def share(ours: Any, theirs: Any) -> float:
    """Return the largest difference of a token."""
    return max(
        float((np.sqrt(np.square(ours[key] - logits).mean(-1)) / logits.std()).max()) for key, logits in theirs.items()
    )


def compare(folder: Path, model: Path, seed: int) -> tuple[str, float, str]:
    """Return verdict, largest difference and what differs."""
    from trtserve.executor.openvino.paged_model import PagedModel

    engine = engine_of(model, folder, ConvertSpec(dtype="float32"), BuildSpec(max_seq_len=1024, **ENGINES["openvino"]))
    oracle, chance = Oracle(model), np.random.default_rng(seed)
    sequences = {key: chance.integers(3, 259, length).tolist() for key, length in LENGTHS.items()}
    theirs = {key: oracle.logits(ids) for key, ids in sequences.items()}
    ours = PagedSteps(PagedModel(engine.path, threads=1), sequences).run(SCHEDULE)
    found, text = share(ours, theirs), ""
    prompts = [sequences["b"][:140], sequences["b"][:130] + sequences["c"][:9], sequences["b"][:140]]
    wanted = [oracle.continuation(prompt, NEW_TOKENS) for prompt in prompts]
    asked = [(prompt, NEW_TOKENS) for prompt in prompts]
    answers = greedy_tokens(engine.path, asked, max_num_tokens=64, enable_chunked_context=True)
    if not found <= BOUND:
        oracle._model.double().set_experts_implementation("eager")  # a grouped product has no float64
        exact = {key: oracle.logits(ids) for key, ids in sequences.items()}
        text = f"from float64: ours {share(ours, exact):.1e}, transformers {share(theirs, exact):.1e}"
        if not share(ours, exact) <= 3 * share(theirs, exact):
            return "DIFFERENT", found, text
    return ("equal", found, text) if answers == wanted else ("DIFFERENT", found, f"tokens {answers}, not {wanted}")


def verdict(seed: int, rows: Sequence[tuple[str, Config]]) -> Config:
    """Draw and compare the model of a seed."""
    from transformers import CONFIG_MAPPING, AutoConfig

    chance, (name, changes) = random.Random(seed), rows[seed % len(rows)]
    config = FAMILIES[name].config | changes
    made: Config = {}
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        if config["model_type"] not in CONFIG_MAPPING:
            return {"seed": seed, "family": name, "verdict": "not in transformers"}
        write_tiny_model(model, name, **changes)
        known = AutoConfig.from_pretrained(model).to_dict()
        for _ in range(8):
            made = variant(chance, config, known)
            (model / "model.safetensors").unlink(missing_ok=True)
            if write_model(model, config | {"dtype": "float32"} | made, seed, FAMILIES[name].norm_centre):
                break
        else:
            return {"seed": seed, "family": name, "verdict": "no legal config"}
        try:
            kind, found, text = compare(Path(work), model, seed)
        except UnsupportedModelError as error:
            kind, found, text = "refused", 0.0, error.message
        except Exception as error:  # noqa: BLE001 - a finding, whatever it is
            kind, found, text = "failed", 0.0, f"{type(error).__name__}: {error}"[:300]
            if kept := os.environ.get("KEEP"):
                shutil.copytree(model, Path(kept) / str(seed), dirs_exist_ok=True)
    return {"seed": seed, "family": name, "verdict": kind, "found": found, "text": text, "changes": changes | made}


def main() -> int:
    """Compare as many models as asked."""
    import torch

    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600, help="seeds, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path(".bench/variants.jsonl"))
    asked = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.nice(10)
    # transformers rounds Falcon's ALiBi to bfloat16; TensorRT-LLM and we do not (checkpoint/architectures/falcon.py).
    torch.Tensor.bfloat16 = lambda tensor: tensor
    asked.log.parent.mkdir(exist_ok=True, parents=True)
    lines = asked.log.read_text().splitlines() if asked.log.exists() else []
    done = {row["seed"]: row for row in map(json.loads, lines)}
    rows = cases("logits")
    for seed in range(asked.first, asked.first + asked.count):
        if done.get(seed, {"verdict": "failed"})["verdict"] in ("DIFFERENT", "failed"):
            done[seed] = verdict(seed, rows)
            with asked.log.open("a") as log:
                log.write(line := json.dumps(done[seed]) + "\n")
            sys.stdout.write(line)
            sys.stdout.flush()
    errors = [row["found"] for row in done.values() if row["verdict"] == "equal"]
    ended = Counter(row["verdict"] for row in done.values())
    sys.stdout.write(f"{dict(ended)}; typical {np.median(errors or [0]):.1e}, worst {max(errors, default=0):.1e}\n")
    return 1 if ended["DIFFERENT"] or ended["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
