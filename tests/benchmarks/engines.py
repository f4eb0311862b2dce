"""Engines of random Llamas for the benchmarks, made once in the work folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtserve.specs import Quantization

SIZES: dict[str, dict[str, Any]] = {
    "llama-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    # The vocabulary of its tokenizer, so that each token is a text.
    "llama-bytes": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 259,
        "max_position_embeddings": 2048,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
}
MAX_NUM_TOKENS = 2048
# How strong the layers are: drafts are verified with the larger model, so its best token must be clearly the best.
_GAINS = {"llama-135m": 2.0, "llama-bytes": 2.0, "llama-1b": 0.05}


def make_engine(
    work: Path,
    model: str = "llama-135m",
    *,
    name: str | None = None,
    quantize: Quantization = "none",
    **features: Any,
) -> Path:
    """The folder of the engine `name` of a random float16 `model`; `features` are fields of BuildSpec."""
    from tests.support.stages import build_engine, convert_model
    from tests.support.tiny_models import write_tiny_model
    from trtserve.artifacts import Model
    from trtserve.specs import BuildSpec, ConvertSpec

    folder = work / model
    if not (folder / "model" / "config.json").exists():
        write_tiny_model(folder / "model", "llama", dtype="float16", gain=_GAINS[model], **SIZES[model])
    kind = "" if quantize == "none" else f"-{quantize}"
    converted = folder / f"checkpoint{kind}"
    checkpoint = convert_model(Model(path=folder / "model"), ConvertSpec(quantize=quantize), out=converted)
    limits = {"max_batch_size": 8, "max_seq_len": 2048, "max_num_tokens": MAX_NUM_TOKENS}
    spec = BuildSpec(**{**limits, **features, "runtime": "openvino"})
    return build_engine(checkpoint, spec, out=folder / (name or f"engine{kind}")).path


def make_repository(engine: Path, model: Path, out: Path, *, draft: Path | None = None, **settings: Any) -> Path:
    """The repository of an engine and its `model`, without drafts from n-grams; `settings`: of RepositorySpec."""
    from trtserve.artifacts import Engine, load_artifact
    from trtserve.repository.assembling import plan_repository
    from trtserve.repository.publishing import assemble_repository
    from trtserve.specs import RepositorySpec

    def loaded(folder: Path) -> Engine:
        return load_artifact(Engine, folder)

    spec = RepositorySpec(ngram_max_draft_len=0, **settings)
    drafting = None if draft is None else loaded(draft)
    return assemble_repository(plan_repository(loaded(engine), model, spec, draft=drafting, out=out)).path
