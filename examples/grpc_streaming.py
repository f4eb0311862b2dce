"""An answer token by token over gRPC: `python examples/grpc_streaming.py [SERVER]`.

SERVER is the name of a running server, or HOST:PORT of any Triton's gRPC service; default: the only server here.
"""

from __future__ import annotations

import sys

import trtserve


def main(server: str | None = None) -> None:
    """Print an answer as it is generated, then what it took."""
    client = trtserve.Client(server)
    with client.stream("What is a KV cache?", max_tokens=60) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
    answer = stream.answer
    first = (answer.time_to_first_token or 0) * 1000
    print(f"\n  {answer.output_tokens} tokens, the first after {first:.0f} ms, {answer.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except trtserve.TrtserveError as error:  # no server, or one that cannot do it
        sys.exit(" ".join(filter(None, [f"{error}", error.hint])))
