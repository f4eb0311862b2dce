"""A conversation through OpenAI's client: `python examples/openai_chat.py [URL] [MODEL]`."""

from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = ("What is ML?", "What is a model?")


def main(url: str = "http://localhost:8000/v1", model: str = "demo") -> None:
    """Ask two questions in one conversation and print the answers as they come."""
    client = OpenAI(base_url=url, api_key="none")
    messages: list[ChatCompletionMessageParam] = []
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
        answer = ""
        for chunk in stream:
            if chunk.choices:
                piece = chunk.choices[0].delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            elif chunk.usage is not None:
                print(f"\n  {chunk.usage.completion_tokens} tokens")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OpenAIError as error:
        sys.exit(f"{error} Is the server running? trtserve start demo")
