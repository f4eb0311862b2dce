"""Every option of `trtserve query` that fills inputs of a model: one table, of which flags, checks and docs are made.

Names of the tensors: shared/reference of NVIDIA's five models. Where releases or models call one thing differently,
`tensors` has all names, the newest first; the first that the asked model declares is filled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.errors import UsageError

Kind = Literal["int", "float", "switch", "text", "texts", "floats", "file"]

LARGEST_INT32 = 2**31 - 1
LARGEST_UINT64 = 2**64 - 1

LENGTH = "Length and words"
SAMPLING = "Sampling"
SEQUENCES = "Sequences and beams"
RETURNED = "What is returned"
GUIDES = "Guided decoding"
ADAPTERS = "Adapters and prompt tables"
DRAFTS = "Speculative decoding"


@dataclass(frozen=True, kw_only=True)
class RequestOption:
    """One option: `name` is the flag's with underscores, `also` are further spellings (NVIDIA's clients').

    `direct`: the value is the tensor's; otherwise it is made into one (words to ids, files to arrays).
    """

    name: str
    kind: Kind
    tensors: tuple[str, ...]
    help: str
    panel: str
    also: tuple[str, ...] = ()
    lowest: float = -math.inf
    highest: float = math.inf
    direct: bool = True
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """UsageError for a number outside the range; NaN and infinity come through every parser."""
        values = value if self.kind == "floats" else (value,) if self.kind in ("int", "float") else ()
        for number in values:
            if not (math.isfinite(number) and self.lowest <= number <= self.highest):
                raise UsageError(f"{self.flag} is {number}; it must be {self._range()}.")

    def _range(self) -> str:
        if math.isinf(self.lowest) and math.isinf(self.highest):
            return "a finite number"
        if math.isinf(self.highest):
            return f"at least {self.lowest:g}"
        return f"{_plain(self.lowest)} … {_plain(self.highest)}"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def _count(
    name: str, tensors: tuple[str, ...], text: str, panel: str, *, lowest: int = 1, **more: Any
) -> RequestOption:
    return RequestOption(
        name=name, kind="int", tensors=tensors, help=text, panel=panel, lowest=lowest, highest=LARGEST_INT32, **more
    )


def _real(name: str, tensors: tuple[str, ...], text: str, panel: str = SAMPLING, **more: Any) -> RequestOption:
    return RequestOption(name=name, kind="float", tensors=tensors, help=text, panel=panel, **more)


def _switch(name: str, tensors: tuple[str, ...], text: str, panel: str = RETURNED, **more: Any) -> RequestOption:
    return RequestOption(name=name, kind="switch", tensors=tensors, help=text, panel=panel, **more)


def _made(name: str, kind: Kind, tensors: tuple[str, ...], text: str, panel: str, **more: Any) -> RequestOption:
    return RequestOption(name=name, kind=kind, tensors=tensors, help=text, panel=panel, direct=False, **more)


_OPTIONS = (
    _count(
        "max_tokens",
        ("max_tokens", "request_output_len"),
        "New tokens at most (256); the engine may allow fewer.",
        LENGTH,
        also=("--request-output-len", "--output-len", "-o"),
    ),
    _count(
        "min_tokens",
        ("min_tokens", "min_length"),
        "New tokens at least.",
        LENGTH,
        lowest=0,
        also=("--min-length",),
    ),
    _made(
        "stop_words",
        "texts",
        ("stop_words", "stop_words_list"),
        "End the answer after these tokens (a word, also inside a sentence); repeatable.",
        LENGTH,
    ),
    _made(
        "bad_words",
        "texts",
        ("bad_words", "bad_words_list"),
        "Never generate this text; repeatable.",
        LENGTH,
    ),
    _made(
        "embedding_bias",
        "texts",
        ("embedding_bias_words", "embedding_bias_weights", "embedding_bias"),
        "Add this weight to the logits of the word's tokens; repeatable.",
        LENGTH,
        metavar="WORD=WEIGHT",
    ),
    _made(
        "embedding_bias_words",
        "texts",
        ("embedding_bias_words",),
        "Words of a bias, as NVIDIA's client takes them; repeatable.",
        LENGTH,
    ),
    _made(
        "embedding_bias_weights",
        "floats",
        ("embedding_bias_weights",),
        "A weight for each of these words; repeatable.",
        LENGTH,
    ),
    _count("end_id", ("end_id",), "Token that ends the answer; -1: none.", LENGTH, lowest=-1),
    _count("pad_id", ("pad_id",), "Token that fills shorter rows of a batch.", LENGTH, lowest=-1),
    _real(
        "temperature",
        ("temperature",),
        "Sampling temperature; has an effect with --top-k or --top-p only.",
        lowest=0,
    ),
    _count("top_k", ("top_k", "runtime_top_k"), "Sample among the k likeliest tokens; 0: all.", SAMPLING, lowest=0),
    _real("top_p", ("top_p", "runtime_top_p"), "Sample within this probability mass; 0: off.", lowest=0, highest=1),
    _real("top_p_min", ("runtime_top_p_min",), "Least that decay leaves of --top-p.", lowest=0, highest=1),
    _real("top_p_decay", ("runtime_top_p_decay",), "Factor of --top-p after every token.", lowest=0, highest=1),
    _count(
        "top_p_reset_ids",
        ("runtime_top_p_reset_ids",),
        "Token after which --top-p has its first value again.",
        SAMPLING,
        lowest=0,
    ),
    RequestOption(
        name="seed",
        kind="int",
        tensors=("seed", "random_seed"),
        help="Seed; default 0: sampling is repeatable.",
        panel=SAMPLING,
        lowest=0,
        highest=LARGEST_UINT64,
        also=("--random-seed",),
    ),
    _real("repetition_penalty", ("repetition_penalty",), "Divide logits of tokens that were there; 1: off.", lowest=0),
    _real("presence_penalty", ("presence_penalty",), "Subtract this from logits of generated tokens."),
    _real("frequency_penalty", ("frequency_penalty",), "Subtract this for each time a token was generated."),
    _count("beam_width", ("beam_width",), "Beams of a beam search; the engine has a limit.", SEQUENCES, also=("-b",)),
    _real(
        "length_penalty",
        ("length_penalty", "len_penalty"),
        "Exponent of the length by which beams are ranked.",
        SEQUENCES,
        also=("--len-penalty",),
    ),
    _switch("early_stopping", ("early_stopping",), "End a beam search as soon as enough beams have ended.", SEQUENCES),
    _real(
        "beam_search_diversity_rate",
        ("beam_search_diversity_rate",),
        "Push beams apart by this much.",
        SEQUENCES,
        lowest=0,
    ),
    _count("num_return_sequences", ("num_return_sequences",), "Samples of one prompt.", SEQUENCES, also=("-n",)),
    _switch("return_log_probs", ("return_log_probs",), "Log-probabilities of the generated tokens."),
    _switch("return_context_logits", ("return_context_logits",), "Logits of the prompt's tokens."),
    _switch("return_generation_logits", ("return_generation_logits",), "Logits of the generated tokens."),
    _switch(
        "return_perf_metrics",
        ("return_perf_metrics", "return_kv_cache_reuse_stats"),
        "Times, KV cache blocks and draft acceptance of the request.",
        also=("--return-kv-cache-reuse-stats",),
    ),
    _switch("return_num_input_tokens", ("return_num_input_tokens",), "Count of the prompt's tokens."),
    _switch(
        "return_num_output_tokens",
        ("return_num_output_tokens",),
        "Count of the generated tokens (always asked for where there is such an input).",
    ),
    RequestOption(
        name="guide_type",
        kind="text",
        tensors=("guided_decoding_guide_type",),
        help="json, json_schema, regex, ebnf_grammar.",
        panel=GUIDES,
        also=("--guided-decoding-guide-type",),
    ),
    _made(
        "guide",
        "text",
        ("guided_decoding_guide",),
        "The schema, expression or grammar, or @FILE.",
        GUIDES,
        also=("--guided-decoding-guide",),
    ),
    _made(
        "lora",
        "text",
        ("lora_name", "lora_task_id", "lora_weights", "lora_config"),
        "Adapter of the repository, by its name.",
        ADAPTERS,
        metavar="NAME",
    ),
    _made(
        "lora_path",
        "file",
        ("lora_weights", "lora_config"),
        "Folder with model.lora_weights.npy and model.lora_config.npy.",
        ADAPTERS,
        metavar="DIR",
    ),
    RequestOption(
        name="lora_task_id",
        kind="int",
        tensors=("lora_task_id",),
        help="Number of the adapter; alone: it is in the server's cache.",
        panel=ADAPTERS,
        lowest=0,
        highest=LARGEST_UINT64,
    ),
    _made(
        "prompt_embedding_table_path",
        "file",
        ("prompt_embedding_table", "prompt_vocab_size"),
        "npy file of a p-tuned prompt; its axes: tasks, rows, hidden.",
        ADAPTERS,
        metavar="FILE",
    ),
    _made("prompt_task_id", "int", (), "Which task of the table; default: the first.", ADAPTERS, lowest=0),
    _made(
        "prompt_table_extra_id",
        "int",
        ("prompt_table_extra_id", "prompt_table_extra_ids"),
        "Number that tells prompt tables apart for KV cache reuse.",
        ADAPTERS,
        lowest=0,
        highest=LARGEST_UINT64,
        also=("--prompt_table_extra_id",),
    ),
    _made(
        "vocab_size",
        "int",
        (),
        "First id of the prompt table; default: the engine's vocabulary (core model only).",
        ADAPTERS,
        lowest=1,
        also=("--vocab_size",),
    ),
    _count(
        "num_draft_tokens", ("num_draft_tokens",), "Tokens that the draft model proposes per step.", DRAFTS, lowest=0
    ),
    _switch("use_draft_logits", ("use_draft_logits",), "Accept drafts by their logits.", DRAFTS),
    _made(
        "draft_tokens_csv",
        "file",
        ("draft_input_ids",),
        "Draft tokens of one step, as a CSV file of ids (core model only).",
        DRAFTS,
        metavar="FILE",
    ),
    _real(
        "draft_acceptance_threshold",
        ("draft_acceptance_threshold",),
        "Probability from which a draft token is accepted.",
        DRAFTS,
        lowest=0,
        highest=1,
    ),
    _made(
        "lookahead_config",
        "text",
        ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
        "Lookahead decoding: window, n-gram and verification set.",
        DRAFTS,
        also=("--lookahead_config",),
        metavar="[W,N,G]",
    ),
)

REQUEST_OPTIONS: Mapping[str, RequestOption] = {option.name: option for option in _OPTIONS}
