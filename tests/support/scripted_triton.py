"""A stand-in for the Triton server behind the OpenAI endpoint: it answers every request with tokens of a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.described_models import described
from trtserve.client.endpoint import Endpoint
from trtserve.client.tensors import ModelRequest, Reply
from trtserve.client.tokenizer import _RENDERER, TokenizerFiles
from trtserve.gateway.openai.encoding import Encoder
from trtserve.gateway.openai.images import ImageSources
from trtserve.gateway.openai.served import Backend, QuietMoment, ServedModel
from trtserve.gateway.replicas import Replicas
from trtserve.programs.shared.tokenizer import AnchoredDecoder

NAME = "scripted"


class ScriptedTriton(Backend):
    """A server with one core model. `script` is the text of every answer; an error in it is raised at its place."""

    def __init__(self, folder: Path, *, decoupled: bool = True, text: bool = False, logits: bool | None = None) -> None:
        self._lock, self._tasks, self.timeout = asyncio.Lock(), set(), 5.0
        self._endpoint, self.replicas, self.images = Endpoint(), Replicas(Endpoint()), ImageSources()
        self.quiet_moment = QuietMoment()
        self.replicas.first.__dict__["client"] = self  # it answers itself
        files = TokenizerFiles(folder)
        core = described("tensorrt_llm", decoupled=decoupled)
        bls = described("tensorrt_llm_bls", decoupled=decoupled)
        self.files = files
        encoder = Encoder(files)
        for lane in encoder._lanes:  # unit tests start no process
            lane.process = None
            lane.templates = _RENDERER
        self._served = (
            ServedModel(
                name=NAME,
                model=bls if text else core,
                core=core,
                files=files,
                decoder=AnchoredDecoder(files.tokenizer, skip_special_tokens=True),
                encoder=encoder,
                adds_special=True,
                vocab_size=len(files.tokenizer),
                max_seq_len=512,
                adapters=None,
                context_logits=logits,
                generation_logits=logits,
            ),
        )
        self.reset()

    def reset(self) -> None:
        """Set the usual script, and forget all requests."""
        self.script: Sequence[str | Exception] = ("Hello",)
        self.pause = 0.0
        """Seconds between two tokens."""
        self.finish_reason = "end_id"
        self.lowest = 0.0
        """Logit of all tokens but the script's."""
        self.returns_context = True
        """Whether it returns logits of prompts."""
        self.requests: list[dict[str, Any]] = []
        self.stops: list[str] = []
        self.running = self.most_running = 0
        """Requests now, and the most at once."""

    async def close(self) -> None:
        """Wait for what runs beside the requests of the endpoint that closes; there may be a second one."""
        if own := [task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()]:
            await asyncio.wait(own, timeout=5)

    async def infer(self, request: ModelRequest) -> AsyncIterator[Reply]:
        """Answer one request, as a transport does."""
        inputs = {tensor.name: tensor.flat() for tensor in request.tensors}
        if inputs.get("stop"):
            self.stops.append(request.id)
            return
        self.requests.append(inputs)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for reply in self._replies(inputs, request.id):
                yield reply
        finally:
            self.running -= 1

    async def _replies(self, inputs: dict[str, Any], request_id: str) -> AsyncIterator[Reply]:
        steps = self._steps()
        if not (inputs.get("streaming") or inputs.get("stream") or [False])[0]:
            errors = [step for step in steps if isinstance(step, Exception)]
            steps = [*errors, [token for step in steps if isinstance(step, list) for token in step]]
        sent: list[int] = []
        for step in steps:
            await asyncio.sleep(self.pause)
            if isinstance(step, Exception):
                raise step
            if request_id in self.stops:
                return
            sent += step
            yield self._reply(step, sent, inputs, last=step is steps[-1])

    def _steps(self) -> list[Any]:
        """Return one token per step, and the errors."""
        steps: list[Any] = []
        for part in self.script:
            if isinstance(part, Exception):
                steps.append(part)
            else:
                steps += [[token] for token in self.files.encode(part, special=False)]
        return steps

    def _reply(self, step: list[int], sent: list[int], inputs: dict[str, Any], *, last: bool) -> Reply:
        outputs: dict[str, Any] = {
            "output_ids": np.array([[step]], dtype=np.int32),
            "sequence_length": np.array([[len(step)]], dtype=np.int32),
            "text_output": np.array([self.files.decode(step)], dtype=object),
        }
        if inputs.get("return_num_output_tokens", [False])[0]:
            outputs["num_output_tokens"] = np.array([[len(step)]], dtype=np.int32)
        if inputs.get("return_log_probs", [False])[0]:
            outputs["output_log_probs"] = np.array([[[-0.5] * len(sent)]], dtype=np.float32)
        if inputs.get("return_generation_logits", [False])[0]:
            logits = np.full((1, len(step), 1, len(self.files.tokenizer)), self.lowest, dtype=np.float32)
            for place, token in enumerate(step):
                logits[0, place, 0, token] = 9.0
            outputs["generation_logits"] = logits
        if inputs.get("return_context_logits", [False])[0] and self.returns_context:
            ids = inputs["input_ids"]
            logits = np.zeros((1, len(ids), len(self.files.tokenizer)), dtype=np.float32)
            for place, token in enumerate(ids[1:]):
                logits[0, place, token] = 9.0
            outputs["context_logits"] = logits
        return Reply(outputs=outputs, parameters={"finish_reason": self.finish_reason} if last else {})
