"""Hundreds of random models of every family against transformers, in float32 on both runtimes of our own.

`python -m tests.benchmarks.family_variants --count 300 --seed 1` changes sizes, heads, layers and rotary scalings of
the families in `tests.support.families`, and compares all logits of prompts of 5 to 700 tokens, in chunks and
batches, and greedy tokens after a reused beginning. It prints a line per model and ends with code 1 when one differs. A
model that we refuse or that transformers cannot compute is counted and named.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.families import Config, cases
from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES, Oracle, engine_of, greedy_tokens
from trtserve.errors import TrtserveError, UnsupportedModelError
from trtserve.specs import BuildSpec, ConvertSpec

BOUND = 2e-5
"""Largest difference of a token's logits: root mean square over the vocabulary ÷ standard deviation of all logits."""
LENGTHS = {"a": 700, "b": 250, "c": 60, "d": 5}
SCHEDULE = [{"a": 256}, {"a": 200, "b": 56}, {"a": 128, "b": 100, "c": 28}, {"c": 20, "d": 5}, {"a": 64, "b": 64}]
SCHEDULE += [{"a": 1, "b": 1, "c": 1}] * 4 + [{"a": 48, "b": 26, "c": 8}]
NEW_TOKENS = 6
_ORIGINAL = 64
SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 3.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 16.0, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"type": "yarn", "factor": 8.0, "attention_factor": 1.1, "truncate": False},
)
# Families that take any of these scalings.
_SCALED = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "exaone4", "cohere", "cohere2", "glm"),
        *("glm4", "seed_oss", "ernie4_5", "helium", "stablelm", "nemotron", "arcee", "jais2", "ministral"),
    }
)
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def variant(chance: random.Random, name: str, config: Config, changes: Config) -> Config:
    """Return random changes of a family's config.json."""
    made: Config = {"max_position_embeddings": 1024, "vocab_size": chance.choice((320, 323, 401)), **changes}
    if "num_key_value_heads" in config and not config["model_type"].startswith("gpt_oss"):
        heads, kv_heads = chance.choice(((4, 2), (4, 1), (4, 4), (8, 2)))
        made |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | changes
        made.setdefault("intermediate_size", chance.choice((96, 128, 200)))
        if config.get("head_dim"):
            made["hidden_size"] = chance.choice((64, 96, 128)) if config["model_type"] != "helium" else 16 * heads
        else:
            made["hidden_size"] = heads * chance.choice((8, 16, 24))
    if not any(key in changes or key in config for key in _PER_LAYER) and "num_hidden_layers" in config:
        made["num_hidden_layers"] = config["num_hidden_layers"] + chance.choice((0, 0, 1, 3))
    if "n_positions" in config:
        made["n_positions"] = 1024
    for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps"):
        if key in config:
            made[key] = chance.choice((1e-6, 1e-5, 1e-3))
    if name in _SCALED and "rope_scaling" not in changes and "rope_parameters" not in changes:
        scaling = chance.choice(SCALINGS)
        dynamic = scaling is not None and scaling.get("type") == "dynamic"
        more = {} if dynamic or scaling is None else {"original_max_position_embeddings": _ORIGINAL}
        made["rope_scaling"] = None if scaling is None else scaling | more
        made["rope_theta"] = chance.choice((1000.0, 10000.0, 500000.0))
    return made


class Difference(Exception):  # noqa: N818 - it is a finding
    """A model computes something else than transformers."""


def compare(folder: Path, name: str, changes: Config, seed: int) -> tuple[float, float]:
    """Return the largest difference on OpenVINO and on PyTorch. Raises Difference for another greedy token."""
    from trtserve.executor.openvino.paged_model import PagedModel
    from trtserve.executor.torch.model import load_model

    model = write_tiny_model(folder / "model", name, gain=1.0, seed=seed, **changes)
    plain = ConvertSpec(dtype="float32")
    builds = {kind: BuildSpec(max_seq_len=1024, **ENGINES[kind]) for kind in ("openvino", "torch")}
    engines = {kind: engine_of(model, folder / kind, plain, build) for kind, build in builds.items()}
    oracle, chance = Oracle(model), np.random.default_rng(seed)
    sequences = {key: chance.integers(3, 259, length).tolist() for key, length in LENGTHS.items()}
    theirs = {key: oracle.logits(ids) for key, ids in sequences.items()}

    def largest(made: Any) -> float:
        ours = PagedSteps(made, sequences).run(SCHEDULE)
        return max(
            float((np.sqrt(np.square(ours[key] - logits).mean(-1)) / logits.std()).max())
            for key, logits in theirs.items()
        )

    found = largest(PagedModel(engines["openvino"].path, threads=1)), largest(load_model(engines["torch"].path, None))
    # The second and third prompt begin as the first does.
    prompts = [sequences["b"][:140], sequences["b"][:130] + sequences["c"][:9], sequences["b"][:140]]
    wanted = [oracle.continuation(prompt, NEW_TOKENS) for prompt in prompts]
    answers = greedy_tokens(
        engines["openvino"].path,
        [(prompt, NEW_TOKENS) for prompt in prompts],
        max_num_tokens=64,
        enable_chunked_context=True,
    )
    if answers != wanted:
        raise Difference(f"greedy tokens {answers}, expected {wanted}")
    if max(found) > BOUND:
        raise Difference(f"logits differ by {found[0]:.1e} and {found[1]:.1e}")
    return found


def main() -> int:
    """Compare as many models as asked."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    asked = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    chance, ended, worst = random.Random(asked.seed), Counter[str](), list[float]()
    rows = [row for row in cases("logits") if not asked.families or row[0] in asked.families.split(",")]
    from tests.support.families import FAMILIES

    for number in range(asked.count):
        name, changes = rows[number % len(rows)]
        changes = variant(chance, name, FAMILIES[name].config, changes)
        with tempfile.TemporaryDirectory() as work:
            try:
                found = compare(Path(work), name, changes, seed=number)
            except UnsupportedModelError as refused:
                kind, text = "refused", refused.message
            except Difference as difference:
                kind, text = "DIFFERENT", str(difference)
            except (
                TrtserveError,
                ValueError,
                TypeError,
                KeyError,
                AssertionError,
                RuntimeError,
                AttributeError,
            ) as error:
                kind, text = "failed", f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
            else:
                kind, text = "equal", f"{found[0]:.1e} {found[1]:.1e}"
                worst.append(max(found))
        ended[kind] += 1
        sys.stdout.write(f"{kind} {name} {changes}: {text}\n")
        sys.stdout.flush()
    typical = float(np.median(worst)) if worst else 0.0
    sys.stdout.write(f"{dict(ended)}; typical {typical:.1e}, worst {max(worst, default=0.0):.1e}\n")
    return 1 if ended["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
