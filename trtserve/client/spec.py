"""What `trtserve query` asks: the prompts, the inputs of Triton's models that it fills, and how it is sent.

An option fills the input of its own name. Where releases and models name it differently, `tensors` lists the names,
newest first, and the first that the model declares is filled. An option that is not `direct` becomes the tensor's
value in `request.py`: words turn into ids, files into arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trtserve.errors import UsageError
from trtserve.specs.options import UINT64, Option, Spec, option, options_of, read_value

LENGTH = "Length and words"
_length = partial(option, panel=LENGTH)
SAMPLING = "Sampling"
_sampling = partial(option, panel=SAMPLING)
_sequences = partial(option, panel="Sequences and beams")
_returned = partial(option, panel="What is returned")
GUIDES = "Guided decoding"
_adapters = partial(option, panel="Adapters and prompt tables")
_drafts = partial(option, panel="Speculative decoding")

Guide = Literal["json", "json_schema", "regex", "ebnf_grammar"]


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Spec):
    """What one request asks for; options at their default are left to the server."""

    max_tokens: int | None = _length(
        None,
        "--max-tokens",
        "--request-output-len",
        "--output-len",
        "-o",
        tensors=("max_tokens", "request_output_len"),
        help="Most new tokens; the engine may allow fewer.",
        minimum=1,
        metavar="TOKENS",
        unset="256",
        common=True,
    )
    min_tokens: int | None = _length(
        None,
        "--min-tokens",
        "--min-length",
        tensors=("min_tokens", "min_length"),
        help="Fewest new tokens.",
        minimum=0,
        metavar="TOKENS",
    )
    stop_words: tuple[str, ...] = _length(
        (),
        tensors=("stop_words", "stop_words_list"),
        help="End the answer after this text; repeatable.",
        direct=False,
        metavar="TEXT",
        common=True,
    )
    bad_words: tuple[str, ...] = _length(
        (),
        tensors=("bad_words", "bad_words_list"),
        help="Never generate this text; repeatable.",
        direct=False,
        metavar="TEXT",
    )
    embedding_bias: tuple[str, ...] = _length(
        (),
        tensors=("embedding_bias_words", "embedding_bias_weights", "embedding_bias"),
        metavar="WORD=WEIGHT",
        help="Add WEIGHT to the logits of the word's tokens; repeatable.",
        direct=False,
    )
    embedding_bias_words: tuple[str, ...] = _length(
        (), help="Words to bias, as in NVIDIA's client; repeatable.", direct=False
    )
    embedding_bias_weights: tuple[float, ...] = _length(
        (), help="Weight of each of these words; repeatable.", direct=False
    )
    end_id: int | None = _length(None, help="Token id that ends the answer; -1: none.", minimum=-1, metavar="ID")
    pad_id: int | None = _length(None, help="Token id that pads shorter rows of a batch.", minimum=-1, metavar="ID")
    temperature: float | None = _sampling(
        None, help="Sampling temperature; with `query` also give --top-k or --top-p.", minimum=0, common=True
    )
    top_k: int | None = _sampling(
        None,
        tensors=("top_k", "runtime_top_k"),
        help="Sample from the k likeliest tokens; 0: all.",
        minimum=0,
        common=True,
    )
    top_p: float | None = _sampling(
        None,
        tensors=("top_p", "runtime_top_p"),
        help="Sample from the likeliest tokens with this total probability; 0: off.",
        minimum=0,
        maximum=1,
        common=True,
    )
    top_p_min: float | None = _sampling(
        None, tensors=("runtime_top_p_min",), help="Lowest value that decay may bring --top-p to.", minimum=0, maximum=1
    )
    top_p_decay: float | None = _sampling(
        None, tensors=("runtime_top_p_decay",), help="Multiply --top-p by this after every token.", minimum=0, maximum=1
    )
    top_p_reset_ids: int | None = _sampling(
        None,
        tensors=("runtime_top_p_reset_ids",),
        help="Token id that resets --top-p to its first value.",
        minimum=0,
        metavar="ID",
    )
    seed: int | None = _sampling(
        None,
        "--seed",
        "--random-seed",
        tensors=("seed", "random_seed"),
        help="Seed of sampling: the same seed gives the same answer, if no 8-bit KV cache is reused.",
        minimum=0,
        maximum=UINT64,
        unset="0",
        common=True,
    )
    repetition_penalty: float | None = _sampling(
        None, help="Divide the logits of tokens seen before by this; 1: off.", minimum=0
    )
    presence_penalty: float | None = _sampling(None, help="Subtract this from the logits of generated tokens.")
    frequency_penalty: float | None = _sampling(None, help="Subtract this once for each time a token was generated.")
    beam_width: int | None = _sequences(
        None, "--beam-width", "-b", help="Beams of a beam search; the engine sets a limit.", minimum=1
    )
    length_penalty: float | None = _sequences(
        None,
        "--length-penalty",
        "--len-penalty",
        tensors=("length_penalty", "len_penalty"),
        help="Rank beams by their probability divided by length to this power.",
    )
    early_stopping: bool = _sequences(False, help="End a beam search as soon as enough beams are complete.")
    beam_search_diversity_rate: float | None = _sequences(None, help="Penalty that makes beams differ.", minimum=0)
    num_return_sequences: int | None = _sequences(
        None, "--num-return-sequences", "-n", help="Samples per prompt.", minimum=1
    )
    return_log_probs: bool = _returned(False, help="Return log-probabilities of the generated tokens.")
    return_context_logits: bool = _returned(False, help="Return logits of the prompt.")
    return_generation_logits: bool = _returned(False, help="Return logits of the generated tokens.")
    return_perf_metrics: bool = _returned(
        False,
        "--return-perf-metrics",
        "--return-kv-cache-reuse-stats",
        tensors=("return_perf_metrics", "return_kv_cache_reuse_stats"),
        help="Return times, KV cache blocks and draft acceptance of the request.",
    )
    return_num_input_tokens: bool = _returned(False, help="Return the number of prompt tokens.")
    return_num_output_tokens: bool = _returned(
        False, help="Return the number of generated tokens; always requested if the model has this input."
    )
    guide_type: Guide | None = option(
        None,
        "--guide-type",
        "--guided-decoding-guide-type",
        tensors=("guided_decoding_guide_type",),
        help="What the answer must match.",
        panel=GUIDES,
    )
    guide: str | None = option(
        None,
        "--guide",
        "--guided-decoding-guide",
        tensors=("guided_decoding_guide",),
        help="Schema, expression or grammar, or @FILE.",
        direct=False,
        panel=GUIDES,
    )
    lora: str | None = _adapters(
        None,
        tensors=("lora_name", "lora_task_id", "lora_weights", "lora_config"),
        metavar="NAME",
        help="Name of an adapter in the repository.",
        direct=False,
    )
    lora_path: Path | None = _adapters(
        None,
        tensors=("lora_weights", "lora_config"),
        metavar="DIR",
        help="Folder with model.lora_weights.npy and model.lora_config.npy.",
        direct=False,
    )
    lora_task_id: int | None = _adapters(
        None,
        help="Number of the adapter; without --lora-path the server must have it cached.",
        minimum=0,
        maximum=UINT64,
    )
    prompt_embedding_table_path: Path | None = _adapters(
        None,
        tensors=("prompt_embedding_table", "prompt_vocab_size"),
        metavar="FILE",
        help=".npy file of a p-tuned prompt with the axes tasks, rows, hidden.",
        direct=False,
    )
    prompt_task_id: int | None = _adapters(
        None, tensors=(), help="Task of the table.", minimum=0, direct=False, unset="the first"
    )
    prompt_table_extra_id: int | None = _adapters(
        None,
        tensors=("prompt_table_extra_id", "prompt_table_extra_ids"),
        help="Number that keeps prompt tables apart for KV cache reuse.",
        minimum=0,
        maximum=UINT64,
        direct=False,
    )
    vocab_size: int | None = _adapters(
        None,
        tensors=(),
        help="First id of the prompt table (core model only).",
        minimum=1,
        direct=False,
        unset="the engine's vocabulary size",
    )
    num_draft_tokens: int | None = _drafts(None, help="Tokens that the draft model proposes per step.", minimum=0)
    use_draft_logits: bool = _drafts(False, help="Accept draft tokens by their logits.")
    draft_tokens_csv: Path | None = _drafts(
        None,
        tensors=("draft_input_ids",),
        metavar="FILE",
        help="CSV file with the ids of one step's draft tokens (core model only).",
        direct=False,
    )
    draft_acceptance_threshold: float | None = _drafts(
        None, help="Probability above which a draft token is accepted.", minimum=0, maximum=1
    )
    lookahead_config: str | None = _drafts(
        None,
        tensors=("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
        metavar="[W,N,G]",
        help="Lookahead decoding: window, n-gram and verification set.",
        direct=False,
    )

    def given(self) -> dict[str, Any]:
        """Return name → value of the options that were given."""
        values = {name: getattr(self, name) for name in REQUEST_OPTIONS}
        return {name: value for name, value in values.items() if value != REQUEST_OPTIONS[name].default}


REQUEST_OPTIONS: Mapping[str, Option] = options_of(RequestOptions)


def tensors_of(name: str) -> tuple[str, ...]:
    """Return the names of the inputs that the option `name` fills."""
    return tuple(REQUEST_OPTIONS[name].declared.extra.get("tensors", (name,)))


def option_value(name: str, text: str) -> Any:
    """Return the value that `text` gives the option `name` of a request. Raises UsageError for any other."""
    option = request_option(name)
    return option.value_of([text]) if option.repeatable else read_value(option.type, text, name)


def request_option(name: str) -> Option:
    """Return the option `name` of a request. Raises UsageError with the closest name when there is none."""
    if name not in REQUEST_OPTIONS:
        near = get_close_matches(name, REQUEST_OPTIONS, n=1)
        raise UsageError(f"There is no option {name!r}.", hint=f"Did you mean {near[0]!r}?" if near else None)
    return REQUEST_OPTIONS[name]


def is_direct(name: str) -> bool:
    """Return whether the value of the option `name` is the value of its input."""
    return bool(REQUEST_OPTIONS[name].declared.extra.get("direct", True))


DEFAULT_MAX_TOKENS = 256

PROMPTS = "Prompts"
_prompts = partial(option, panel=PROMPTS)
_ending = partial(option, panel="Ending a request")
CONNECTION = "Server and connection"

Protocol = Literal["grpc", "http"]
Compression = Literal["none", "deflate", "gzip"]


@dataclass(frozen=True, kw_only=True)
class QuerySpec(Spec):
    """One or several prompts, and how to ask them."""

    prompts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()  # prompts of a core model
    history: tuple[Mapping[str, str], ...] = ()  # earlier turns of a conversation: role and content
    options: Mapping[str, Any] = field(default_factory=dict)  # by the names of REQUEST_OPTIONS
    inputs: tuple[tuple[str, str], ...] = ()  # tensor name, value; the model's declaration gives the type
    model: str | None = option(
        None,
        "--model",
        "--model-name",
        "-m",
        metavar="MODEL",
        help="Triton model to ask, such as ensemble or tensorrt_llm_bls.",
        unset="the name under which the model is served",
        common=True,
    )
    stream: bool = option(
        False, "--stream", "--streaming", "-S", help="Print the answer as it is generated (one sequence).", common=True
    )
    system: str | None = option(None, help="System message of a chat model.", common=True)
    raw: bool = option(False, help="Send the prompt unchanged, without a chat template.", common=True)
    batch: bool = _prompts(False, "--batch", "--batch-inputs", help="Send all prompts as one request.")
    tokenizer: Path | None = _prompts(
        None,
        "--tokenizer",
        "--tokenizer-dir",
        metavar="DIR",
        help="Folder of the model's tokenizer.",
        unset="that of the server's repository or the engine's model",
    )
    exclude_input: bool = _prompts(
        True, "--exclude-input/--include-input", "--exclude-input-in-output", help="Leave the prompt out of the answer."
    )
    outputs: tuple[str, ...] = _returned(
        (), "--requested-outputs", metavar="NAME", help="Ask for these outputs only; repeatable."
    )
    stop_after_ms: int | None = _ending(
        None, metavar="MILLISECONDS", help="Stop the request after this time.", minimum=1
    )
    stop_via_cancel: bool = _ending(
        False, "--stop-via-request-cancel", help="Stop by cancelling the call, not by a stop request."
    )
    timeout: float = _ending(
        600.0,
        "--timeout",
        "--stream-timeout",
        "-t",
        metavar="SECONDS",
        help="Longest wait for the whole answer.",
        above=0,
    )
    request_id: str | None = _ending(None, metavar="ID", help="Request id.", unset="a unique one")
    protocol: Protocol = option(
        "grpc", "--protocol", "-i", help="http uses Triton's generate and infer endpoints.", panel=CONNECTION
    )
    compression: Compression | None = option(
        None, "--grpc-compression-algorithm", "-C", help="Compression of gRPC messages.", unset="none", panel=CONNECTION
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.options.items():
            request_option(name).check(value)
        if self.compression is not None and self.protocol == "http":
            raise UsageError(
                "--grpc-compression-algorithm needs --protocol grpc: Triton's generate endpoint takes none."
            )
        if self.stop_via_cancel and self.stop_after_ms is None:
            raise UsageError("--stop-via-request-cancel needs --stop-after-ms, the time after which to stop.")
        if self.prompts and self.token_ids:
            raise UsageError("Give prompts or --input-tokens-csv, not both.")
        if self.system is not None and self.raw:
            raise UsageError("--system needs the chat template, and --raw sends the prompt without it.")

    @property
    def max_tokens(self) -> int:
        """Most new tokens per answer."""
        return int(self.options.get("max_tokens", DEFAULT_MAX_TOKENS))

    @property
    def rows(self) -> int:
        """Number of prompts, given as text or as token ids."""
        return len(self.prompts) or len(self.token_ids)
