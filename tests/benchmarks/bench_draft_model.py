"""A draft model in front of a target, through the BLS model of one Triton server, and the target alone.

The target is a random Llama of 1.1 B parameters with int8 weights. The draft is its first layer with its embeddings and
a disturbed output matrix: about four of five tokens that it proposes are those of the target.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.benchmarks.engines import make_engine, make_repository
from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table
from tests.support.model_server import ModelServer, integers, serving, texts

MODEL = "llama-1b"
NAME = "drafted"
NEW = 96
DRAFT = 4
NOISE = 0.1
"""Of the output matrix, relative to its own spread: see the acceptance that the benchmark prints."""
TARGET = 1.8


def _draft_model(target: Path, folder: Path) -> Path:
    """The first layer of the target, with a disturbed output matrix."""
    from tests.support.tiny_models import read_safetensors, write_safetensors

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(target / name, folder)
    tensors = read_safetensors(target / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if ".layers." not in name or ".layers.0." in name}
    head = kept["lm_head.weight"].astype(np.float32)
    noise = np.random.default_rng(1).standard_normal(head.shape, dtype=np.float32)
    kept["lm_head.weight"] = (head + NOISE * head.std() * noise).astype(np.float16)
    write_safetensors(folder / "model.safetensors", kept)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    return folder


@contextmanager
def server(work: Path) -> Iterator[ModelServer]:
    """Target and draft behind Triton."""
    from tests.support.stages import build_engine, convert_model
    from trtserve.artifacts import Model
    from trtserve.specs import BuildSpec, ConvertSpec

    target = make_engine(work, MODEL, name="engine-int8-drafts", quantize="int8", max_draft_len=DRAFT)
    root = work / "draft"
    model = _draft_model(work / MODEL / "model", root / "model")
    checkpoint = convert_model(Model(path=model), ConvertSpec(quantize="int8"), out=root / "checkpoint")
    spec = BuildSpec(max_batch_size=8, max_seq_len=2048, runtime="openvino")
    draft = build_engine(checkpoint, spec, out=root / "engine").path
    settings = {"name": NAME, "max_tokens_in_paged_kv_cache": 4096, "enable_kv_cache_reuse": True}
    repository = make_repository(target, work / MODEL / "model", root / "repository", draft=draft, **settings)
    with serving(repository, root / "server") as ready:
        yield ready


def measure(work: Path, *, pairs: int) -> tuple[Row, float]:
    """Measure both on the same prompts; also returns how much of the drafts was accepted."""
    accepted: list[float] = []
    with server(work) as ready:

        def rate(number: int, drafts: int) -> float:
            prompt = "".join(map(chr, np.random.default_rng(number).integers(97, 123, 60)))
            tensors = {"text_input": texts(prompt), "max_tokens": integers(NEW), "end_id": integers(-1)}
            if drafts:
                wanted = {"num_draft_tokens": integers(drafts), "return_perf_metrics": np.array([[True]])}
                tensors = tensors | wanted
            begin = time.perf_counter()
            with ready.stream() as stream:
                (answer,) = stream.all(NAME, tensors)
            seconds = time.perf_counter() - begin
            if drafts:
                accepted.append(float(answer["acceptance_rate"].item()))
            return NEW / seconds

        row = compare(
            f"1.1 B int8, a draft of one layer, {DRAFT} tokens, through BLS",
            lambda number: rate(number, DRAFT),
            lambda number: rate(number, 0),
            pairs=pairs,
            target=TARGET,
        )
    return row, float(np.median(accepted))


def agreement(accepted: float, draft: int = DRAFT) -> float:
    """How often one token agrees, if of `draft` tokens in a row this part is right up to the first wrong one."""
    rates = np.linspace(0, 1, 1001)
    parts = sum(rates**count for count in range(1, draft + 1)) / draft
    return float(rates[np.searchsorted(parts, accepted)])


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    row, accepted = measure(arguments.work, pairs=arguments.pairs)
    print(table([row], measured="With draft, tokens/s", base="Target alone, tokens/s"))
    print(f"{accepted:.0%} of the draft tokens were accepted: each agreed in {agreement(accepted):.0%} of the cases.")
    finish(arguments, "draft_model", [row], accepted=accepted)


if __name__ == "__main__":
    main()
