"""What `trtserve query` asks, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from trtserve.errors import UsageError
from trtserve.query.options import REQUEST_OPTIONS

DEFAULT_MAX_TOKENS = 256

Protocol = Literal["grpc", "http"]
Compression = Literal["none", "deflate", "gzip"]


@dataclass(frozen=True, kw_only=True)
class QuerySpec:
    """One question or several: `prompts` as texts, or `token_ids` for a core model.

    `options` are values by the names of REQUEST_OPTIONS; `inputs` are further ones, as (tensor name, text) pairs that
    the model's own declaration gives their types. `batch` sends all prompts as the rows of one request. `raw` leaves
    the chat template out, `system` goes into it. `tokenizer` is a folder, for servers whose repository is not known
    here. `stop_after_ms` ends the request that long after it was sent, by a stop request on its id, or with
    `stop_via_cancel` by cancelling the call. `timeout` counts seconds.
    """

    prompts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    exclude_input: bool = True
    stream: bool = False
    batch: bool = False
    raw: bool = False
    system: str | None = None
    tokenizer: Path | None = None
    protocol: Protocol = "grpc"
    compression: Compression | None = None
    request_id: str | None = None
    timeout: float = 600.0
    stop_after_ms: int | None = None
    stop_via_cancel: bool = False

    def __post_init__(self) -> None:
        self._check_options()
        self._check_call()
        if self.prompts and self.token_ids:
            raise UsageError("Give prompts or --input-tokens-csv, not both.")
        if self.system is not None and self.raw:
            raise UsageError("--system goes into the chat template, which --raw leaves out.")

    def _check_options(self) -> None:
        for name, value in self.options.items():
            if name not in REQUEST_OPTIONS:
                near = get_close_matches(name, REQUEST_OPTIONS, n=1)
                raise UsageError(f"There is no option {name!r}.", hint=f"Did you mean {near[0]!r}?" if near else None)
            REQUEST_OPTIONS[name].check(value)

    def _check_call(self) -> None:
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise UsageError(f"--timeout is {self.timeout}; it must be above 0.")
        if self.protocol not in get_args(Protocol):
            raise UsageError(f"--protocol is {self.protocol!r}; expected one of {', '.join(get_args(Protocol))}.")
        if self.compression not in (None, *get_args(Compression)):
            expected = ", ".join(get_args(Compression))
            raise UsageError(f"--grpc-compression-algorithm is {self.compression!r}; expected one of {expected}.")
        if self.compression is not None and self.protocol == "http":
            raise UsageError(
                "--grpc-compression-algorithm needs --protocol grpc: Triton's generate endpoint takes none."
            )
        if self.stop_after_ms is not None and self.stop_after_ms < 1:
            raise UsageError(f"--stop-after-ms is {self.stop_after_ms}; it must be at least 1.")
        if self.stop_via_cancel and self.stop_after_ms is None:
            raise UsageError("--stop-via-request-cancel says how; when is said by --stop-after-ms.")

    @property
    def max_tokens(self) -> int:
        """New tokens at most, of each answer."""
        return int(self.options.get("max_tokens", DEFAULT_MAX_TOKENS))

    @property
    def rows(self) -> int:
        """Prompts, however they are given."""
        return len(self.prompts) or len(self.token_ids)
