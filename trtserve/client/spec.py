"""What `trtserve query` asks, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from trtserve.client.options import REQUEST_OPTIONS, RETURNED
from trtserve.errors import UsageError
from trtserve.specs.options import Spec, option

DEFAULT_MAX_TOKENS = 256

PROMPTS = "Prompts"
ENDING = "Ending a request"
CONNECTION = "Server and connection"

Protocol = Literal["grpc", "http"]
Compression = Literal["none", "deflate", "gzip"]


@dataclass(frozen=True, kw_only=True)
class QuerySpec(Spec):
    """One or several prompts, and how to ask them."""

    prompts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()  # prompts of a core model
    history: tuple[Mapping[str, str], ...] = ()  # earlier turns of a conversation: role and content
    options: Mapping[str, Any] = field(default_factory=dict)  # by the names of REQUEST_OPTIONS
    inputs: tuple[tuple[str, str], ...] = ()  # tensor name, value; the model's declaration gives the type
    model: str | None = option(
        None,
        "--model",
        "--model-name",
        "-m",
        metavar="MODEL",
        help="Triton model to ask, such as ensemble or tensorrt_llm_bls.",
        unset="the name under which the model is served",
        common=True,
    )
    stream: bool = option(
        False, "--stream", "--streaming", "-S", help="Print the answer as it is generated (one sequence).", common=True
    )
    system: str | None = option(None, help="System message of a chat model.", common=True)
    raw: bool = option(False, help="Send the prompt unchanged, without a chat template.", common=True)
    batch: bool = option(False, "--batch", "--batch-inputs", help="Send all prompts as one request.", panel=PROMPTS)
    tokenizer: Path | None = option(
        None,
        "--tokenizer",
        "--tokenizer-dir",
        metavar="DIR",
        help="Folder of the model's tokenizer.",
        unset="that of the server's repository or the engine's model",
        panel=PROMPTS,
    )
    exclude_input: bool = option(
        True,
        "--exclude-input/--include-input",
        "--exclude-input-in-output",
        help="Leave the prompt out of the answer.",
        panel=PROMPTS,
    )
    outputs: tuple[str, ...] = option(
        (), "--requested-outputs", metavar="NAME", help="Ask for these outputs only; repeatable.", panel=RETURNED
    )
    stop_after_ms: int | None = option(
        None, metavar="MILLISECONDS", help="Stop the request after this time.", minimum=1, panel=ENDING
    )
    stop_via_cancel: bool = option(
        False, "--stop-via-request-cancel", help="Stop by cancelling the call, not by a stop request.", panel=ENDING
    )
    timeout: float = option(
        600.0,
        "--timeout",
        "--stream-timeout",
        "-t",
        metavar="SECONDS",
        help="Longest wait for the whole answer.",
        above=0,
        panel=ENDING,
    )
    request_id: str | None = option(None, metavar="ID", help="Request id.", unset="a unique one", panel=ENDING)
    protocol: Protocol = option(
        "grpc", "--protocol", "-i", help="http uses Triton's generate and infer endpoints.", panel=CONNECTION
    )
    compression: Compression | None = option(
        None, "--grpc-compression-algorithm", "-C", help="Compression of gRPC messages.", unset="none", panel=CONNECTION
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.options.items():
            if name not in REQUEST_OPTIONS:
                near = get_close_matches(name, REQUEST_OPTIONS, n=1)
                raise UsageError(f"There is no option {name!r}.", hint=f"Did you mean {near[0]!r}?" if near else None)
            REQUEST_OPTIONS[name].check(value)
        if self.compression is not None and self.protocol == "http":
            raise UsageError(
                "--grpc-compression-algorithm needs --protocol grpc: Triton's generate endpoint takes none."
            )
        if self.stop_via_cancel and self.stop_after_ms is None:
            raise UsageError("--stop-via-request-cancel needs --stop-after-ms, the time after which to stop.")
        if self.prompts and self.token_ids:
            raise UsageError("Give prompts or --input-tokens-csv, not both.")
        if self.system is not None and self.raw:
            raise UsageError("--system needs the chat template, and --raw sends the prompt without it.")

    @property
    def max_tokens(self) -> int:
        """Most new tokens per answer."""
        return int(self.options.get("max_tokens", DEFAULT_MAX_TOKENS))

    @property
    def rows(self) -> int:
        """Number of prompts, given as text or as token ids."""
        return len(self.prompts) or len(self.token_ids)
