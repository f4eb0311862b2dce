"""A small model drafts, the large one checks: `python examples/speculative.py [SERVER] [MODEL]`.

The server has both engines, as that of `trtserve up examples/setups/draft-and-target.yaml`.
"""

from __future__ import annotations

import sys

import trtserve


def main(server: str | None = None, model: str | None = None) -> None:
    """Print how many of the drafted tokens were right, and that the answer is that of the target alone."""
    client = trtserve.Client(server, model=model)
    question = "What is machine learning?"
    alone = client.ask(question, max_tokens=40)
    drafted = client.ask(question, max_tokens=40, num_draft_tokens=4, return_perf_metrics=True)
    found = {name: float(array.reshape(-1)[0]) for (name, _, _), array in drafted.outputs.items()}
    print(drafted.text)
    accepted, total = found["total_accepted_draft_tokens"], found["total_draft_tokens"]
    print(f"  {accepted:.0f} of {total:.0f} drafted tokens were right")
    print(f"  {drafted.latency * 1000:.0f} ms with drafts, {alone.latency * 1000:.0f} ms without")
    if drafted.text != alone.text:
        print("  The texts differ: numbers of low precision depend on how many tokens a step checks.")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except trtserve.TrtserveError as error:  # no server, or one that cannot do it
        sys.exit(" ".join(filter(None, [f"{error}", error.hint])))
