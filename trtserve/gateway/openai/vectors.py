"""Vectors of texts, and documents ranked by them, where NVIDIA's backend `vllm` serves a pooling model."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import Response
from pydantic import Field
from pydantic_core import to_json

from trtserve.client.tensors import Reply
from trtserve.gateway.openai.bodies import Body, TokenId
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.served import Backend, ServedModel
from trtserve.gateway.replicas import Replica

Vectors = npt.NDArray[np.float32]

_INPUT = "embedding_request"
_MOST_INPUTS = 2048  # OpenAI's
_MOST_DIMENSIONS = 1 << 16
_AT_ONCE = 64


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=_MOST_DIMENSIONS)
    user: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each input, as text or as token ids. Raises ApiError for an empty one and for too many."""
        one = isinstance(self.input, str) or (bool(self.input) and isinstance(self.input[0], int))
        found: Any = [self.input] if one else self.input
        if not found or not all(found):
            raise ApiError("input must not be empty.", param="input")
        if len(found) > _MOST_INPUTS:
            raise ApiError(f"input has {len(found)} texts; at most {_MOST_INPUTS} are allowed.", param="input")
        return list(found)


class RerankBody(Body):
    """`POST /v1/rerank`, as Jina, Cohere and vLLM have it."""

    model: str
    query: str = Field(min_length=1)
    documents: list[str] = Field(min_length=1, max_length=_MOST_INPUTS - 1)
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True


async def embeddings(backend: Backend, served: ServedModel, body: EmbeddingBody) -> Response:
    """Return OpenAI's answer. Raises ApiError for a model that makes no vectors."""
    rows, tokens = await _vectors(backend, served, body.inputs, body.dimensions)
    return Response(await asyncio.to_thread(_written, body, rows, tokens), media_type="application/json")


def _written(body: EmbeddingBody, rows: Vectors, tokens: int) -> bytes:
    """Return OpenAI's answer as JSON; row by row, so that other threads run between: all take seconds."""
    data = []
    for index, row in enumerate(rows):
        vector = base64.b64encode(row.tobytes()).decode() if body.encoding_format == "base64" else row.tolist()
        data.append(to_json({"object": "embedding", "index": index, "embedding": vector}))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = to_json({"object": "list", "model": body.model, "usage": usage})
    return b'{"data":[' + b",".join(data) + b"]," + rest[1:]


async def rerank(backend: Backend, served: ServedModel, body: RerankBody) -> dict[str, Any]:
    """Return the documents by the cosine of their vectors and that of the query, the nearest first."""
    if not all(body.documents):
        raise ApiError("documents must not be empty.", param="documents")
    rows, tokens = await _vectors(backend, served, [body.query, *body.documents], None)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
    scores = rows[1:] @ rows[0]
    results = [
        {"index": int(index), "relevance_score": float(scores[index])}
        | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
        for index in np.argsort(-scores, kind="stable")[: body.top_n]
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage, "results": results}


async def _vectors(
    backend: Backend, served: ServedModel, inputs: list[str | list[int]], dimensions: int | None
) -> tuple[Vectors, int]:
    """Return a row for each input, and the tokens of all."""
    if _INPUT not in served.model.inputs:
        raise ApiError(
            f"The model `{served.name}` generates text; it has no embeddings and ranks no documents. A pooling model "
            'has them, which NVIDIA\'s backend vllm serves with "runner": "pooling" in model.json.',
            code="unsupported_endpoint",
        )
    for each in inputs:
        served.require_room(each)
    places = asyncio.Semaphore(_AT_ONCE)

    async def vector(given: str | list[int]) -> tuple[Vectors, int]:
        async with places:
            reply = await _ask(backend, served, {"input": given, "pooling_params": {"dimensions": dimensions}})
            row = json.loads(str(reply.outputs["text_output"].reshape(-1)[0]))  # here, one at a time: all take seconds
            return np.array(row, np.float32), int(reply.outputs["num_input_tokens"].item())

    # Cancelling a call can crash Triton's gRPC front end, so the others end by themselves when one has failed.
    replies = await asyncio.gather(*map(vector, inputs), return_exceptions=True)
    answers = [reply for reply in replies if not isinstance(reply, BaseException)]
    if len(answers) < len(replies):
        raise next(each for each in replies if isinstance(each, BaseException))
    return np.stack([row for row, _ in answers]), sum(tokens for _, tokens in answers)


async def _ask(backend: Backend, served: ServedModel, asked: dict[str, Any]) -> Reply:
    model, found = served.model, list[Reply]()
    tensors = [model.row_tensor(_INPUT, [[json.dumps(asked)]])]

    async def read(replica: Replica) -> None:
        async for reply in replica.client.infer(
            model,
            tensors,
            request_id=uuid.uuid4().hex,
            stream=True,
            outputs=("text_output", "num_input_tokens"),
            timeout=backend.timeout,
        ):
            found.append(reply)

    await backend.replicas.send(read, (), begun=lambda: bool(found))
    return found[0]
