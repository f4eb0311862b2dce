"""How many tokens the answers of a text model have, and with which response each of them came."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from trtserve.bench.load import Record
from trtserve.bench.messages import TextResponse, new_responses, repeats_prompt
from trtserve.bench.traffic import TrafficRequest
from trtserve.query.tokenizer import TokenizerFiles
from trtserve.triton.client import ModelDescription

Counter = Literal["server", "tokenizer"]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Who counted the output tokens, and totals over the completed answers (None: the server does not tell)."""

    by: Counter
    by_tokenizer: int
    by_server: int | None
    prompts_by_tokenizer: int
    prompts_by_server: int | None

    def notes(self, files: TokenizerFiles) -> list[str]:
        """How the output tokens were counted, and where server and tokenizer disagree."""
        if self.by == "tokenizer":
            text = f"the answers' text by the tokenizer in {files.folder}, without special tokens"
            notes = [f"The server does not count output tokens: they are those of {text}, and may be split otherwise."]
        else:
            notes = ["Output tokens are those that the server counted (num_output_tokens)."]
        if self.by_server is not None and self.by_server != self.by_tokenizer:
            notes.append(
                f"The tokenizer finds {self.by_tokenizer} tokens in the text of the answers, the server generated "
                f"{self.by_server}: special tokens are not in the text, and a text can be split in several ways."
            )
        if self.prompts_by_server is not None and self.prompts_by_server != self.prompts_by_tokenizer:
            notes.append(
                f"The server counted {self.prompts_by_server} prompt tokens, the tokenizer in {files.folder} "
                f"{self.prompts_by_tokenizer}: it is not the server's tokenizer."
            )
        return notes


def count_answers(
    records: Sequence[Record], requests: Sequence[TrafficRequest], model: ModelDescription, files: TokenizerFiles
) -> Counted:
    """Fill `arrivals` of every record from its texts.

    The server's counts are taken where every completed answer has them, since text hides tokens; else the tokenizer
    counts the joined text of each answer.
    """
    for record, request in zip(records, requests, strict=True):
        record.texts = new_texts(record, model, prompt=request.text or "")
    completed = [record for record in records if record.status == "completed"]
    counts = {record.index: token_counts(files, [each.text for each in record.texts]) for record in records}
    by_tokenizer = sum(sum(counts[record.index]) for record in completed)
    by_server = _total([_told(record) for record in completed])
    if by_server is not None:
        counts = {record.index: [each.tokens or 0 for each in record.texts] for record in records}
    for record in records:
        record.arrivals = token_arrivals(record.texts, counts[record.index])
    return Counted(
        by="tokenizer" if by_server is None else "server",
        by_tokenizer=by_tokenizer,
        by_server=by_server,
        prompts_by_tokenizer=sum(record.input_tokens for record in completed),
        prompts_by_server=_total([_told_of_prompt(record) for record in completed]),
    )


def _told(record: Record) -> int | None:
    told = [each.tokens for each in record.texts if each.tokens is not None]
    return sum(told) if told else None


def _told_of_prompt(record: Record) -> int | None:
    return next((each.prompt_tokens for each in record.texts if each.prompt_tokens), None)


def _total(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def new_texts(record: Record, model: ModelDescription, *, prompt: str) -> list[TextResponse]:
    """The responses with the text that is new in each; a whole answer may begin with the prompt."""
    if record.streamed:
        return new_responses(model, record.texts)
    texts = list(record.texts)
    if texts and repeats_prompt(model):
        texts[0] = replace(texts[0], text=texts[0].text.removeprefix(prompt))
    return texts


def token_counts(files: TokenizerFiles, texts: Sequence[str]) -> list[int]:
    """How many tokens of the joined text each part completes; their sum is the joined text's."""
    whole, ends = "".join(texts), list(accumulate(map(len, texts)))
    counts = [0] * len(texts)
    if not whole:
        return counts
    if files.tokenizer.is_fast:
        encoding = files.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        for _, end in encoding["offset_mapping"]:
            counts[bisect_left(ends, end)] += 1
        return counts
    totals = [len(files.encode(whole[:end], special=False)) for end in ends]
    return [max(0, after - before) for before, after in zip([0, *totals], totals, strict=False)]


def token_arrivals(texts: Sequence[TextResponse], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Time and number of tokens of the responses: a token has come when a response shows text that it is part of.

    Tokens after the last text (the end token) count with the last response.
    """
    found: list[tuple[int, int]] = []
    held = 0
    for response, count in zip(texts, tokens, strict=True):
        held += count
        if held and response.text:
            found.append((response.time, held))
            held = 0
    return [*found, (texts[-1].time, held)] if held else found
