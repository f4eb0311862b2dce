"""Random requests with every feature of the executor, as values that can be printed and built again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.adapters import random_adapter
from trtserve.executor import api
from trtserve.executor.engine.shapes import LoraShape

VOCAB = 320
HIDDEN = 64
END_ID = 2
BEAMS = 4
TABLE_ROWS = 6
DRAFT = 4
MOST_TOKENS = 40
LORA_RANK = 4
# Three openings that share their first 40 tokens pair by pair, so that blocks are found, shared and copied.
_RANDOM = np.random.default_rng(7)
_OPENING = _RANDOM.integers(3, VOCAB, size=40).tolist()
PROMPTS = [
    _OPENING[:length] + _RANDOM.integers(3, VOCAB, size=more).tolist() for length in (0, 33, 40) for more in (3, 9, 30)
]
GUIDE = r"[a-f]{2}(0|1)+x"


@dataclass(frozen=True)
class Recipe:
    """One request: the number of its prompt, and its features as (name, value) pairs.

    `cancel_after` is the number of responses after which it is cancelled, None to let it run.
    """

    prompt: int
    max_tokens: int
    streaming: bool
    features: tuple[tuple[str, Any], ...] = ()
    cancel_after: int | None = field(default=None, compare=False)

    @property
    def beams(self) -> int:
        """Beam width."""
        return int(dict(self.features).get("beam_width", 1))


SAMPLING = {
    "greedy": {},
    "top_k": {"top_k": 30, "temperature": 1.4, "seed": 5},
    "top_p": {"top_p": 0.9, "seed": 11, "min_p": 0.01},
    "decay": {"top_p": 0.95, "top_p_decay": 0.8, "top_p_min": 0.2, "top_p_reset_ids": 17, "seed": 3},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bans": {"no_repeat_ngram_size": 2, "min_tokens": 6},
}


# Neither may change the answer, only when it is computed and which blocks are evicted first.
UNSEEN = st.fixed_dictionaries(
    {}, optional={"priority": st.sampled_from((0.0, 0.9)), "retention": st.sampled_from((1, 90))}
)


@st.composite
def recipes(draw: st.DrawFn, *, context_logits: bool) -> Recipe:
    """Any request that the executor must be able to mix with any other."""
    chosen: dict[str, Any] = {"sampling": draw(st.sampled_from(sorted(SAMPLING)))}
    kind = draw(st.sampled_from(("plain", "plain", "beams", "sequences", "draft", "guided")))
    if kind == "beams":
        chosen |= {"sampling": "bans", "beam_width": draw(st.integers(2, BEAMS))}
        chosen |= draw(
            st.sampled_from(({}, {"length_penalty": 1.0}, {"early_stopping": 0}, {"beam_search_diversity_rate": 0.3}))
        )
    elif kind == "sequences":
        chosen |= {"sampling": "top_k", "num_return_sequences": draw(st.integers(2, 3))}
    elif kind == "guided":
        chosen["guided"] = True
    elif kind == "draft" and not context_logits:
        chosen["draft"] = draw(st.integers(1, DRAFT))
    for name in ("log_probs", "generation_logits", "bias", "bad_words", "stop_words", "exclude_input"):
        if draw(st.integers(0, 3)) == 0:
            chosen[name] = True
    if context_logits and draw(st.integers(0, 3)) == 0:
        chosen["context_logits"] = True
    chosen |= draw(UNSEEN)
    special = draw(st.sampled_from((None, None, "table", "adapter 1", "adapter 2")))
    if special is not None:
        chosen[special.split()[0]] = special
    return Recipe(
        prompt=draw(st.integers(0, len(PROMPTS) - 1)),
        max_tokens=draw(st.integers(1, MOST_TOKENS)),
        streaming=draw(st.booleans()),
        features=tuple(sorted(chosen.items())),
        cancel_after=draw(st.sampled_from((None, None, None, 0, 1, 3))),
    )


def request_of(recipe: Recipe, lora: LoraShape) -> api.Request:
    """The request that a recipe describes; equal recipes give equal requests."""
    wanted = dict(recipe.features)
    tokens = list(PROMPTS[recipe.prompt])
    keywords: dict[str, Any] = {}
    if "table" in wanted:
        tokens[2:2] = [VOCAB + row for row in range(TABLE_ROWS)]
        table = np.random.default_rng(recipe.prompt).normal(0, 0.5, (TABLE_ROWS, HIDDEN)).astype(np.float32)
        extra = [recipe.prompt + 1 if token >= VOCAB else 0 for token in tokens]
        keywords["prompt_tuning_config"] = api.PromptTuningConfig(table, extra)
    if "adapter" in wanted:
        number = int(wanted["adapter"].split()[1])
        keywords["lora_config"] = api.LoraConfig(number, *random_adapter(lora, seed=number, rank=LORA_RANK))
    if "draft" in wanted:
        # Right and wrong guesses: the first token is always that of the request without a draft.
        drafts = np.random.default_rng(recipe.prompt + recipe.max_tokens).integers(3, VOCAB, size=wanted["draft"])
        keywords["external_draft_tokens_config"] = api.ExternalDraftTokensConfig(drafts.tolist())
    if "guided" in wanted:
        guide = api.GuidedDecodingParams
        keywords["guided_decoding_params"] = guide(guide.GuideType.REGEX, GUIDE)
    if "priority" in wanted:
        keywords["priority"] = wanted["priority"]
    if "retention" in wanted:
        ranges = [api.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, wanted["retention"])]
        keywords["kv_cache_retention_config"] = api.KvCacheRetentionConfig(ranges, wanted["retention"])
    if "bias" in wanted:
        keywords["embedding_bias"] = np.where(np.arange(VOCAB) % 3 == 0, -2.0, 0.5).astype(np.float32)
    if "bad_words" in wanted:
        keywords["bad_words"] = [[40], [41, 42], tokens[-1:]]
    if "stop_words" in wanted:
        keywords["stop_words"] = [[number] for number in range(50, 90)] + [[10, 11]]
    output = api.OutputConfig(
        return_log_probs="log_probs" in wanted,
        return_context_logits="context_logits" in wanted,
        return_generation_logits="generation_logits" in wanted,
        exclude_input_from_output="exclude_input" in wanted,
    )
    return api.Request(
        tokens,
        recipe.max_tokens,
        streaming=recipe.streaming,
        end_id=END_ID,
        sampling_config=_sampling(wanted),
        output_config=output,
        **keywords,
    )


def _sampling(wanted: dict[str, Any]) -> api.SamplingConfig:
    names = ("beam_width", "length_penalty", "early_stopping", "beam_search_diversity_rate", "num_return_sequences")
    keywords = {name: wanted[name] for name in names if name in wanted}
    if "beam_width" in keywords:
        keywords["num_return_sequences"] = keywords["beam_width"]
    return api.SamplingConfig(**SAMPLING[wanted["sampling"]], **keywords)  # type: ignore[arg-type]
