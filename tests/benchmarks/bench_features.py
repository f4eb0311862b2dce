"""The gain of prefix reuse and external drafts: time to first token of a known prefix, tokens/s of right drafts.

The models are random Llamas of 135 M parameters (prefix) and 1.1 B parameters (drafts).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bench_executor import ExecutorSide
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table

PREFIX = 512
SUFFIX = 16
DRAFT = 4
PROMPT = 64
NEW = 100


def reuse_config() -> Any:
    """An executor's configuration with block reuse."""
    from trtserve.executor import api

    return api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=16 * 1024, enable_block_reuse=True))


def compare_prefix(work: Path, model: str, *, pairs: int) -> Row:
    """Time to first token of the second prompt with a prefix over that of the first one."""
    side = ExecutorSide(make_engine(work, model), reuse_config())
    vocabulary = SIZES[model]["vocab_size"]

    def first_token(seed: int, ending: int) -> float:
        prefix = np.random.default_rng(seed).integers(3, vocabulary, PREFIX).tolist()
        return side.seconds([[*prefix, *np.random.default_rng(ending).integers(3, vocabulary, SUFFIX).tolist()]], 1)

    def second(number: int) -> float:
        seed = 2 * number + 1
        first_token(seed, seed)
        return first_token(seed, seed + 1)

    def first(number: int) -> float:
        return first_token(2 * number + 2, 0)

    case = f"{model}, time to first token in s, known prefix of {PREFIX}"
    row = compare(case, second, first, pairs=pairs, target=0.25, at_most=True)
    side.executor.shutdown()
    return row


class DraftSide(ExecutorSide):
    """One stream, token by token, or in requests that bring the next tokens of a former answer as their draft."""

    def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        """The answer and tokens/s of it after the first token."""
        tokens: list[int] = []
        first = 0.0
        for response in self.responses([self._api.Request(prompt, new, streaming=True)]):
            first = first or time.perf_counter()
            tokens += response.result.output_token_ids[0]
        return tokens, (len(tokens) - 1) / (time.perf_counter() - first)

    def step(self, context: list[int], draft: list[int]) -> list[int]:
        """Return the tokens of one step with a draft: the accepted ones and one more."""
        request = self._api.Request(
            context,
            len(draft) + 1,
            streaming=False,
            external_draft_tokens_config=self._api.ExternalDraftTokensConfig(draft),
            output_config=self._api.OutputConfig(exclude_input_from_output=True),
        )
        return [token for response in self.responses([request]) for token in response.result.output_token_ids[0]]

    def verified(self, prompt: list[int], answer: list[int]) -> tuple[float, float]:
        """Tokens/s after the first of a stream of drafts out of `answer`, and how much of them was taken."""
        self.run([self._api.Request([*prompt, *answer[:1]], 1, streaming=True)])
        done, taken, rounds = 1, 0, 0
        begin = time.perf_counter()
        while done + DRAFT < len(answer):
            got = len(self.step([*prompt, *answer[:done]], answer[done : done + DRAFT]))
            done, taken, rounds = done + got, taken + got - 1, rounds + 1
        return (done - 1) / (time.perf_counter() - begin), taken / (rounds * DRAFT)


def compare_drafts(work: Path, model: str, *, pairs: int) -> tuple[Row, float]:
    """Tokens/s with drafts that are right over plain decoding, and the part of the drafts that was accepted."""
    engine = make_engine(work, model, name="engine-drafts", max_draft_len=DRAFT)
    side = DraftSide(engine, reuse_config())
    accepted: list[float] = []
    answers: dict[int, tuple[list[int], list[int]]] = {}

    def known(number: int) -> tuple[list[int], list[int]]:
        if number not in answers:
            prompt = np.random.default_rng(number).integers(3, SIZES[model]["vocab_size"], PROMPT).tolist()
            answers[number] = prompt, side.answer(prompt, NEW)[0]
        return answers[number]

    def drafted(number: int) -> float:
        rate, part = side.verified(*known(number))
        accepted.append(part)
        return rate

    def plain(number: int) -> float:
        return side.answer(known(number)[0], NEW)[1]

    case = f"{model}, tokens/s of 1 stream, {DRAFT} right draft tokens per step"
    row = compare(case, drafted, plain, pairs=pairs, target=2.5)
    side.executor.shutdown()
    return row, min(accepted)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prefix-model", choices=SIZES, default="llama-135m")
    parser.add_argument("--draft-model", choices=SIZES, default="llama-1b")
    arguments = parser.parse_args()
    prefix = compare_prefix(arguments.work, arguments.prefix_model, pairs=arguments.pairs)
    drafts, accepted = compare_drafts(arguments.work, arguments.draft_model, pairs=arguments.pairs)
    print(table([prefix, drafts]))
    print(f"Of the draft tokens at least {accepted:.0%} were accepted in every run.")
    finish(arguments, "features", [prefix, drafts], accepted=accepted)


if __name__ == "__main__":
    main()
