"""Triton model `preprocessing`: text in, token ids and word lists for the core model out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ..shared.arrays import MOST_BYTES, Tensors, decoded, words_of
from ..shared.encoding import Allowance, EncodingProcess
from ..shared.files import read_object
from ..shared.lora_names import LoraNames, name_of
from ..shared.parameters import ModelParameters, check_classes
from ..shared.run_folder import require_not_draining
from ..shared.tokenizer import encode, end_ids, pad_id, text_growth, tokenizer_of
from .word_lists import Spell, Spellings, embedding_bias, empty_word_list, word_list

_SLICE = 8  # times as many characters as tokens may fit are encoded first: encoding takes 300 bytes for each byte
# Seconds of computing in which a request is encoded before others wait no longer for it, and at most: for any, and for
# each byte of text.
_SOON, _LONGEST, _EACH_BYTE = 0.05, 1.0, 2e-6
_TENSORS = ("LORA_TASK_ID", "LORA_WEIGHTS", "LORA_CONFIG")


def adapter_outputs(inputs: Tensors, known: LoraNames, weights_type: str, batch: int) -> Tensors:
    """Return the OUT_LORA_… tensors, or empty for a request without an adapter.

    A named adapter sends weights and config with every request, because an ensemble cannot know whether the core model
    still has them cached. `weights_type` is the type of OUT_LORA_WEIGHTS in config.pbtxt. Raises ValueError for an
    unknown name, and for a name together with the client's own tensors.
    """
    outputs = {f"OUT_{name}": inputs[name] for name in _TENSORS if name in inputs}
    name = name_of(inputs.get("LORA_NAME"))
    if name is None:
        return outputs
    if outputs:
        raise ValueError("lora_name names an adapter; lora_task_id, lora_weights and lora_config cannot be given too.")
    weights, config = known.tensors(name)
    dtype = np.float32 if weights_type == "TYPE_FP32" else np.float16
    return {
        "OUT_LORA_TASK_ID": np.full((batch, 1), known.task_id(name), dtype=np.uint64),
        "OUT_LORA_WEIGHTS": np.repeat(weights.astype(dtype, copy=False), batch, axis=0),
        "OUT_LORA_CONFIG": np.repeat(config, batch, axis=0),
    }


Encode = Callable[[str, bool], list[int]]  # from a text to ids, with special tokens or without

# Input → the client's name for it, for error messages.
_VISION_INPUTS = {
    "IMAGE": "image_input",
    "IMAGE_BYTES": "image_bytes_input",
    "IMAGE_URL": "image_url_input",
    "IMAGES": "images",
    "VIDEO_BYTES": "video_bytes_input",
}


class TritonPythonModel:
    """Tokenizes each batch row of each request."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer named by the parameter `tokenizer_dir`."""
        config = json.loads(args["model_config"])
        repository = Path(args["model_repository"]).resolve().parent
        parameters = ModelParameters(config, repository, pb_utils.Logger.log_warn)
        try:
            check_classes(parameters, Path(args["model_repository"], args["model_version"]), pb_utils.Logger.log_info)
            self._adapters = LoraNames(repository, parameters.text("lora_table") or "lora.json")
        except ValueError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        try:
            engine = _engine_config(parameters.path("gpt_model_path"))
        except ValueError as error:
            raise pb_utils.TritonModelException(f"The engine's configuration cannot be read: {error}.") from error
        try:
            self._tokenizer, folder = tokenizer_of(parameters)
        except ValueError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self._slice = max(1, _SLICE // text_growth(folder))
        self._add_special_tokens = parameters.choice("add_special_tokens", default=True)
        self._end_id, *self._more_ends = end_ids(self._tokenizer, folder) or [-1]
        self._pad_id = pad_id(self._tokenizer, self._end_id)
        self._spellings = Spellings(lambda word: self._encode(word, False))
        self._vocab_size = int(engine.get("pretrained_config", {}).get("vocab_size") or len(self._tokenizer))
        self._most_tokens: int | None = engine.get("build_config", {}).get("max_seq_len")
        longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        self._most_bytes = MOST_BYTES if self._most_tokens is None else self._most_tokens * longest
        self._outputs = {output["name"]: output["data_type"] for output in config["output"]}
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        described = "" if backend is None else backend.to_str()
        # An expression can take hours for a short text. Other tokenizers take milliseconds, and no process.
        self._lanes = [_Lane(described), _Lane(described)] if '"Regex"' in described else []
        for lane in self._lanes[:1]:
            lane.process.encode([], special=False, seconds=_LONGEST)  # it starts now, not with the first request

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each request; one that fails does not affect the others."""
        if not self._lanes:
            return [self._answer(request, self._encode) for request in requests]
        for request in requests:
            self._lanes[0].thread.submit(self._answer_soon, request, request.get_response_sender())
        return None

    def finalize(self) -> None:
        """End the processes that encode."""
        for lane in self._lanes:
            lane.thread.shutdown(wait=False, cancel_futures=True)
            lane.process.close()

    def _answer_soon(self, request: Any, sender: Any) -> None:
        try:
            response = self._answer(request, _allowed(self._lanes[0], _SOON))
        except TimeoutError:  # others are answered first
            self._lanes[1].thread.submit(self._answer_late, request, sender)
        else:
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer_late(self, request: Any, sender: Any) -> None:
        texts = next(tensor.as_numpy() for tensor in request.inputs() if tensor.name() == "QUERY")
        seconds = _LONGEST + _EACH_BYTE * sum(map(len, texts.reshape(-1)))
        try:
            response = self._answer(request, _allowed(self._lanes[1], seconds))
        except TimeoutError as error:
            response = _failed(f"The tokenizer cannot encode this text: {error}.", pb_utils.TritonError.INVALID_ARG)
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any, encode: Encode) -> Any:
        """Return the response. Raises TimeoutError when `encode` does."""
        try:
            require_not_draining()
        except ValueError as error:
            return _failed(str(error), pb_utils.TritonError.UNAVAILABLE)
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            outputs = self._process(inputs, encode)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - a request without an answer would wait for ever
            return _failed(str(error), pb_utils.TritonError.INVALID_ARG)
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items() if name in self._outputs]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _encode(self, text: str, special: bool) -> list[int]:
        return encode(self._tokenizer, text, special=special)

    def _process(self, inputs: Tensors, encode: Encode | None = None) -> Tensors:
        encode = encode or self._encode
        for name, client_name in _VISION_INPUTS.items():
            if name in inputs and inputs[name].size:
                raise ValueError(
                    f"{client_name} was given, but this repository serves a text model without vision parts."
                )
        prompts = self._prompts(inputs, "QUERY", "text_input")
        batch = len(prompts)
        end_ids = _per_row(inputs, "END_ID", self._end_id, batch)
        pad_ids = _per_row(inputs, "PAD_ID", self._pad_id, batch)
        token_ids = [self._encode_prompt(prompt, encode) for prompt in prompts]
        spell = (self._spellings if encode == self._encode else Spellings(lambda word: encode(word, False))).of
        outputs = {
            "INPUT_ID": _padded(token_ids, pad_ids),
            "REQUEST_INPUT_LEN": _lengths(token_ids),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"].astype(np.int32, copy=False),
            "BAD_WORDS_IDS": self._words(inputs, "BAD_WORDS_DICT", "bad_words", batch, spell),
            "STOP_WORDS_IDS": self._stop_words(inputs, batch, spell),
            "EMBEDDING_BIAS": self._bias(inputs, batch, encode),
            "OUT_END_ID": end_ids,
            "OUT_PAD_ID": pad_ids,
        }
        token_ids = [[int(pad)] for pad in pad_ids[:, 0]]
        if "DECODER_QUERY" in inputs:
            texts = self._prompts(inputs, "DECODER_QUERY", "decoder_text_input")
            token_ids = [
                self._encode_prompt(text, encode) if text else pad for text, pad in zip(texts, token_ids, strict=True)
            ]
        outputs.update(
            {"DECODER_INPUT_ID": _padded(token_ids, pad_ids), "REQUEST_DECODER_INPUT_LEN": _lengths(token_ids)}
        )
        if "OUT_LORA_TASK_ID" in self._outputs:
            outputs.update(adapter_outputs(inputs, self._adapters, self._outputs["OUT_LORA_WEIGHTS"], batch))
        if "PROMPT_EMBEDDING_TABLE" in inputs:
            outputs["OUT_PROMPT_EMBEDDING_TABLE"] = inputs["PROMPT_EMBEDDING_TABLE"]
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            extra = inputs["PROMPT_TABLE_EXTRA_ID"].reshape(-1, 1)
            rows = np.where(outputs["INPUT_ID"] >= self._vocab_size, extra, 0)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = rows.astype(np.uint64)
        return outputs

    def _prompts(self, inputs: Tensors, name: str, client_name: str) -> list[str]:
        """Return one text per row. Raises ValueError for one that is certainly too long, before any work on it."""
        longest = max((len(text) for text in inputs[name].reshape(-1)), default=0)
        if longest > self._most_bytes:
            tokens = "" if self._most_tokens is None else f", for {self._most_tokens} tokens"
            raise ValueError(
                f"{client_name} has {longest} bytes, which exceeds maximum input length: at most {self._most_bytes} "
                f"bytes are allowed{tokens}."
            )
        return [row[0] for row in _texts(inputs, name, client_name)]

    def _encode_prompt(self, text: str, encode: Encode) -> list[int]:
        if self._most_tokens is not None:
            self._require_room(text, self._most_tokens, encode)
        ids = encode(text, self._add_special_tokens)
        if not ids:
            raise ValueError("text_input has no tokens; the prompt must not be empty.")
        return ids

    def _require_room(self, text: str, most: int, encode: Encode) -> None:
        """Encode longer and longer parts of a long text. Raises ValueError when one has too many tokens already."""
        size = self._slice * most
        while size < len(text):
            found = len(encode(text[:size], False))
            if found > most + 1:  # the cut may have split a token
                raise ValueError(
                    f"Prompt length exceeds maximum input length ({most}): the first {size} of its {len(text)} "
                    f"characters have {found} tokens."
                )
            size *= 2

    def _words(self, inputs: Tensors, name: str, client_name: str, batch: int, spell: Spell) -> NDArray[Any]:
        if name not in inputs or inputs[name].size == 0:
            return empty_word_list(batch)
        return word_list(_word_rows(inputs, name, client_name), spell)

    def _stop_words(self, inputs: Tensors, batch: int, spell: Spell) -> NDArray[Any]:
        """Return the client's stop words, and the model's further end ids unless the client chose its own end."""
        if "END_ID" in inputs or not self._more_ends:
            return self._words(inputs, "STOP_WORDS_DICT", "stop_words", batch, spell)
        rows: Sequence[Sequence[str]] = [[]] * batch
        if "STOP_WORDS_DICT" in inputs and inputs["STOP_WORDS_DICT"].size:
            rows = _word_rows(inputs, "STOP_WORDS_DICT", "stop_words")
        ends = [[end] for end in self._more_ends]
        return word_list([["", *filter(None, row)] for row in rows], lambda word: spell(word) if word else ends)

    def _bias(self, inputs: Tensors, batch: int, encode: Encode) -> NDArray[Any]:
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.zeros((batch, 0), dtype=np.float32)
        if words is None or weights is None:
            raise ValueError("embedding_bias_words and embedding_bias_weights must be given together.")
        texts = _word_rows(inputs, "EMBEDDING_BIAS_WORDS", "embedding_bias_words")
        return embedding_bias(texts, weights, lambda word: encode(word, False), self._vocab_size)


class _Lane:
    """A thread, and the process in which it encodes."""

    def __init__(self, tokenizer: str) -> None:
        self.process = EncodingProcess(tokenizer)
        self.thread = ThreadPoolExecutor(1, "encoder")


def _allowed(lane: _Lane, seconds: float) -> Encode:
    allowance = Allowance(lane.process, seconds)

    def allowed(text: str, special: bool) -> list[int]:
        try:
            return allowance.encode([text], special=special)[0]
        except ValueError as error:
            raise ValueError(f"The tokenizer cannot encode this text: {error}.") from None

    return allowed


def _failed(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))


def _engine_config(engine: Path | None) -> dict[str, Any]:
    """Return the engine's config: its vocabulary may exceed the tokenizer's. Empty where the engine is not known."""
    return {} if engine is None else read_object(engine / "config.json")


def _word_rows(inputs: Tensors, name: str, client_name: str) -> list[list[str]]:
    return [words_of(row, client_name) for row in inputs[name]]


def _texts(inputs: Tensors, name: str, client_name: str) -> list[list[str]]:
    return [[decoded(item, client_name) for item in row.reshape(-1)] for row in inputs[name]]


def _per_row(inputs: Tensors, name: str, default: int, batch: int) -> NDArray[Any]:
    if name not in inputs:
        return np.full((batch, 1), default, dtype=np.int32)
    return inputs[name].reshape(batch, 1).astype(np.int32, copy=False)


def _padded(rows: list[list[int]], pad_ids: NDArray[Any]) -> NDArray[Any]:
    result = np.repeat(pad_ids.astype(np.int32), max(map(len, rows)), axis=1)
    for index, ids in enumerate(rows):
        result[index, : len(ids)] = ids
    return result


def _lengths(rows: list[list[int]]) -> NDArray[Any]:
    return np.asarray([[len(ids)] for ids in rows], dtype=np.int32)
