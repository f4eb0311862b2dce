"""The tensors of one request: only what was asked for, under the names that the asked model declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.errors import UsageError
from trtserve.query import attachments
from trtserve.query.options import REQUEST_OPTIONS
from trtserve.query.spec import QuerySpec
from trtserve.query.tokenizer import TokenizerFiles
from trtserve.query.values import input_tensor, read_text
from trtserve.triton.client import ModelDescription
from trtserve.triton.tensors import Tensor

TEXT_INPUT = "text_input"
IDS_INPUT = "input_ids"

Values = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The rows of one request: texts, or for a core model token ids; `end_words` end an answer beside the end id."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    end_words: tuple[str, ...] = ()
    end_id: int | None = None

    @property
    def rows(self) -> int:
        """Size of the batch."""
        return len(self.texts) or len(self.token_ids)

    def split(self) -> list[Prompts]:
        """One request for each row."""
        from dataclasses import replace

        texts = [replace(self, texts=(text,)) for text in self.texts]
        return texts or [replace(self, token_ids=(ids,)) for ids in self.token_ids]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a request is made for: the question, the model, the rows, and what is known of the server's files."""

    spec: QuerySpec
    model: ModelDescription
    prompts: Prompts
    tokenizer: TokenizerFiles | None = None
    repository: Path | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.spec.stream and self.model.decoupled

    def scalar(self, value: Any, *names: str) -> Values:
        """`value` in every row, under the first of `names` that the model declares."""
        name = self.model.first_input(*names)
        return {name: self.model.tensor(name, [value], rows=self.prompts.rows)}

    def several(self, values: Sequence[Any], name: str) -> Values:
        """`values` in every row."""
        return {name: self.model.tensor(name, list(values), rows=self.prompts.rows)}

    def words_to_ids(self, words: Sequence[str], flag: str) -> list[list[int]]:
        """Token ids of each word, for a core model."""
        files = require_tokenizer(self.tokenizer, self.model, flag)
        return [ids for word in words if (ids := files.encode(word, special=False))]


def require_tokenizer(files: TokenizerFiles | None, model: ModelDescription, what: str) -> TokenizerFiles:
    """The tokenizer, without which a core model cannot be given `what`."""
    if files is None:
        raise UsageError(
            f"{what} needs a tokenizer: the model {model.name!r} takes token ids, and its tokenizer is not known here.",
            hint="Give the tokenizer's folder with --tokenizer, or the prompt as ids with --input-tokens-csv.",
        )
    return files


def request_tensors(context: Context) -> list[Tensor]:
    """The inputs of one request; UsageError for an option, --input or requested output that the model does not have."""
    _require_outputs(context)
    chosen = {**_prompt(context), **_options(context)}
    return list({**_defaults(context, chosen), **chosen, **_further_inputs(context, chosen)}.values())


def _require_outputs(context: Context) -> None:
    model = context.model
    for name in context.spec.outputs:
        if name not in model.outputs:
            known = ", ".join(sorted(model.outputs))
            raise UsageError(f"The model {model.name!r} has no output {name!r}.", hint=f"Its outputs: {known}.")


def _prompt(context: Context) -> Values:
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


def _options(context: Context) -> Values:
    given = context.spec.options
    values: Values = {}
    for name, value in given.items():
        if REQUEST_OPTIONS[name].direct:
            values |= context.scalar(value, *REQUEST_OPTIONS[name].tensors)
    values |= _words(context) | _bias(context) | _guide(context)
    return {
        **values,
        **attachments.adapter(context),
        **attachments.prompt_table(context),
        **attachments.drafts(context),
    }


def _words(context: Context) -> Values:
    values: Values = {}
    options = context.spec.options
    ends = () if "end_id" in options else context.prompts.end_words
    words = {"stop_words": [*_spellings(options.get("stop_words", ())), *ends]}
    words["bad_words"] = [word for word in options.get("bad_words", ()) if word]
    for name, texts in words.items():
        if not texts:
            continue
        if name in context.model.inputs or not context.model.has(f"{name}_list"):
            values |= context.several(texts, name)
        else:
            values |= _word_ids(context, name, texts)
    return values


def _spellings(words: Sequence[str]) -> list[str]:
    """Each word also as it stands inside a sentence: the engine compares tokens, and " data" has others than "data"."""
    return [spelling for word in words if word for spelling in dict.fromkeys((word, f" {word.lstrip(' ')}"))]


def _word_ids(context: Context, name: str, texts: Sequence[str]) -> Values:
    """TensorRT-LLM's word list [2, n]: all ids in a row, and below them where each word ends, padded with -1."""
    import numpy as np

    words = context.words_to_ids(texts, REQUEST_OPTIONS[name].flag)
    ids = [token for word in words for token in word]
    table = np.full((2, max(1, len(ids))), -1, dtype=np.int32)
    table[0] = ids or 0
    table[1, : len(words)] = np.cumsum([len(word) for word in words])
    tensor = f"{name}_list"
    return {tensor: context.model.tensor(tensor, table, rows=context.prompts.rows)}


def _bias(context: Context) -> Values:
    pairs = _bias_pairs(context.spec)
    if not pairs:
        return {}
    if "embedding_bias_words" in context.model.inputs or not context.model.has("embedding_bias"):
        words, weights = zip(*pairs, strict=True)
        return {
            **context.several(words, "embedding_bias_words"),
            **context.several(weights, "embedding_bias_weights"),
        }
    import numpy as np

    files = require_tokenizer(context.tokenizer, context.model, "--embedding-bias")
    # As preprocessing does it; the engine wants a vector of its own vocabulary's size.
    size = attachments.vocab_size(context) or len(files.tokenizer)
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
            " every word has a weight."
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


def _guide(context: Context) -> Values:
    options = context.spec.options
    if "guide" in options and "guide_type" not in options:
        raise UsageError("--guide needs --guide-type: json_schema, regex or ebnf_grammar.")
    if "guide" not in options:
        return {}
    text = options["guide"]
    if text.startswith("@"):
        text = read_text(Path(text[1:]), "--guide")
    return context.scalar(text, *REQUEST_OPTIONS["guide"].tensors)


def _defaults(context: Context, chosen: Values) -> Values:
    """What is sent without being asked for: the length, the way of answering, and counts that cost nothing."""
    model, spec = context.model, context.spec
    values = context.scalar(spec.max_tokens, *REQUEST_OPTIONS["max_tokens"].tensors)
    switches = {
        model.first_input("stream", "streaming"): context.streams,
        "exclude_input_in_output": spec.exclude_input,
        "return_num_output_tokens": True,
        "return_finish_reason": True,
    }
    for name, value in switches.items():
        if name in model.inputs:
            values |= context.scalar(value, name)
    if context.prompts.end_id is not None and not chosen.keys() & {"end_id"}:
        values |= context.scalar(context.prompts.end_id, "end_id")
    return values


def _further_inputs(context: Context, chosen: Values) -> Values:
    values: Values = {}
    for name, text in context.spec.inputs:
        if name in chosen or name in values:
            raise UsageError(f"The input {name!r} is given twice.", hint="Leave one of the options out.")
        values[name] = input_tensor(context.model, name, text, rows=context.prompts.rows)
    return values
