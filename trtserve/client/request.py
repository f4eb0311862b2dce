"""Build the tensors of one request: only what was requested, under the names that the model declares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtserve.client.inputs import (
    RequestContext,
    Values,
    adapter_inputs,
    draft_inputs,
    input_tensor,
    prompt_table_inputs,
    read_text,
    vocab_size,
)
from trtserve.client.spec import REQUEST_OPTIONS, QuerySpec, is_direct, tensors_of
from trtserve.client.tensors import IDS_INPUT, TEXT_INPUT, VLLM_INPUT, ModelRequest, Tensor
from trtserve.client.tokenizer import require_tokenizer
from trtserve.errors import UsageError


def request_tensors(context: RequestContext) -> list[Tensor]:
    """Return the inputs of one request.

    Raises UsageError for an option, --input or output that the model does not have.
    """
    model = context.model
    options = _vllm_inputs(context) if VLLM_INPUT in model.inputs else _option_inputs(context)
    for name in context.spec.outputs:
        if name not in model.outputs:
            known = ", ".join(sorted(model.outputs))
            raise UsageError(f"The model {model.name!r} has no output {name!r}.", hint=f"Its outputs: {known}.")
    chosen = {**_prompt_inputs(context), **options}
    values = {**_default_inputs(context, chosen), **chosen}
    given: Values = {}
    for name, text in context.spec.inputs:
        if name in chosen or name in given:
            raise UsageError(f"The input {name!r} is given twice.", hint="Remove one of the two options.")
        given[name] = input_tensor(model, name, text, rows=context.prompts.rows)
    return list({**values, **given}.values())


def model_request(context: RequestContext, request_id: str) -> ModelRequest:
    """Return the request to the model with those inputs."""
    return ModelRequest(
        model=context.model,
        tensors=request_tensors(context),
        id=request_id,
        stream=context.streams,
        outputs=context.spec.outputs,
        timeout=context.spec.timeout,
    )


def _prompt_inputs(context: RequestContext) -> Values:
    model, prompts = context.model, context.prompts
    if prompts.texts:
        return {TEXT_INPUT: model.row_tensor(TEXT_INPUT, [[text] for text in prompts.texts])}
    longest = max(map(len, prompts.token_ids))
    rows = [[*ids, *[0] * (longest - len(ids))] for ids in prompts.token_ids]
    lengths = [[len(ids)] for ids in prompts.token_ids]
    return {
        IDS_INPUT: model.row_tensor(IDS_INPUT, rows),
        "input_lengths": model.row_tensor("input_lengths", lengths),
    }


def _option_inputs(context: RequestContext) -> Values:
    given = context.spec.options
    values: Values = {}
    for name, value in given.items():
        if is_direct(name):
            values |= context.scalar(value, *tensors_of(name))
    return {
        **values,
        **_word_list_inputs(context),
        **_bias_inputs(context),
        **_guide_inputs(context),
        **adapter_inputs(context),
        **prompt_table_inputs(context),
        **draft_inputs(context),
    }


# Option → parameter of vLLM.
_VLLM = {
    **{name: name for name in ("min_tokens", "temperature", "top_k", "top_p", "seed", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "max_tokens", "bad_words")},
    "stop_words": "stop",
    "num_return_sequences": "n",
    "lora": "lora_name",
}
_VLLM_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_VLLM_OWN = ("end_id", "return_log_probs", "guide", "guide_type", "return_num_input_tokens", "return_num_output_tokens")


VLLM_SEEDS = 2**63
"""Seeds of vLLM are below it."""


def vllm_guide(kind: str, text: str) -> str:
    """Return vLLM's `structured_outputs` for a guide, as NVIDIA's backend takes it."""
    return json.dumps({"json_object": True} if kind == "json" else {_VLLM_GUIDES[kind]: text})


def _vllm_inputs(context: RequestContext) -> Values:
    """Return the options as NVIDIA's backend `vllm` takes them; without top-k and top-p the answer is greedy, as in
    TensorRT-LLM."""
    options = {"max_tokens": context.spec.max_tokens, **context.spec.options}
    for name in options:
        if name not in _VLLM and name not in _VLLM_OWN:
            raise UsageError(
                f"{REQUEST_OPTIONS[name].flag} does not exist in NVIDIA's vllm backend, which serves "
                f"{context.model.name!r}.",
                hint="Import the model for the vllm runtime: trtserve import MODEL --runtime vllm.",
            )
    asked: dict[str, Any] = {_VLLM[name]: value for name, value in options.items() if name in _VLLM}
    if "seed" in asked:
        asked["seed"] %= VLLM_SEEDS
    if not {"top_k", "top_p"} & set(options):
        asked["temperature"] = 0
    if not options.get("top_p"):  # 0 is off
        asked.pop("top_p", None)
    if "end_id" in options:
        asked |= {"ignore_eos": True, "stop_token_ids": [options["end_id"]] if options["end_id"] >= 0 else []}
    values: Values = {}
    if options.get("return_log_probs"):
        asked["logprobs"] = 0
        values |= context.scalar(True, "return_logprobs") | context.scalar(True, "return_cumulative_logprob")
    if (text := _guide_text(context)) is not None:
        asked["structured_outputs"] = vllm_guide(options["guide_type"], text)
    if options.get("return_num_input_tokens"):
        values |= context.scalar(True, "return_num_input_tokens")
    return values | context.scalar(json.dumps(asked), VLLM_INPUT)


def _word_list_inputs(context: RequestContext) -> Values:
    options, prompts = context.spec.options, context.prompts
    ends = () if "end_id" in options else prompts.end_ids[1:]
    values: Values = {}
    for name, further in (("stop_words", ends), ("bad_words", ())):
        words = [word for word in options.get(name, ()) if word]
        if name not in context.model.inputs and context.model.has(f"{name}_list"):
            values |= _word_ids(context, name, words, further)
            continue
        if name == "stop_words":
            # The engine compares tokens, and " data" differs from "data": NVIDIA's preprocessing knows the word alone.
            words = [spelling for word in words for spelling in dict.fromkeys((word, f" {word.lstrip(' ')}"))]
            words += () if "end_id" in options else prompts.end_words
        if words:
            values |= context.list_input(words, name)
    return values


def _word_ids(context: RequestContext, name: str, words: Sequence[str], further: Sequence[int]) -> Values:
    """Return TensorRT-LLM's word list [2, n] of the spellings of words, and of further ids."""
    if not words and not further:
        return {}
    from trtserve.programs.preprocessing.word_lists import Spellings, word_list

    spelled: dict[str, list[list[int]]] = {"": [[token] for token in further]}
    if words:
        files = require_tokenizer(context.tokenizer, context.model, REQUEST_OPTIONS[name].flag)
        spellings = Spellings(lambda text: files.encode(text, special=False))
        spelled |= {word: spellings.of(word) for word in words}
    table = word_list([list(spelled)], spelled.__getitem__)[0]
    tensor = f"{name}_list"
    return {tensor: context.model.tensor(tensor, table, rows=context.prompts.rows)}


def _bias_inputs(context: RequestContext) -> Values:
    pairs = _bias_pairs(context.spec)
    if not pairs:
        return {}
    if "embedding_bias_words" in context.model.inputs or not context.model.has("embedding_bias"):
        words, weights = zip(*pairs, strict=True)
        return {
            **context.list_input(words, "embedding_bias_words"),
            **context.list_input(weights, "embedding_bias_weights"),
        }
    import numpy as np

    files = require_tokenizer(context.tokenizer, context.model, "--embedding-bias")
    # The engine expects a vector of its vocabulary's size, built as preprocessing builds it.
    size = vocab_size(context) or len(files.tokenizer)
    vector = np.zeros(size, dtype=np.float32)
    for word, weight in pairs:
        np.add.at(vector, files.encode(word, special=False), weight)
    return {"embedding_bias": context.model.tensor("embedding_bias", vector, rows=context.prompts.rows)}


def _bias_pairs(spec: QuerySpec) -> list[tuple[str, float]]:
    pairs = [_bias_pair(text) for text in spec.options.get("embedding_bias", ())]
    words = spec.options.get("embedding_bias_words", ())
    weights = spec.options.get("embedding_bias_weights", ())
    if len(words) != len(weights):
        raise UsageError(
            f"--embedding-bias-words was given {len(words)} times and --embedding-bias-weights {len(weights)} times;"
            " give one weight per word."
        )
    return [*pairs, *zip(words, weights, strict=True)]


def _bias_pair(text: str) -> tuple[str, float]:
    word, _, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = float("nan")
    if not word or value != value or value in (float("inf"), float("-inf")):
        raise UsageError(f"--embedding-bias is {text!r}; expected WORD=WEIGHT, such as cat=2.5.")
    REQUEST_OPTIONS["embedding_bias_weights"].check([value])
    return word, value


def _guide_inputs(context: RequestContext) -> Values:
    text = _guide_text(context)
    return {} if not text else context.scalar(text, *tensors_of("guide"))


def _guide_text(context: RequestContext) -> str | None:
    """Return the guide, "" for one that its type says alone, or None without any."""
    options = context.spec.options
    if "guide" in options and "guide_type" not in options:
        raise UsageError("--guide needs --guide-type: json_schema, regex or ebnf_grammar.")
    if "guide" not in options:
        return "" if options.get("guide_type") == "json" else None
    if options["guide_type"] == "json" and options["guide"]:
        raise UsageError(
            "--guide-type json allows any JSON and takes no --guide.",
            hint="For a schema: --guide-type json_schema --guide @schema.json",
        )
    text: str = options["guide"]
    return read_text(Path(text[1:]), "--guide") if text.startswith("@") else text


def _default_inputs(context: RequestContext, chosen: Values) -> Values:
    """Return what is always sent: the length limit, the response mode, and counts that cost nothing."""
    model, spec = context.model, context.spec
    values = {} if VLLM_INPUT in model.inputs else context.scalar(spec.max_tokens, *tensors_of("max_tokens"))
    switches = {
        model.first_input("stream", "streaming"): context.streams,
        "exclude_input_in_output": spec.exclude_input,
        "return_num_output_tokens": True,
        "return_finish_reason": True,
    }
    for name, value in switches.items():
        if name in model.inputs:
            values |= context.scalar(value, name)
    if context.prompts.end_ids and "end_id" not in chosen:
        values |= context.scalar(context.prompts.end_ids[0], "end_id")
    return values
