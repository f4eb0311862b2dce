"""Many streams at once: `python examples/openai_asyncio.py [URL] [MODEL]`."""

from __future__ import annotations

import asyncio
import sys
import time

from openai import AsyncOpenAI, OpenAIError

QUESTIONS = ("What is ML?", "What is a token?", "What is a GPU?", "What is training?")


async def ask(client: AsyncOpenAI, model: str, question: str) -> str:
    """Return the answer to one question and when its first text came."""
    begin, first, text = time.perf_counter(), 0.0, ""
    stream = await client.completions.create(model=model, prompt=question, max_tokens=40, temperature=0, stream=True)
    async for chunk in stream:
        first = first or time.perf_counter() - begin
        text += chunk.choices[0].text
    return f"{question} {text.strip()} (first text after {first * 1000:.0f} ms)"


async def ask_all(url: str, model: str) -> None:
    """Ask all questions at once: the engine runs them in one batch."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        for answer in await asyncio.gather(*(ask(client, model, question) for question in QUESTIONS)):
            print(answer)


def main(url: str = "http://localhost:8000/v1", model: str = "demo") -> None:
    """Run the event loop."""
    asyncio.run(ask_all(url, model))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OpenAIError as error:
        sys.exit(f"{error} Is the server running? trtserve start demo")
