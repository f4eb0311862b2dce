"""Several answers at once in one event loop: `python examples/asyncio_streams.py [SERVER]`.

SERVER is the name of a running server, or HOST:PORT of any Triton's gRPC service; default: the only server here.
"""

from __future__ import annotations

import asyncio
import sys

import trtserve

QUESTIONS = ("What is ML?", "What is a token?", "What is a GPU?", "What is training?")


async def ask(client: trtserve.AsyncClient, question: str) -> None:
    """Print a line when the first piece of an answer comes, and one when it is complete."""
    stream = client.stream(question, max_tokens=40)
    first = await anext(stream)
    print(f"{question} begins with {first!r}")
    answer = await stream.answer()
    print(f"{question} {answer.text}")


async def ask_all(server: str | None) -> None:
    """Ask all questions over one connection; the engine runs them in one batch."""
    async with trtserve.AsyncClient(server) as client:
        await asyncio.gather(*(ask(client, question) for question in QUESTIONS))


def main(server: str | None = None) -> None:
    """Run the event loop."""
    asyncio.run(ask_all(server))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except trtserve.TrtserveError as error:  # no server, or one that cannot do it
        sys.exit(" ".join(filter(None, [f"{error}", error.hint])))
