"""Train the demo model: from corpus.jsonl to a Hugging Face folder that knows its answers by heart.

The model is meant to give the same text on every engine, so it is trained far past the first perfect score, with noise
on the output of every projection. What is left then are wide margins between the right token and all others, which
survive 16-bit arithmetic and an 8-bit KV cache.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import nn
from torch.nn.functional import cross_entropy

from examples.demo_model.corpus import Pair, all_pairs, read_corpus
from examples.demo_model.evaluate import PROJECTIONS, exact_match, load, noisy_outputs

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]  # ids 0, 1 and 2, as in Llama's tokenizer
UNK, BOS, EOS = SPECIAL_TOKENS
BOS_ID, EOS_ID = 1, 2
IGNORED = -100

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 640,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 2048,
}
GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False}
SPECIAL_TOKENS_MAP = {"unk_token": UNK, "bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
TOKENIZER_CONFIG: dict[str, Any] = {
    **SPECIAL_TOKENS_MAP,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
    "padding_side": "left",
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how hard to train."""

    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    noise: float  # relative to the root mean square of what it is added to

    def rate_at(self, step: int) -> float:
        """Linear warm-up over the first twentieth, then linear to zero."""
        warm_up = max(1, self.steps // 20)
        return self.learning_rate * min((step + 1) / warm_up, (self.steps - step) / max(1, self.steps - warm_up))


# --- tokenizer --------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE that opens every sequence with BOS and can spell any UTF-8 text."""
    tokenizer = Tokenizer(BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


# --- batches ----------------------------------------------------------------------------------------------------------


def as_example(tokenizer: Tokenizer, question: str, completion: str) -> tuple[list[int], list[int]]:
    """Input ids and labels; only the answer and its EOS are learned."""
    prompt = tokenizer.encode(question).ids
    answer = [*tokenizer.encode(completion, add_special_tokens=False).ids, EOS_ID]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    """A rectangular tensor, filled up on the right, where causal attention never looks."""
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def batches(tokenizer: Tokenizer, pairs: list[Pair], schedule: Schedule) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless shuffled batches; half of the questions are as written, half in any of their spellings."""
    chance = random.Random(0)
    variants = [[as_example(tokenizer, text, pair.completion) for text in pair.spellings] for pair in pairs]
    while True:
        chance.shuffle(variants)
        for start in range(0, len(variants), schedule.batch_size):
            rows = variants[start : start + schedule.batch_size]
            chosen = [row[0] if chance.random() < 0.5 else chance.choice(row) for row in rows]
            ids, labels = zip(*chosen, strict=True)
            yield padded(list(ids), EOS_ID), padded(list(labels), IGNORED)


# --- training ---------------------------------------------------------------------------------------------------------


def new_model(device: str) -> nn.Module:
    """A freshly initialised Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**CONFIG)).float()
    return model.to(device).train()


def answer_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the answer tokens, each predicted from everything before it."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)


def train(model: nn.Module, examples: Iterator[tuple[torch.Tensor, torch.Tensor]], schedule: Schedule) -> None:
    """Minimise the loss under noise; prints it every hundred steps."""
    device = next(model.parameters()).device
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=schedule.weight_decay)
    started = time.monotonic()
    for step in range(schedule.steps):
        ids, labels = (tensor.to(device) for tensor in next(examples))
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        with autocast, noisy_outputs(model, PROJECTIONS, schedule.noise):
            loss = answer_loss(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


# --- export -----------------------------------------------------------------------------------------------------------


def rounded_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights rounded to bfloat16 but stored as float16: an engine of either type computes with the same ones."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    return {name: tensor.to(torch.bfloat16).to(torch.float16).cpu().contiguous() for name, tensor in state.items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(folder: Path, tokenizer: Tokenizer, model: nn.Module) -> None:
    """Write the folder by hand: its files then do not depend on the release of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(folder / "special_tokens_map.json", SPECIAL_TOKENS_MAP)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    (folder / "model.safetensors").write_bytes(save(rounded_weights(model), metadata={"format": "pt"}))


def report(folder: Path, pairs: list[Pair]) -> None:
    """Exact match of the exported folder, read back as anybody would."""
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = load(folder, dtype)
        share, misses = exact_match(model, tokenizer, pairs, batch_size=128)
        print(*misses[:5], sep="\n")
        print(f"{dtype}: {share:.2%} of {len(pairs)} questions answered word for word")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model and export it as a Hugging Face folder.")
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    schedule = Schedule(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        noise=arguments.noise,
    )
    pairs = all_pairs(read_corpus())
    tokenizer = train_tokenizer([text for pair in pairs for text in (*pair.spellings, pair.completion)])
    model = new_model(arguments.device)
    print(f"{len(pairs)} questions, {sum(weight.numel() for weight in model.parameters()):,} parameters")
    train(model, batches(tokenizer, pairs, schedule), schedule)
    export(arguments.folder, tokenizer, model)
    report(arguments.folder, pairs)


if __name__ == "__main__":
    main()
