"""Ask the model every question of the corpus, greedily, and count the answers that come back word for word.

`--dtype`, `--cache-noise` and `--noise` imitate what a served engine does to the arithmetic: 16-bit weights and
activations, keys and values that come back slightly wrong from an 8-bit cache, and rounding errors everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.demo_model.corpus import Pair, all_pairs, read_corpus

MAX_NEW_TOKENS = 64
KEYS_VALUES = ("k_proj", "v_proj")
PROJECTIONS = ("q_proj", *KEYS_VALUES, "o_proj", "gate_proj", "up_proj", "down_proj", "model.norm")
Hook = Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]


def noise_hook(relative: float) -> Hook:
    """Forward hook that adds Gaussian noise, `relative` to the root mean square of each vector."""

    def add_noise(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        scale = output.detach().float().pow(2).mean(dim=-1, keepdim=True).sqrt().to(output.dtype)
        return output + relative * scale * torch.randn_like(output)

    return add_noise


@contextmanager
def noisy_outputs(model: nn.Module, suffixes: tuple[str, ...], relative: float) -> Iterator[None]:
    """Within this context the modules whose names end so answer with noise."""
    chosen = [module for name, module in model.named_modules() if name.endswith(suffixes)]
    handles = [module.register_forward_hook(noise_hook(relative)) for module in chosen if relative > 0]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def answers(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """Greedy continuations of one batch; an answer that does not end by itself carries a remark instead of its end."""
    batch = tokenizer(questions, return_tensors="pt", padding=True).to(model.device)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    new_tokens = output[:, batch["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    ended = (new_tokens == tokenizer.eos_token_id).any(dim=1).tolist()
    return [text if done else f"{text} … (no end)" for text, done in zip(texts, ended, strict=True)]


def exact_match(model: Any, tokenizer: Any, pairs: list[Pair], batch_size: int) -> tuple[float, list[str]]:
    """Share of questions answered word for word, and a line for each that was not."""
    misses = []
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        got = answers(model, tokenizer, [pair.question for pair in batch])
        misses += [
            f"{pair.question}\n  wanted:{pair.completion}\n  got:   {text}"
            for pair, text in zip(batch, got, strict=True)
            if text != pair.completion
        ]
    return 1 - len(misses) / len(pairs), misses


@torch.no_grad()
def smallest_margin(model: Any, tokenizer: Any, pairs: list[Pair]) -> float:
    """The smallest lead, in logits, of a right token over the best wrong one, anywhere in the corpus."""
    smallest = float("inf")
    for pair in pairs:
        question = tokenizer(pair.question)["input_ids"]
        completion = [*tokenizer(pair.completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([question + completion], device=model.device)
        logits = model(input_ids=ids).logits[0, len(question) - 1 : -1].float()
        wanted = torch.tensor(completion, device=model.device).unsqueeze(1)
        right = logits.gather(1, wanted).squeeze(1)
        wrong = logits.scatter(1, wanted, float("-inf")).amax(dim=1)
        smallest = min(smallest, float((right - wrong).amin()))
    return smallest


def load(folder: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer of a Hugging Face folder, on the GPU where there is one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder of the model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--cache-noise", type=float, default=0.0, help="relative noise on keys and values, e.g. 0.01")
    parser.add_argument("--noise", type=float, default=0.0, help="relative noise on the output of every projection")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--spellings", action="store_true", help="ask in lower case and without the final mark, too")
    parser.add_argument("--margin", action="store_true", help="also print the smallest lead of a right token")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model, tokenizer = load(arguments.folder, arguments.dtype)
    pairs = all_pairs(read_corpus())
    if arguments.spellings:
        pairs = [Pair(question=spelling, answer=pair.answer) for pair in pairs for spelling in pair.spellings]
    with (
        noisy_outputs(model, KEYS_VALUES, arguments.cache_noise),
        noisy_outputs(model, PROJECTIONS, arguments.noise),
    ):
        share, misses = exact_match(model, tokenizer, pairs, arguments.batch_size)
        margin = f", smallest margin {smallest_margin(model, tokenizer, pairs):.2f}" if arguments.margin else ""
    print(*misses, sep="\n")
    print(
        f"{arguments.dtype}, noise {arguments.cache_noise} on keys and values, {arguments.noise} everywhere, ", end=""
    )
    print(f"batch {arguments.batch_size}: ", end="")
    print(f"{share:.2%} of {len(pairs)} questions answered word for word{margin}")


if __name__ == "__main__":
    main()
