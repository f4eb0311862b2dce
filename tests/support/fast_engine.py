"""`python -m tests.support.fast_engine REPOSITORY PORT SECONDS`: a stand-in for Triton that costs next to nothing.

It describes the models of a repository, and answers every request of the core model with one token in each step of
SECONDS: the same bytes, made once, so that what is measured is the gateway in front.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2

from trtserve.client.grpc_transport import CHANNEL_OPTIONS

TOKEN = 40


def _response(*, last: bool) -> bytes:
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    inner.model_name = "tensorrt_llm"
    for name, values in (("output_ids", [[[TOKEN]]]), ("sequence_length", [[1]])):
        array = np.array(values, dtype=np.int32)
        inner.outputs.add(name=name, datatype="INT32", shape=array.shape)
        inner.raw_output_contents.append(array.tobytes())
    if last:
        inner.parameters["finish_reason"].string_param = "length"
    return bytes(answer.SerializeToString())


class FastEngine(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Triton's service, as far as a gateway calls it."""

    def __init__(self, repository: Path, step: float) -> None:
        self._step = step
        self._configs = {}
        for file in repository.glob("*/config.pbtxt"):
            config = model_config_pb2.ModelConfig()
            text_format.Parse(file.read_text(), config)
            self._configs[config.name] = config
        self._token, self._last = _response(last=False), _response(last=True)

    def service(self, handler_call_details: Any) -> Any:
        """Return what answers a method."""
        method = handler_call_details.method.rpartition("/")[2]
        return grpc.stream_stream_rpc_method_handler(getattr(self, f"_{method}", self._nothing))

    async def _nothing(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fast engine does not do this")

    async def _RepositoryIndex(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: N802 - gRPC's name
        index = service_pb2.RepositoryIndexResponse()
        for name in self._configs:
            index.models.add(name=name, version="1", state="READY")
        await context.write(index.SerializeToString())

    async def _ModelConfig(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: N802 - gRPC's name
        async for request in requests:
            name = service_pb2.ModelConfigRequest.FromString(request).name
            answer = service_pb2.ModelConfigResponse(config=self._configs[name])
            await context.write(answer.SerializeToString())

    async def _ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: N802 - gRPC's name
        async for request in requests:
            asked = service_pb2.ModelInferRequest.FromString(request)
            names = [each.name for each in asked.inputs]
            if "request_output_len" not in names:
                continue
            raw = asked.raw_input_contents[names.index("request_output_len")]
            for left in range(int(np.frombuffer(raw, np.int32)[0]) - 1, -1, -1):
                await asyncio.sleep(self._step)
                await context.write(self._token if left else self._last)


async def _serve(repository: Path, port: int, step: float) -> None:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((FastEngine(repository, step),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
