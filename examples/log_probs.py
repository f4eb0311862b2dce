"""How sure a model is of its answers: `python examples/log_probs.py [SERVER]`.

SERVER is the name of a running server, or HOST:PORT of any Triton's gRPC service; default: the only server here.
"""

from __future__ import annotations

import math
import sys

import trtserve

QUESTIONS = ("What is ML?", "Who won the match yesterday?")


def main(server: str | None = None) -> None:
    """Print each answer with its perplexity and the probability of its least likely token."""
    client = trtserve.Client(server)
    for question in QUESTIONS:
        answer = client.ask(question, max_tokens=40, return_log_probs=True)
        log_probs = answer.sequences[0].log_probs or []
        perplexity = math.exp(-sum(log_probs) / len(log_probs))
        print(f"{question} {answer.text}")
        print(f"  perplexity {perplexity:.3f}, least likely token {math.exp(min(log_probs)):.1%}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except trtserve.TrtserveError as error:  # no server, or one that cannot do it
        sys.exit(" ".join(filter(None, [f"{error}", error.hint])))
