"""From the body of a request to the prompt and the tensors of engine requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from trtserve.client.request import VLLM_SEEDS, RequestContext, request_tensors, vllm_guide
from trtserve.client.spec import QuerySpec, tensors_of
from trtserve.client.tensors import IDS_INPUT, VLLM_INPUT, Tensor
from trtserve.client.tokenizer import NO_SYSTEM, PreparedPrompts, end_words, find_chat_template, text_to_send
from trtserve.errors import UsageError
from trtserve.gateway.openai.bodies import AllowedTools, ChatBody, Sampling
from trtserve.gateway.openai.encoding import Encoder
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.images import ImageSources
from trtserve.gateway.openai.schemas import bounded
from trtserve.gateway.openai.served import ServedModel
from trtserve.programs.preprocessing.word_lists import Encode, Spellings, word_list
from trtserve.programs.shared.lora_names import LoraNames

_UINT64 = 2**64
_NO_END = -1
_PROMPT = "return_prompt_log_probs"
# Values of 4 bytes in the response of the engine: 256 MiB.
_MOST_LOGITS = 2**26


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence to generate."""

    prompt: Prompt
    context: RequestContext
    tensors: dict[str, Tensor]
    max_tokens: int
    stops: tuple[str, ...] = ()
    """Strings that end the text, and that are not part of it."""
    adapter: str | None = None
    tops: int | None = None
    """Alternatives to each token whose log-probabilities are wanted, or None without log-probabilities."""
    echoes_log_probs: bool = False
    """Whether those of the prompt are wanted too."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""

    @property
    def streams(self) -> bool:
        """Whether the engine sends every token at once."""
        return self.context.streams

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are needed: each costs time with every token."""
        model = self.context.model
        wanted = ["output_ids", "sequence_length"] if "output_ids" in model.outputs else ["text_output"]
        wanted += [name for name in ("finish_reason", "num_input_tokens", "num_output_tokens") if name in model.outputs]
        if self.tops is not None:
            named = "num_top_log_probs" in self.tensors
            wanted += ["generation_logits" if self.tops and not named else "output_log_probs"]
            wanted += ["top_log_probs_ids", "top_log_probs"] if named else []
        if self.echoes_log_probs:
            names = ("prompt_log_probs", "prompt_top_log_probs_ids", "prompt_top_log_probs")
            wanted += names if _PROMPT in self.tensors else ["context_logits"]
        return tuple(wanted)


async def engine_requests(
    served: ServedModel,
    body: Sampling,
    prompt: Prompt,
    *,
    count: int,
    max_tokens: int,
    adapter: str | None,
    tops: int | None,
    echoes_log_probs: bool = False,
    repository: Path | None,
) -> list[EngineRequest]:
    """Return `count` requests for the same prompt, which differ in their seeds if they have any.

    Raises ApiError and UsageError for what the model cannot do.
    """
    options = _options(served, body, max_tokens, tops)
    named = echoes_log_probs and served.names_tops and served.model.has(_PROMPT)
    if echoes_log_probs and not named:
        _require_context_logits(served, len(prompt.ids) * count)
        options["return_context_logits"] = True
    spec = QuerySpec(
        token_ids=(prompt.ids,) if prompt.ids else (),
        prompts=() if prompt.ids else (prompt.text or "",),
        options=options,
        # A stop string may begin or end inside a token: only who reads along can end the request there.
        stream=body.stream or (bool(body.stops) and served.model.decoupled),
    )
    ends = served.require_tokenizer("A prompt").end_ids if prompt.ids else ()
    prompts = PreparedPrompts(token_ids=spec.token_ids, texts=spec.prompts, end_ids=ends)
    context = RequestContext(
        spec=spec, model=served.model, prompts=prompts, tokenizer=served.files, repository=repository
    )
    # The ids are an array once: the choice of a replica reads them too.
    tensors = {
        each.name: replace(each, values=np.array(prompt.ids, dtype=np.int32)) if each.name == IDS_INPUT else each
        for each in request_tensors(context)
    }
    in_json = served.model.has(VLLM_INPUT)
    if in_json:
        tensors |= _in_json(context, tensors, _vllm_words(body, untrained=prompt.untrained))
    else:
        words = {**await _stop_tensors(served, context, body), **await _bad_tensors(served, context, body)}
        tensors |= {**words, **_bias(served, context, body), **_guide(context, body, untrained=prompt.untrained)}
    if body.min_p and not in_json:
        if not served.model.has("min_p"):
            raise ApiError("min_p is not supported: the model's repository has no such input.", param="min_p")
        tensors |= context.scalar(body.min_p, "min_p")
    if named:
        tensors |= context.scalar(True, _PROMPT)
    if prompt.images:
        tensors |= {"images": served.model.tensor("images", prompt.images)}
    if tops and served.names_tops:
        tensors |= context.scalar(tops, "num_top_log_probs")
    if adapter is not None and served.adapters is not None:
        tensors |= adapter_tensors(served.adapters, context, adapter)
    request = EngineRequest(
        prompt=prompt,
        context=context,
        tensors=tensors,
        max_tokens=max_tokens,
        stops=tuple(body.stops),
        adapter=adapter,
        tops=tops,
        echoes_log_probs=echoes_log_probs,
        tokens_as_ids=body.return_tokens_as_token_ids,
    )
    if "seed" not in options:
        return [replace(request) for _ in range(count)]
    return [request, *(_with_seed(request, options["seed"] + number) for number in range(1, count))]


def with_adapter_weights(served: ServedModel, request: EngineRequest) -> EngineRequest:
    """Return the request with the weights of its adapter, which the engine does not have in its cache any more."""
    assert served.adapters is not None
    assert request.adapter is not None
    names = ("lora_weights", "lora_config")
    arrays = zip(names, served.adapters.tensors(request.adapter), strict=True)
    weights = {name: served.model.tensor(name, array[0]) for name, array in arrays}
    return replace(request, tensors={**request.tensors, **weights})


def _with_seed(request: EngineRequest, seed: int) -> EngineRequest:
    context = request.context
    if context.model.has(VLLM_INPUT):
        seeded = _in_json(context, request.tensors, {"seed": seed % VLLM_SEEDS})
    else:
        seeded = context.scalar(seed % _UINT64, *tensors_of("seed"))
    return replace(request, tensors={**request.tensors, **seeded})


def _in_json(context: RequestContext, tensors: Mapping[str, Tensor], words: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the JSON input of a model of NVIDIA's vllm backend with further parameters of vLLM."""
    return context.scalar(json.dumps({**json.loads(tensors[VLLM_INPUT].flat()[0]), **words}), VLLM_INPUT)


def _vllm_words(body: Sampling, *, untrained: bool) -> dict[str, Any]:
    """Return the keys of the body that `trtserve query` does not have as options, or has as others."""
    words = {
        "stop": list(body.stops),
        "bad_words": list(body.bad_words),
        "stop_token_ids": list(body.stop_token_ids),
        "logit_bias": dict(body.logit_bias or {}),
        "min_p": body.min_p,
    }
    found: dict[str, Any] = {name: value for name, value in words.items() if value}
    if body.guide is not None:
        kind, text = body.guide
        found["structured_outputs"] = vllm_guide(kind, bounded(text) if untrained and kind == "json_schema" else text)
    return found


def _options(served: ServedModel, body: Sampling, max_tokens: int, tops: int | None) -> dict[str, Any]:
    """Return options of `trtserve query`: the body's, else those of the model's generation_config.json, else OpenAI's.

    The engine's own default is greedy, and its seed is always the same.
    """
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    chosen = served.defaults | {name: value for name, value in given.items() if value is not None}
    chosen["top_k"] = max(0, chosen.get("top_k", 0))
    if chosen["temperature"] == 0 or chosen["top_p"] == 0:
        chosen = {"top_k": 1, **{name: chosen[name] for name in ("repetition_penalty",) if name in chosen}}
    for name in ("presence_penalty", "frequency_penalty", "min_tokens"):
        if value := getattr(body, name):
            chosen[name] = value
    if body.seed is not None:
        chosen["seed"] = body.seed % _UINT64
    elif not served.draws_without_seed:
        chosen["seed"] = secrets.randbits(63)
    if body.ignore_eos:
        chosen["end_id"] = _NO_END
    if tops is not None:
        chosen |= _log_prob_options(served, body, tops)
    if served.model.has("return_num_input_tokens"):
        chosen["return_num_input_tokens"] = True
    return {**chosen, "max_tokens": max_tokens}


def _log_prob_options(served: ServedModel, body: Sampling, tops: int) -> dict[str, bool]:
    if served.model.has(VLLM_INPUT):
        raise ApiError(
            f"logprobs are not available for {served.model.name!r}, which NVIDIA's vllm backend serves; they are when "
            "the model is imported with --runtime vllm.",
            param="logprobs",
        )
    if not tops or served.names_tops:
        return {"return_log_probs": True}
    if served.generation_logits is False:
        field, without = (
            ("top_logprobs", "logprobs without it")
            if "top_logprobs" in type(body).model_fields
            else ("logprobs", "logprobs 0")
        )
        raise ApiError(
            f"{field} {tops} needs the logits of the answer: import or build the model with "
            f"--gather-generation-logits. {without} works with every engine.",
            param=field,
        )
    return {"return_log_probs": True, "return_generation_logits": True}


def _require_context_logits(served: ServedModel, tokens: int) -> None:
    """Raise ApiError unless the engine returns the logits of this many prompt tokens."""
    what = "echo with logprobs, like prompt_logprobs, needs log-probabilities of the prompt"
    if not served.takes_ids:
        raise ApiError(f"{what}, and a model that takes token ids.", param="echo")
    if served.context_logits is False:
        raise ApiError(f"{what}: the engine must be built with --gather-context-logits.", param="echo")
    most = _MOST_LOGITS // (served.vocab_size or 1)
    if tokens > most:
        raise ApiError(
            f"{what}: the engine returns all logits of a prompt, which is allowed for {most} tokens (times n or "
            f"best_of); this request has {tokens}.",
            param="echo",
        )


async def _stop_tensors(served: ServedModel, context: RequestContext, body: Sampling) -> dict[str, Tensor]:
    """Return the words that end the answer in the engine; the text itself is cut at stop strings later."""
    if not served.takes_ids:
        if body.stop_token_ids:
            raise ApiError("stop_token_ids needs a model that takes token ids.", param="stop_token_ids")
        ends = end_words(served.files) if served.files and not body.ignore_eos else ()
        words = [*body.stops, *ends]
        return context.list_input(words, "stop_words") if words else {}
    others = () if body.ignore_eos else context.prompts.end_ids[1:]
    tokens = [[token] for token in dict.fromkeys([*body.stop_token_ids, *others])]
    if not tokens and not body.stops:
        return {}
    spelled = await _spelled(served, body.stops) if body.stops else {}
    table = word_list([["", *spelled]], lambda word: spelled[word] if word else tokens)
    return {"stop_words_list": context.model.tensor("stop_words_list", table[0])}


async def _bad_tensors(served: ServedModel, context: RequestContext, body: Sampling) -> dict[str, Tensor]:
    if not body.bad_words:
        return {}
    if not served.takes_ids:
        return context.list_input(body.bad_words, "bad_words")
    spelled = await _spelled(served, body.bad_words)
    return {
        "bad_words_list": context.model.tensor("bad_words_list", word_list([list(spelled)], spelled.__getitem__)[0])
    }


async def _spelled(served: ServedModel, words: Sequence[str]) -> dict[str, list[list[int]]]:
    assert served.encoder is not None

    def spell(encode: Encode) -> dict[str, list[list[int]]]:
        spellings = Spellings(encode)
        return {word: spellings.of(word) for word in words}

    return await served.encoder.run(spell)


def _bias(served: ServedModel, context: RequestContext, body: Sampling) -> dict[str, Tensor]:
    if not body.logit_bias:
        return {}
    size = served.vocab_size
    if not served.takes_ids or size is None:
        raise ApiError("logit_bias needs a model that takes token ids.", param="logit_bias")
    vector = np.zeros(size, dtype=np.float32)
    for key, bias in body.logit_bias.items():
        if int(key) >= size:
            raise ApiError(f"logit_bias has the token {key}; the vocabulary has {size}.", param="logit_bias")
        vector[int(key)] = bias
    return {"embedding_bias": context.model.tensor("embedding_bias", vector)}


def _guide(context: RequestContext, body: Sampling, *, untrained: bool) -> dict[str, Tensor]:
    """Return the guide. Not with the option of `query`: there a text that begins with @ names a file."""
    if body.guide is None:
        return {}
    kind, text = body.guide
    if untrained and kind == "json_schema":
        text = bounded(text)
    try:
        return {**context.scalar(kind, *tensors_of("guide_type")), **context.scalar(text, *tensors_of("guide"))}
    except UsageError:
        raise ApiError(
            "This model has no guided decoding, which response_format and the guided_ parameters need."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt."""

    text: str | None = None
    """Its text, or None for token ids of the client."""
    ids: tuple[int, ...] = ()
    """Its token ids, or empty where the server encodes the text."""
    chat: bool = False
    """Whether it is a conversation, whose answer begins without a space."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that stay in the text of the answer."""
    thinks: bool = False
    """Whether the answer begins inside a thought."""
    untrained: bool = False
    """Whether it is the last message of a conversation with a model that has no chat template."""
    images: tuple[bytes, ...] = ()
    """Files of the images that it has places for."""
    tokens: int | None = None
    """How many tokens it has, as far as that is known here."""


def _cut(served: ServedModel, body: Sampling, prompt: Prompt) -> Prompt:
    """Return what the client keeps of a prompt (`truncate_prompt_tokens`)."""
    if body.truncate_prompt_tokens is None:
        return prompt
    if not served.takes_ids:
        raise ApiError("truncate_prompt_tokens needs a model that takes token ids.", param="truncate_prompt_tokens")
    ids = tuple(body.kept_of(prompt.ids))
    return prompt if ids == prompt.ids else replace(prompt, text=None, ids=ids, tokens=len(ids))


def _shortened(served: ServedModel, body: Sampling, text: str) -> str:
    """Return the end of a text that has all tokens that the client keeps of it, or its beginning."""
    if body.truncate_prompt_tokens is None or served.max_seq_len is None or served.encoder is None:
        return text
    most = served.max_seq_len * served.encoder.longest_token
    return text[:most] if body.truncation_side == "right" else text[-most:]


async def completion_prompt(served: ServedModel, body: Sampling, prompt: str | list[int]) -> Prompt:
    """Return a prompt to continue."""
    if isinstance(prompt, str):
        prompt = _shortened(served, body, prompt)
        return _cut(served, body, await _text_prompt(served, prompt, special=served.adds_special))
    prompt = list(body.kept_of(prompt))
    served.require_room(prompt)
    if served.takes_ids:
        return Prompt(ids=tuple(prompt))
    # The model takes text: special tokens in it would be added twice.
    files = served.require_tokenizer("A prompt of token ids")
    return await _text_prompt(served, files.decode(prompt), special=served.adds_special)


async def chat_prompt(
    served: ServedModel, body: ChatBody, images: ImageSources, reserve: Callable[[int], None]
) -> Prompt:
    """Return the conversation in the model's chat template; the bytes of its images are reserved.

    A model without a template gets the last message alone: it continues texts and follows no conversation.
    """
    text = await chat_text(served, body)
    if text is None:
        prompt = await completion_prompt(served, body, body.messages[-1]["content"])
        return replace(prompt, chat=True, untrained=True)
    assert served.encoder is not None
    added = served.adds_special and not served.takes_ids
    sent = text
    if added:
        bos = served.require_tokenizer("A conversation").special_tokens().get("bos_token")
        sent = await _text_for_server(served.encoder, text, bos)
    return replace(
        _cut(served, body, await _text_prompt(served, sent, special=added)),
        chat=True,
        thinks=body.separates_thoughts and served.dialect.thinks(text),
        marks=served.mark_ids(served.dialect.marks(tools=bool(body.usable_tools), thoughts=body.separates_thoughts)),
        images=await images.load(body.image_urls, reserve),
    )


async def chat_text(served: ServedModel, body: ChatBody) -> str | None:
    """Return the conversation as the chat template renders it, or None for a model without one. Raises ApiError."""
    served.require_reading(body.image_urls)
    if body.image_urls and body.truncate_prompt_tokens is not None:
        raise ApiError("A conversation with images cannot be truncated.", param="truncate_prompt_tokens")
    files = served.require_tokenizer("A conversation")
    assert served.encoder is not None
    shown = body.tools if isinstance(body.tool_choice, AllowedTools) else body.usable_tools
    tools = [tool.model_dump(exclude_unset=True) for tool in shown]
    try:
        template = find_chat_template(files, tools=bool(tools))
    except UsageError as error:
        raise ApiError(error.message) from None
    if template is None:
        if body.image_urls:
            raise ApiError("The model has no chat template, which says where its images are.", param="messages")
        return None
    tokens = files.special_tokens()
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, BaseModel) else body.tool_choice
    variables = {**body.template_variables, **({"tools": tools, "tool_choice": choice} if tools else {})}
    try:
        render = partial(
            _rendered, served.encoder, template, tokens=tokens, variables=variables, parts=served.reads_images
        )
        text = await render(body)
        if not served.takes_system and (rest := _without_system(body)) and text == await render(rest):
            raise ApiError(f"{NO_SYSTEM} Write it into the question.", param="messages")
    except UsageError as error:
        raise ApiError(error.message, param="messages") from None
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ApiError(f"The model's chat template cannot render these messages: {error}", param="messages") from None
    if body.continue_final_message:
        text = _up_to_the_end_of(body.messages[-1]["content"], text)
    if body.guide is not None:
        text = served.dialect.without_thoughts(text)
    text = _shortened(served, body, text)
    served.require_room(text)
    return text


def _without_system(body: ChatBody) -> ChatBody | None:
    """Return the conversation without its system messages, or None for one that has none with a text, or no other."""
    rest = [each for each in body.messages if each["role"] != "system"]
    said = any(each["role"] == "system" and str(each["content"]).strip() for each in body.messages)
    return body.model_copy(update={"messages": rest}) if rest and said else None


async def _rendered(
    encoder: Encoder,
    template: str,
    body: ChatBody,
    tokens: Mapping[str, str],
    variables: Mapping[str, Any],
    *,
    parts: bool,
) -> str:
    """Return the conversation in a template; with `parts` as lists, unless it shows them bare."""
    if parts:
        messages = [_with_parts(message) for message in body.messages]
        text = await encoder.render(template, messages, tokens, variables)
        if not any(str(part) in text for message in messages for part in message["content"]):
            return text
        if body.image_urls:
            raise ApiError("The model's chat template has no places for images.", param="messages")
    return await encoder.render(template, body.messages, tokens, variables)


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with a list of parts, which templates with images expect; these know only where images are."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}] if content else []}
    return {**message, "content": [{"type": "image"} if "image_url" in part else part for part in content]}


def _up_to_the_end_of(content: str, text: str) -> str:
    """Return a rendered conversation without what follows its last message. Raises ApiError if it is not there."""
    content = content.strip()
    at = text.rfind(content)
    if at < 0:
        raise ApiError(
            "continue_final_message: the chat template does not show the last message as it is.",
            param="continue_final_message",
        )
    return text[: at + len(content)]


def adapter_tensors(adapters: LoraNames, context: RequestContext, name: str) -> Mapping[str, Tensor]:
    """Return what names an adapter to the model. ApiError: it was unloaded meanwhile."""
    try:
        task = adapters.task_id(name)
    except ValueError as error:
        raise ApiError(str(error), status=404, param="model", code="model_not_found") from None
    by_name = context.model.has("lora_name")
    return context.scalar(name, "lora_name") if by_name else context.scalar(task, "lora_task_id")


async def _text_for_server(encoder: Encoder, text: str, bos: str | None) -> str:
    """Return what a server that adds special tokens should get, for a rendered template that has its own."""
    candidates = (text, text.removeprefix(bos or ""))
    (ids,) = await encoder.encode([text], special=False)
    added = dict(zip(candidates, await encoder.encode(candidates, special=True), strict=True))
    return text_to_send(text, ids, bos, added.__getitem__) or text


async def _text_prompt(served: ServedModel, text: str, *, special: bool) -> Prompt:
    """Return a text with its token ids, or with their number where the server encodes it."""
    served.require_room(text)
    if served.encoder is None:
        return Prompt(text=text)
    (ids,) = await served.encoder.encode([text], special=special)
    return Prompt(text=text, ids=tuple(ids) if served.takes_ids else (), tokens=len(ids))
