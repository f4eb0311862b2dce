"""Drafts from n-grams: what they gain where an answer repeats its prompt, and cost where it does not.

The model is a random Llama of 1.1 B parameters, one stream on two CPUs. Its answers are forced by a logits
post-processor: half of the 4-grams of a repeating answer stand in the prompt or earlier in the answer, as in a summary
that quotes; those of the other one never do. llama.cpp, without speculation, takes part when it is installed
(`pip install '.[llama-cpp]'`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import llama_cpp_side
from tests.benchmarks.bench_executor import KV_TOKENS, ExecutorSide, ended
from tests.benchmarks.bench_precision import KINDS, MODEL, llama_cpp, print_others, two_cpus
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table

PROMPT = 96
# Two passages of new tokens, each followed by a quotation: 35 of its 4-grams lie within the prompt.
NEW, QUOTED, PASSAGES = 32, 38, 2
DRAFT = 11
LLAMA_CPP = {"float16": 1.3, "int8": 1.5, "int4": 1.3}
PLAIN = 0.98

Text = tuple[list[int], list[int]]


def text(number: int, *, quoted: int) -> Text:
    """A random prompt, and an answer with quotations of `quoted` of its tokens."""
    random = np.random.default_rng(number)
    prompt = random.integers(3, SIZES[MODEL]["vocab_size"], PROMPT).tolist()
    answer: list[int] = []
    for _ in range(PASSAGES):
        answer += random.integers(3, SIZES[MODEL]["vocab_size"], NEW + QUOTED - quoted).tolist()
        begin = int(random.integers(0, PROMPT - quoted))
        answer += prompt[begin : begin + quoted]
    return prompt, answer


def known_ngrams(prompt: list[int], answer: list[int], size: int = 4) -> float:
    """How many of the answer's n-grams stood before."""
    tokens = prompt + answer
    seen: set[tuple[int, ...]] = set()
    known = 0
    for end in range(size, len(tokens) + 1):
        ngram = tuple(tokens[end - size : end])
        known += end > len(prompt) and ngram in seen
        seen.add(ngram)
    return known / len(answer)


class ForcedSide(ExecutorSide):
    """An executor whose answers are given."""

    def __init__(self, engine: Path) -> None:
        from trtserve.executor import api

        config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=KV_TOKENS))
        config.ngram_max_draft_len = DRAFT
        super().__init__(engine, config)

    def rate(self, prompt: list[int], answer: list[int], *, drafts: bool) -> float:
        """Tokens/s after the first; both with and without drafts in the executor that has measured its steps."""
        self.executor._loop._admission._drafts = drafts  # type: ignore[union-attr]

        def force(_: int, logits: Any, tokens: list[list[int]], *__: Any) -> None:
            logits[:] = -1.0
            logits[..., answer[len(tokens[0]) - len(prompt)]] = 1.0

        self._force = force
        return (len(answer) - 1) / self.seconds([prompt], len(answer))

    def requests(self, prompts: list[list[int]], new: int) -> list[Any]:
        """See `ExecutorSide.requests`."""
        return [self._api.Request(prompt, new, streaming=True, logits_post_processor=self._force) for prompt in prompts]


def _forced(side: ForcedSide, quoted: int, *, drafts: bool = True) -> Callable[[int], float]:
    return lambda number: side.rate(*text(number, quoted=quoted), drafts=drafts)


def compare_kind(work: Path, kind: str, *, pairs: int) -> tuple[list[Row], list[Row]]:
    """Compare with the executor without drafts, and with llama.cpp."""
    with ended(ForcedSide(make_engine(work, MODEL, quantize=KINDS[kind][0]))) as side:
        own = [
            compare(
                f"{kind}, {words}",
                _forced(side, quoted),
                _forced(side, quoted, drafts=False),
                pairs=pairs,
                target=target,
            )
            for words, quoted, target in (("no repetition", 0, PLAIN), ("half of it repeated", QUOTED, None))
        ]
        if not llama_cpp_side.is_installed():
            return own, []
        with llama_cpp(work, kind, 1) as other:

            def theirs(number: int) -> float:
                prompt, answer = text(number, quoted=QUOTED)
                return (len(answer) - 1) / other.seconds([prompt], len(answer))

            case = f"{kind} / {KINDS[kind][1]}, half of it repeated"
            row = compare(case, _forced(side, QUOTED), theirs, pairs=pairs, target=LLAMA_CPP[kind])
    return own, [row]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these weights; may be repeated")
    arguments = parser.parse_args()
    two_cpus()
    found = [compare_kind(arguments.work, kind, pairs=arguments.pairs) for kind in arguments.kind or KINDS]
    own, others = ([row for rows in side for row in rows] for side in zip(*found, strict=True))
    print(table(own, measured="With drafts, tokens/s", base="Without, tokens/s") + "\n")
    print_others(others)
    finish(arguments, "ngrams", [*own, *others], known_4grams=known_ngrams(*text(1, quoted=QUOTED)))


if __name__ == "__main__":
    main()
