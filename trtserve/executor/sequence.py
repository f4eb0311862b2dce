"""One request on its way through the executor: what it asked, what it has produced, where it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.enums import FinishReason
from trtserve.executor.results import Response, Result
from trtserve.executor.sampling import SamplingParameters

NO_END = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`computed` counts the tokens whose keys and values are in the cache; `capacity` what its blocks can hold.

    `slot` is its row in the block table, None until blocks are set aside. Times are monotonic seconds.
    """

    id: int
    prompt: npt.NDArray[np.int64]
    max_tokens: int
    end_id: int = NO_END
    stop_words: tuple[tuple[int, ...], ...] = ()
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    streaming: bool = False
    return_all: bool = False
    exclude_input: bool = False
    client_id: int | None = None
    arrival: float = field(default_factory=time.monotonic)
    generated: list[int] = field(default_factory=list)
    sent: int = 0
    computed: int = 0
    capacity: int = 0
    slot: int | None = None
    iterations: int = 0
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.prompt)

    @property
    def generating(self) -> bool:
        """True once the whole prompt is in the cache."""
        return self.computed >= self.prompt_length

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return self.prompt_length - self.computed

    def accept(self, token: int) -> FinishReason:
        """Append `token` unless it ends the sequence; says whether and why the sequence has ended."""
        self.iterations += 1
        if token == self.end_id:
            return FinishReason.END_ID
        generated = self.generated
        generated.append(token)
        if self.stop_words and any(self._ends_with(word) for word in self.stop_words):
            return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if len(generated) >= self.max_tokens else FinishReason.NOT_FINISHED

    def _ends_with(self, word: tuple[int, ...]) -> bool:
        """True when the whole sequence, prompt included, ends with `word`."""
        tail = self.generated[-len(word) :]
        missing = len(word) - len(tail)
        if missing > self.prompt_length:
            return False
        if missing:
            tail = [*self.prompt[self.prompt_length - missing :].tolist(), *tail]
        return tuple(tail) == word

    def respond(self, reason: FinishReason) -> Response | None:
        """The response that is due after a step, None when nothing is."""
        final = reason is not FinishReason.NOT_FINISHED
        if not final and (not self.streaming or len(self.generated) == self.sent):
            return None
        return self._response(self._due_tokens(), reason, final=final)

    def cancelled(self) -> Response:
        """The empty last response of a cancelled sequence."""
        return self._response([], FinishReason.CANCELLED, final=True)

    def failed(self, message: str) -> Response:
        """The response that ends the sequence with an error."""
        return Response(self.id, message, self.client_id)

    def _due_tokens(self) -> list[int]:
        if not self.streaming:
            return list(self.generated) if self.exclude_input else [*self.prompt.tolist(), *self.generated]
        tokens = self.generated[:] if self.return_all else self.generated[self.sent :]
        self.sent = len(self.generated)
        return tokens

    def _response(self, tokens: list[int], reason: FinishReason, *, final: bool) -> Response:
        result = Result(
            is_final=final,
            output_token_ids=[tokens],
            finish_reasons=[reason],
            is_sequence_final=final,
            decoding_iter=self.iterations,
        )
        return Response(self.id, result, self.client_id)


def as_prompt(tokens: list[int]) -> npt.NDArray[np.int64]:
    """Token ids as the model takes them, i64[n]."""
    prompt: npt.NDArray[Any] = np.array(tokens, dtype=np.int64)
    return prompt
