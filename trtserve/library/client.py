"""`trtserve.Client`: ask a served model, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import TracebackType
from typing import Any

from trtserve.client.generation import Generation
from trtserve.client.query import (
    Pieces,
    connect,
    generate,
    request_contexts,
    stream,
)
from trtserve.client.spec import QuerySpec
from trtserve.errors import UsageError
from trtserve.library.requests import Asker, Prompt, Turns


class Client(Asker):
    """Asks the models of one server. It keeps no connection open, and threads may share it."""

    def ask(self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any) -> Generation:
        """Return the whole answer: its `text`, `output_tokens`, `sequences` and more.

        Args:
            prompt: A text, which a chat model gets in its chat template, or token ids for the core model.
            system: System message of a chat model.
            history: Earlier turns of a conversation: mappings with `role` and `content`.
            options: The options of `trtserve query` with underscores, such as `max_tokens=40`, `temperature=0.7`,
                `stop_words=["."]`, `lora="poet"`, `return_log_probs=True` or `model="ensemble"`.

        Raises:
            UsageError: there is no such option, or the model cannot do it.
            ServerUnreachableError: nothing answers at the server's address.
            RequestError: the server refused the request or failed, or the timeout has passed.
        """
        return generate(self._spec(prompt, system, history, options), self._server)

    def stream(self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any) -> TextStream:
        """Return the pieces of the answer's text as they are generated. Takes what `ask` takes.

        The request is sent when the first piece is read, which raises what `ask` raises. Closing the stream before its
        end stops the request in the engine.
        """
        return TextStream(self._pieces(self._spec(prompt, system, history, options, stream=True)))

    def _pieces(self, spec: QuerySpec) -> Pieces:
        with closing(connect(spec, self._server)) as client:
            (context,) = request_contexts(spec, self._server, client)
            return (yield from stream(context, self._server, client))


class TextStream(Iterator[str]):
    """The pieces of an answer's text. Use a `with` block where the loop may end early."""

    def __init__(self, pieces: Pieces) -> None:
        """Wrap what `trtserve.client.query.stream` returns."""
        self._pieces = pieces
        self._answer: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._answer = self._answer or end.value
            raise

    @property
    def answer(self) -> Generation:
        """The whole answer, as `ask` returns it; reads the pieces that are left. UsageError for a closed stream."""
        for _ in self:
            pass
        return require_complete(self._answer)

    def close(self) -> None:
        """End the request if it still runs."""
        self._pieces.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def require_complete(answer: Generation | None) -> Generation:
    """Return the answer. Raises UsageError when its stream was closed before its end."""
    if answer is None:
        raise UsageError("The stream was closed before its end, so there is no whole answer.")
    return answer
