"""Count the tokens in the answers of a text model, and find the response in which each token arrived."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from trtserve.bench.messages import new_responses, repeats_prompt
from trtserve.bench.records import Record, Response
from trtserve.bench.requests import TrafficRequest
from trtserve.client.base import ModelDescription
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import UsageError

Counter = Literal["server", "tokenizer"]


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Tokens of the completed answers and prompts; counts by the server are None where it does not report them."""

    by: Counter
    """Who counted the output tokens of the report."""
    by_tokenizer: int | None
    by_server: int | None
    prompts_by_tokenizer: int
    prompts_by_server: int | None

    def notes(self, files: TokenizerFiles | None) -> list[str]:
        """Explain how the output tokens were counted, and where server and tokenizer disagree."""
        if files is None:
            return ["The server counted the output tokens; no tokenizer was here to compare."]
        if self.by == "tokenizer":
            notes = [
                f"The server does not count output tokens; the tokenizer in {files.folder} counted them in the text."
            ]
        else:
            notes = ["The server counted the output tokens."]
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
    records: Sequence[Record],
    requests: Sequence[TrafficRequest],
    model: ModelDescription,
    files: TokenizerFiles | None,
    *,
    whole: bool = False,
) -> AnswerCounts:
    """Fill `arrivals` of every record from its texts.

    Uses the server's counts if every completed answer has them, because some tokens are not visible in the text;
    otherwise the tokenizer counts the joined text of each answer. `whole`: the server counts an answer once, at its
    end, so its tokens are divided among the responses. Raises UsageError if neither can count.
    """
    for record, request in zip(records, requests, strict=True):
        record.responses = new_texts(record, model, prompt=request.text or "")
        texts = [each.text or "" for each in record.responses]
        by_text = [int(bool(text)) for text in texts] if files is None else token_counts(files, texts)
        record.tokenizer_tokens = None if files is None else sum(by_text)
        counted = [each.tokens for each in record.responses if each.tokens is not None]
        record.server_tokens = sum(counted) if counted else None
        record.arrivals = token_arrivals(record.responses, by_text)
        prompt = next((each.prompt_tokens for each in record.responses if each.prompt_tokens), None)
        if request.session is not None and prompt is not None:
            record.input_tokens = prompt  # the answers before it are known as text only
    completed = [record for record in records if record.status == "completed"]
    by_server = _total([record.server_tokens for record in completed])
    if by_server is None and files is None:
        raise UsageError(
            "The server does not count the tokens of its answers, and there is no tokenizer to count them.",
            hint="Give the tokenizer's folder with --tokenizer.",
        )
    if by_server is not None:
        for record in records:
            if whole:
                record.arrivals = divided(record.arrivals, record.server_tokens or 0)
            else:
                record.arrivals = token_arrivals(record.responses, [each.tokens or 0 for each in record.responses])
    return AnswerCounts(
        by="tokenizer" if by_server is None else "server",
        by_tokenizer=None if files is None else sum(record.tokenizer_tokens or 0 for record in completed),
        by_server=by_server,
        prompts_by_tokenizer=sum(record.input_tokens for record in completed),
        prompts_by_server=_total(
            [
                next((each.prompt_tokens for each in record.responses if each.prompt_tokens), None)
                for record in completed
            ]
        ),
    )


def divided(arrivals: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """Return arrivals whose tokens add up to `total`, in the proportions of the given ones."""
    given, found, before = sum(tokens for _, tokens in arrivals), [], 0
    seen = 0
    for time, tokens in arrivals:
        seen += tokens
        until = round(total * seen / given)
        if until > before:
            found.append((time, until - before))
        before = until
    return found


def _total(numbers: Sequence[int | None]) -> int | None:
    """Return the sum, or None if a number is missing."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def new_texts(record: Record, model: ModelDescription, *, prompt: str) -> list[Response]:
    """Reduce each response to its new text, and remove the prompt from an answer that repeats it."""
    if record.streamed:
        return new_responses(model, record.responses)
    texts = list(record.responses)
    if texts and repeats_prompt(model):
        texts[0] = replace(texts[0], text=(texts[0].text or "").removeprefix(prompt))
    return texts


def token_counts(files: TokenizerFiles, texts: Sequence[str]) -> list[int]:
    """Return how many tokens of the joined text end in each part."""
    joined, ends = "".join(texts), list(accumulate(map(len, texts)))
    counts = [0] * len(texts)
    if not joined:
        return counts
    if files.tokenizer.is_fast:
        encoding = files.tokenizer(joined, add_special_tokens=False, return_offsets_mapping=True)
        for _, end in encoding["offset_mapping"]:
            counts[bisect_left(ends, end)] += 1
        return counts
    totals = [len(files.encode(joined[:end], special=False)) for end in ends]
    return [max(0, after - before) for before, after in zip([0, *totals], totals, strict=False)]


def token_arrivals(texts: Sequence[Response], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return time and number of tokens of each response; a token arrives with the response that shows its text.

    Tokens after the last text (the end token) count as part of the last response.
    """
    arrivals: list[tuple[int, int]] = []
    pending = 0
    for response, count in zip(texts, tokens, strict=True):
        pending += count
        if pending and response.text:
            arrivals.append((response.time_ns, pending))
            pending = 0
    return [*arrivals, (texts[-1].time_ns, pending)] if pending else arrivals
