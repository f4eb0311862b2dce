"""What a request is built from, and its tensors: only what was asked for, under the names that the model declares.

`--input NAME=VALUE`, LoRA adapters, prompt embedding tables and draft tokens come from texts, files and the repository.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from trtserve import files
from trtserve.client.spec import REQUEST_OPTIONS, QuerySpec, is_direct, tensors_of
from trtserve.client.tensors import (
    IDS_INPUT,
    TEXT_INPUT,
    VLLM_INPUT,
    ModelDescription,
    ModelRequest,
    Tensor,
    TensorDescription,
    numpy_type,
)
from trtserve.client.tokenizer import PreparedPrompts, TokenizerFiles, require_tokenizer
from trtserve.errors import RepositoryError, UsageError
from trtserve.files import is_below, parse_json, read_as, read_json_object

if TYPE_CHECKING:
    import numpy.typing as npt


Values = dict[str, Tensor]

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, kw_only=True)
class RequestContext:
    """Everything a request is built from."""

    spec: QuerySpec
    model: ModelDescription
    prompts: PreparedPrompts
    tokenizer: TokenizerFiles | None = None  # the server's tokenizer, if its files are available on this machine
    repository: Path | None = None  # the server's repository, if it is on this machine

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return self.spec.stream and self.model.decoupled

    def scalar(self, value: Any, *names: str) -> Values:
        """Return `value` for every row, under the first of `names` that the model declares."""
        name = self.model.first_input(*names)
        return {name: self.model.tensor(name, [value], rows=self.prompts.rows)}

    def list_input(self, values: Sequence[Any], name: str) -> Values:
        """Return the list `values` for every row."""
        return {name: self.model.tensor(name, list(values), rows=self.prompts.rows)}


def split_input(text: str) -> tuple[str, str]:
    """Split `NAME=VALUE` into name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--input is {text!r}; expected NAME=VALUE, such as temperature=0.5.")
    return name.strip(), value


def input_tensor(model: ModelDescription, name: str, text: str, *, rows: int) -> Tensor:
    """Parse `text` as the tensor of this input; it is repeated for every row of the batch unless it has all rows.

    Accepted: a scalar, a comma list, a JSON list (nested for several dimensions), @FILE.npy, @FILE.json; for STRING
    inputs the text itself, a JSON list of texts, or @FILE. UsageError names the declared type and shape.
    """
    declared = model.input(name)
    array = _parse(declared, text)
    if array.ndim == len(declared.dims) + 1 and array.shape[0] == rows and _fits(declared, array.shape[1:]):
        return Tensor(name=name, datatype=declared.datatype, shape=array.shape, values=array)
    if array.ndim == 0:
        array = array.reshape((1,) * len(declared.dims))
    if not _fits(declared, array.shape):
        raise UsageError(f"--input {name} has shape {list(array.shape)}; the model {model.name!r} expects {declared}.")
    return model.tensor(name, array, rows=rows)


def file_array(path: Path, what: str) -> npt.NDArray[Any]:
    """Read the array of an npy file."""
    from trtserve.programs.shared.arrays import read_array

    try:
        return read_array(path)
    except ValueError as error:
        raise UsageError(f"{what}: {error}.") from None


def as_declared(declared: TensorDescription, array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Convert `array` to the declared type. Raises UsageError if values do not fit it (2.5 or 2**40 as INT32)."""
    import numpy as np

    target = numpy_type(declared.datatype)
    if declared.datatype == "BYTES":
        return array.astype(object)
    kinds = {"b": "b", "u": "bui", "i": "bui"}.get(target.kind, "buif")
    if array.dtype.kind not in kinds and array.dtype.name != "bfloat16":
        raise UsageError(f"{what} has values of type {array.dtype}; expected {declared}.")
    if target.kind in "ui" and array.size:
        limits = np.iinfo(target)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise UsageError(f"{what} has values outside {limits.min} … {limits.max}; expected {declared}.")
    return array.astype(target)


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file."""
    try:
        return files.read_text(path, UsageError, pipes=True)
    except FileNotFoundError:
        raise UsageError(f"{what}: {path} cannot be read: there is no such file.") from None
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}") from None


def _fits(declared: TensorDescription, shape: tuple[int, ...]) -> bool:
    sizes = zip(declared.dims, shape, strict=False)
    return len(shape) == len(declared.dims) and all(dim in (-1, size) for dim, size in sizes)


def _parse(declared: TensorDescription, text: str) -> npt.NDArray[Any]:
    import numpy as np

    what = f"--input {declared.name}"
    if text.startswith("@"):
        return _parse_file(declared, Path(text[1:]), what)
    if text.startswith("["):
        listed = _parse_json_list(declared, text, what)
        if listed is not None:
            return listed
    if declared.datatype == "BYTES":
        return np.array([text], dtype=object)
    items = [_parse_number(declared, item.strip(), what) for item in text.split(",")]
    return as_declared(declared, _numeric_array(items, declared, what), what)


def _parse_file(declared: TensorDescription, path: Path, what: str) -> npt.NDArray[Any]:
    import numpy as np

    if path.suffix == ".npy":
        return as_declared(declared, file_array(path, what), what)
    content = read_text(path, what)
    if path.suffix == ".json":
        listed = _parse_json_list(declared, content, what)
        if listed is not None:
            return listed
    if declared.datatype == "BYTES":
        return np.array([content], dtype=object)
    return _parse(declared, content.strip())


def _parse_json_list(declared: TensorDescription, text: str, what: str) -> npt.NDArray[Any] | None:
    """Parse a JSON list, or None for a STRING input whose text is to be sent as it is."""
    try:
        content = parse_json(text)
    except ValueError:
        if declared.datatype == "BYTES":
            return None
        raise UsageError(f"{what} is not a JSON list; expected {declared}.") from None
    if declared.datatype == "BYTES":
        return _text_array(content)
    return as_declared(declared, _numeric_array(content, declared, what), what)


def _text_array(content: Any) -> npt.NDArray[Any] | None:
    """Return an array [n] or [rows, n] of texts, or None for other JSON, such as the schema of a guide."""
    import numpy as np

    rows = content if isinstance(content, list) and all(isinstance(row, list) for row in content) else [content]
    if not all(isinstance(row, list) and row and all(isinstance(item, str) for item in row) for row in rows):
        return None
    array = np.array(rows, dtype=object)
    return array if rows is content else array[0]


def _numeric_array(items: Any, declared: TensorDescription, what: str) -> npt.NDArray[Any]:
    import numpy as np

    try:
        array = np.array(items)
    except ValueError:
        raise UsageError(f"{what} has lists of different lengths; expected {declared}.") from None
    if array.dtype == object or array.dtype.kind in "US":
        raise UsageError(f"{what} has values that are not numbers of one type; expected {declared}.")
    if array.size == 0:
        return array.astype(numpy_type(declared.datatype))
    return array


def _parse_number(declared: TensorDescription, text: str, what: str) -> Any:
    try:
        if declared.datatype == "BOOL":
            return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
        return float(text) if declared.datatype.startswith(("FP", "BF")) else int(text)
    except (ValueError, KeyError):
        raise UsageError(f"{what} is {text!r}; expected {declared}.") from None


LORA_WEIGHTS = "model.lora_weights.npy"
LORA_CONFIG = "model.lora_config.npy"
_NO_ADAPTERS = "It has none: add one with `trtserve repo --lora NAME=FOLDER`, or send one with --lora-path."
_INLINE_IDS = re.compile(r"\s*\d+(\s*,\s*\d+)*\s*,?\s*")


def read_token_ids(text: str, flag: str) -> tuple[tuple[int, ...], ...]:
    """Return rows of token ids from a CSV file (one sequence per line), or from the text itself, such as `1,15,27`."""
    content = text if _INLINE_IDS.fullmatch(text) else read_text(Path(text), flag)
    try:
        rows = [tuple(int(cell) for cell in row if cell.strip()) for row in csv.reader(content.splitlines())]
    except (ValueError, csv.Error):
        raise UsageError(f"{flag} is {text}; expected token ids separated by commas.") from None
    if not any(rows):
        raise UsageError(f"{flag} is {text}, which contains no token ids.")
    if any(not 0 <= token < 2**31 for row in rows for token in row):
        raise UsageError(f"{flag} is {text}; token ids must be 0 … {2**31 - 1}.")
    return tuple(row for row in rows if row)


def adapter_inputs(context: RequestContext) -> Values:
    """Return the LoRA inputs: weights and configuration from a folder, or an adapter of the repository by name."""
    options = context.spec.options
    if "lora" in options and ("lora_path" in options or "lora_task_id" in options):
        raise UsageError("--lora names an adapter of the repository; omit --lora-path and --lora-task-id.")
    if "lora_path" in options:
        if "lora_task_id" not in options:
            raise UsageError("--lora-path needs --lora-task-id, the number under which the server caches the adapter.")
        return _adapter_files(context, Path(options["lora_path"]))
    return _named_adapter(context, options["lora"]) if "lora" in options else {}


def _adapter_files(context: RequestContext, folder: Path) -> Values:
    files = {"lora_weights": LORA_WEIGHTS, "lora_config": LORA_CONFIG}
    arrays = {}
    for name, file in files.items():
        array = file_array(folder / file, "--lora-path")
        rows = array[0] if array.ndim == 3 and len(array) == 1 else array  # hf_lora_convert writes [1, rows, columns]
        if rows.ndim != 2:
            raise UsageError(
                f"--lora-path: {folder / file} has shape {list(array.shape)}; expected [1, rows, columns]."
            )
        arrays[name] = rows
    if len(arrays["lora_weights"]) != len(arrays["lora_config"]):
        weights, config = (len(array) for array in arrays.values())
        raise UsageError(f"--lora-path: {folder} has {weights} rows of weights and {config} rows of configuration.")
    return {
        name: _tensor(context, name, array, f"--lora-path {folder / files[name]}") for name, array in arrays.items()
    }


def _named_adapter(context: RequestContext, name: str) -> Values:
    """Send the name where the model has the input `lora_name`; else the adapter that lora.json lists under it."""
    known = _adapters(context.repository)
    if known is not None and name not in known:
        others = f"Its adapters: {', '.join(sorted(known))}." if known else _NO_ADAPTERS
        raise UsageError(f"The repository has no adapter {name!r}.", hint=others)
    if context.model.has("lora_name"):
        return context.scalar(name, "lora_name")
    if known is None or context.repository is None:
        raise UsageError(
            f"The model {context.model.name!r} accepts no adapter names, and its repository is not on this machine.",
            hint="Use --lora-path with --lora-task-id.",
        )
    entry = known[name]
    return {
        **context.scalar(entry.task_id, "lora_task_id"),
        **_adapter_files(context, context.repository / entry.folder),
    }


def with_named_adapter(spec: QuerySpec, repository: Path | None) -> QuerySpec:
    """Return the request of a spec whose model may be the name of an adapter, as in the gateway's APIs.

    Raises UsageError where another adapter is named too.
    """
    if spec.model is None or spec.model not in (_adapters(repository) or {}):
        return spec
    if {"lora", "lora_path", "lora_task_id"}.intersection(spec.options):
        raise UsageError(f"--model {spec.model} names an adapter already; omit --lora, --lora-path and --lora-task-id.")
    return replace(spec, model=None, options={**spec.options, "lora": spec.model})


def _adapters(repository: Path | None) -> Mapping[str, AdapterEntry] | None:
    """Return the repository's adapters by name, or None when its files are not on this machine."""
    if repository is None or not repository.is_dir():
        return None
    path = repository / "lora.json"
    return read_adapter_table(path) if path.exists() else {}


@dataclass(frozen=True, kw_only=True)
class AdapterEntry:
    """An adapter of a repository; `folder` is below the repository."""

    task_id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    folder: str


@dataclass(frozen=True, kw_only=True)
class _AdapterTable:
    adapters: dict[str, AdapterEntry] = field(default_factory=dict)


def read_adapter_table(path: Path) -> dict[str, AdapterEntry]:
    """Return name → adapter of a lora.json. Raises RepositoryError for anything else."""
    table = read_as(path, _AdapterTable, "a table of adapters", RepositoryError).adapters
    for name, entry in table.items():
        if entry.folder != "." and not is_below(entry.folder):
            raise RepositoryError(
                f"{path} has the adapter {name[:100]!r} in {entry.folder[:200]!r}, which is not a folder below the "
                "repository."
            )
    return table


def prompt_table_inputs(context: RequestContext) -> Values:
    """Return the rows of one task of a p-tuning table, their number, and the ids that identify the table."""
    options = context.spec.options
    values: Values = {}
    if "prompt_embedding_table_path" in options:
        table = _task_of_table(Path(options["prompt_embedding_table_path"]), options.get("prompt_task_id", 0))
        values["prompt_embedding_table"] = _tensor(
            context, "prompt_embedding_table", table, "--prompt-embedding-table-path"
        )
        values |= context.scalar(len(table), "prompt_vocab_size")
    elif "prompt_task_id" in options:
        raise UsageError("--prompt-task-id selects a task of a table; add --prompt-embedding-table-path.")
    if "prompt_table_extra_id" in options:
        values |= _extra_id_inputs(context, options["prompt_table_extra_id"])
    return values


def _task_of_table(path: Path, task: int) -> Any:
    table = file_array(path, "--prompt-embedding-table-path")
    tasks = table[None] if table.ndim == 2 else table
    if tasks.ndim != 3:
        raise UsageError(
            f"--prompt-embedding-table-path: {path} has shape {list(table.shape)}; expected [tasks, rows, hidden]."
        )
    if task >= len(tasks):
        raise UsageError(f"--prompt-task-id is {task}; {path} has {len(tasks)} tasks, numbered from 0.")
    return tasks[task]


def _extra_id_inputs(context: RequestContext, number: int) -> Values:
    if context.model.has("prompt_table_extra_id") or not context.model.has("prompt_table_extra_ids"):
        return context.scalar(number, "prompt_table_extra_id")
    # The core model expects one id per prompt token: `number` where the token refers to a row of the table, else 0.
    first = vocab_size(context)
    if first is None:
        raise UsageError("--prompt-table-extra-id needs --vocab-size: the engine's vocabulary size is unknown here.")
    rows = context.prompts.token_ids
    longest = max(map(len, rows))
    ids = [[number if token >= first else 0 for token in row] + [0] * (longest - len(row)) for row in rows]
    return {"prompt_table_extra_ids": context.model.row_tensor("prompt_table_extra_ids", ids)}


def vocab_size(context: RequestContext) -> int | None:
    """Return the vocabulary size given by --vocab-size, else the one in the engine's config.json, else None."""
    given = context.spec.options.get("vocab_size")
    if given is not None or context.repository is None:
        return None if given is None else int(given)
    config = context.repository / context.model.name / "1" / "config.json"
    engine = read_json_object(config, RepositoryError) if config.exists() else {}
    size = engine.get("pretrained_config", {}).get("vocab_size")
    return None if size is None else int(size)


def draft_inputs(context: RequestContext) -> Values:
    """Return the draft tokens of one step and the three numbers of lookahead decoding."""
    options = context.spec.options
    values: Values = {}
    if "draft_tokens_csv" in options:
        rows = read_token_ids(str(options["draft_tokens_csv"]), "--draft-tokens-csv")
        if len(rows) > 1:
            raise UsageError(f"--draft-tokens-csv has {len(rows)} lines; draft tokens belong to one sequence.")
        values |= context.list_input(rows[0], "draft_input_ids")
    if "lookahead_config" in options:
        text = options["lookahead_config"]
        numbers = re.fullmatch(r"\[?\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]?", text)
        if numbers is None:
            raise UsageError(
                f"--lookahead-config is {text!r}; expected [window,ngram,verification-set], such as [7,7,7]."
            )
        for name, number in zip(tensors_of("lookahead_config"), numbers.groups(), strict=True):
            values |= context.scalar(int(number), name)
    return values


def _tensor(context: RequestContext, name: str, array: Any, what: str) -> Tensor:
    declared = context.model.input(name)
    if not _fits(declared, array.shape):
        raise UsageError(f"{what} has shape {list(array.shape)}; the model expects {declared}.")
    return context.model.tensor(name, as_declared(declared, array, what), rows=context.prompts.rows)


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
    return {IDS_INPUT: model.row_tensor(IDS_INPUT, rows), "input_lengths": model.row_tensor("input_lengths", lengths)}


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
        **(context.scalar(guide, *tensors_of("guide")) if (guide := _guide_text(context)) else {}),
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


VLLM_SEEDS = 2**63  # seeds of vLLM are below it


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
