"""One model with several LoRA adapters: `python examples/lora_by_name.py SERVER ADAPTER…`.

The adapters are in the repository: `trtserve import MODEL --lora poet=FOLDER --lora-plugin auto` adds one as `poet`.
"""

from __future__ import annotations

import sys

import trtserve


def main(server: str, *adapters: str) -> None:
    """Ask the base model and each adapter the same question."""
    client = trtserve.Client(server)
    question = "What is machine learning?"
    print(f"without an adapter: {client.ask(question, max_tokens=12).text}")
    for name in adapters:
        print(f"{name}: {client.ask(question, max_tokens=12, lora=name).text}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("Usage: python examples/lora_by_name.py SERVER ADAPTER…")
    try:
        main(*sys.argv[1:])
    except trtserve.TrtserveError as error:  # no server, or one that cannot do it
        sys.exit(" ".join(filter(None, [f"{error}", error.hint])))
