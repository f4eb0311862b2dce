"""Shared by all clients of a Triton server: the endpoint, model descriptions, replies, and the client interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from trtserve.client.tensors import ModelDescription, Reply, Tensor, stop_tensors

STOP_TIMEOUT = 2.0


class SyncClient(Protocol):
    """One connection to a server."""

    def describe(self, model: str) -> ModelDescription:
        """Read the configuration of a running model; RequestError lists the models when it is unknown."""

    def model_names(self) -> list[str]:
        """Return the names of all models that are ready."""

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        """Send one request and yield its responses; closing the client ends a running request.

        `outputs` limits the outputs; empty: all.
        """

    def cancel(self) -> None:
        """Cancel the running request from another thread: its iterator raises RequestCancelledError."""

    def close(self) -> None:
        """Close the connection."""


def stop_request(client: SyncClient, core: ModelDescription, request_id: str) -> None:
    """Ask the core model to stop the requests with this id, as NVIDIA's client does for `--stop-after-ms`.

    Needed when a cancelled call does not reach the engine (ensembles check for it only between their steps). An
    unknown id is not an error, so this is harmless when the cancellation came first.
    """
    for _ in client.infer(core, stop_tensors(core), request_id=request_id, stream=core.decoupled):
        pass
