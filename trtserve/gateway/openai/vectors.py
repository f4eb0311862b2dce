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

from trtserve.client.tensors import ModelRequest, Reply
from trtserve.gateway.openai.bodies import Body, Listed, TokenId
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.served import Backend, ServedModel
from trtserve.gateway.replicas import Replica

Vectors = npt.NDArray[np.float32]

_INPUT = "embedding_request"
_MOST_INPUTS = 2048  # OpenAI's
MOST_DIMENSIONS = 1 << 16
_AT_ONCE = 64


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str = ""
    input: str | Listed[str] | Listed[TokenId] | Listed[Listed[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=MOST_DIMENSIONS)
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

    model: str = ""
    query: str = Field(min_length=1)
    documents: Listed[str] = Field(min_length=1, max_length=_MOST_INPUTS - 1)
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True


def makes_vectors(served: ServedModel) -> bool:
    """Return whether a model answers with vectors or scores, and writes no text."""
    return _INPUT in served.model.inputs


async def embeddings(backend: Backend, served: ServedModel, body: EmbeddingBody, *, plain: bool = False) -> Response:
    """Return OpenAI's answer, or a `plain` one of Ollama's. Raises ApiError for a model that makes no vectors."""
    rows, tokens = await _all(backend, served, [{"input": each} for each in body.inputs], body.dimensions)
    written = await asyncio.to_thread(_written, body, np.stack(rows), tokens, plain=plain)
    return Response(written, media_type="application/json")


def _written(body: EmbeddingBody, rows: Vectors, tokens: int, *, plain: bool) -> bytes:
    """Return the answer as JSON; row by row, so that other threads run between: all take seconds."""
    if plain:
        rest = to_json({"model": body.model, "prompt_eval_count": tokens})
        return b'{"embeddings":[' + b",".join(to_json(row.tolist()) for row in rows) + b"]," + rest[1:]
    data = []
    for index, row in enumerate(rows):
        vector = base64.b64encode(row.tobytes()).decode() if body.encoding_format == "base64" else row.tolist()
        data.append(to_json({"object": "embedding", "index": index, "embedding": vector}))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = to_json({"object": "list", "model": body.model, "usage": usage})
    return b'{"data":[' + b",".join(data) + b"]," + rest[1:]


async def rerank(backend: Backend, served: ServedModel, body: RerankBody) -> dict[str, Any]:
    """Return the documents by their scores, the best first.

    The score is that of a model which reads query and document together, else the cosine of their vectors.
    """
    if not all(body.documents):
        raise ApiError("documents must not be empty.", param="documents")
    (query,), tokens = await _all(backend, served, [{"input": body.query, "ranks": True}])
    pair = {} if query.ndim else {"query": body.query}  # see EmbeddingRequest
    rows, more = await _all(backend, served, [{"input": each, **pair} for each in body.documents])
    scores = np.concatenate(rows) if pair else _unit(np.stack(rows)) @ _unit(query)
    results = [
        {"index": int(index), "relevance_score": float(scores[index])}
        | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
        for index in np.argsort(-scores, kind="stable")[: body.top_n]
    ]
    usage = {"prompt_tokens": tokens + more, "total_tokens": tokens + more}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage, "results": results}


def _unit(rows: Vectors) -> Vectors:
    found: Vectors = rows / np.linalg.norm(rows, axis=-1, keepdims=True).clip(1e-12)
    return found


async def _all(
    backend: Backend, served: ServedModel, asked: list[dict[str, Any]], dimensions: int | None = None
) -> tuple[list[Vectors], int]:
    """Return an array for each request, and the tokens of all."""
    if not makes_vectors(served):
        raise ApiError(
            f"The model `{served.name}` generates text; it has no embeddings and ranks no documents. An "
            "embedding model or a reranker does, with --runtime vllm: `trtserve help how-to/vllm-repositories`.",
            code="unsupported_endpoint",
        )
    for each in asked:
        served.require_room(each["input"])
    places, failed = asyncio.Semaphore(_AT_ONCE), False

    async def one(request: dict[str, Any]) -> tuple[Vectors, int]:
        nonlocal failed
        async with places:
            if failed:
                raise asyncio.CancelledError
            try:
                reply = await _ask(backend, served, {"pooling_params": {"dimensions": dimensions}, **request})
            except BaseException:
                failed = True
                raise
            row = json.loads(str(reply.outputs["text_output"].reshape(-1)[0]))  # here, one at a time: all take seconds
            return np.array(row, np.float32), int(reply.outputs["num_input_tokens"].item())

    # When one has failed, or the client has gone, those that were sent end by themselves, because cancelling a call can
    # crash Triton's gRPC front end; the others are not sent.
    asking = asyncio.gather(*map(one, asked), return_exceptions=True)
    try:
        replies = await asyncio.shield(asking)
    except asyncio.CancelledError:
        failed = True
        await asking
        raise
    answers = [reply for reply in replies if not isinstance(reply, BaseException)]
    if len(answers) < len(replies):
        raise next((each for each in replies if isinstance(each, Exception)), asyncio.CancelledError())
    return [row for row, _ in answers], sum(tokens for _, tokens in answers)


async def _ask(backend: Backend, served: ServedModel, asked: dict[str, Any]) -> Reply:
    found = list[Reply]()
    request = ModelRequest(
        model=served.model,
        tensors=[served.model.row_tensor(_INPUT, [[json.dumps(asked)]])],
        id=uuid.uuid4().hex,
        stream=True,
        outputs=("text_output", "num_input_tokens"),
        timeout=backend.timeout,
    )

    async def read(replica: Replica) -> None:
        async for reply in replica.client.infer(request):
            found.append(reply)

    await backend.replicas.send(read, (), begun=lambda: bool(found))
    return found[0]
