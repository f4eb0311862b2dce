"""Calls to the core model, with the tensors of a named LoRA adapter only when they are not cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..shared.arrays import Tensors
from ..shared.inner_models import InnerModelError, call_streamed, stop_request
from ..shared.lora_names import NOT_CACHED, LoraNames, name_of


def adapter_of(inputs: Tensors) -> str | None:
    """Return the name in `lora_name`, or None when there is none.

    Raises ValueError when rows differ, or ids are given too.
    """
    name = name_of(inputs.get("lora_name"))
    if name and any(other in inputs for other in ("lora_task_id", "lora_weights", "lora_config")):
        raise ValueError("lora_name and lora_task_id were both given; give only one of them.")
    return name


class CoreModel:
    """Calls the core model under one request id."""

    def __init__(
        self, model: str, request_id: str, *, lora: LoraNames, adapter: str | None, pushed: bool = False
    ) -> None:
        """Raise ValueError for an adapter that the repository does not have."""
        self._pushed = pushed
        self._model = model
        self._request_id = request_id
        self._lora = lora
        self._adapter = adapter
        self._task_id = None if adapter is None else lora.task_id(adapter)

    def answers(self, inputs: Tensors, outputs: Sequence[str]) -> Iterator[Tensors]:
        """Yield every answer with tensors; InnerModelError carries the core model's error message."""
        if self._adapter is None:
            yield from call_streamed(self._model, inputs, outputs, self._request_id, pushed=self._pushed)
            return
        batch = len(inputs["input_ids"])
        inputs = {**inputs, "lora_task_id": np.full((batch, 1), self._task_id, dtype=np.uint64)}
        begun = False
        try:
            for answer in call_streamed(self._model, inputs, outputs, self._request_id, pushed=self._pushed):
                begun = True
                yield answer
        except InnerModelError as error:
            if begun or NOT_CACHED not in str(error):
                raise
            if batch > 1:
                self.stop()  # another row may run, if another request has just sent the adapter
            weights, config = self._lora.tensors(self._adapter)
            tensors = {"lora_weights": np.repeat(weights, batch, axis=0), "lora_config": np.repeat(config, batch, 0)}
            yield from call_streamed(self._model, inputs | tensors, outputs, self._request_id, pushed=self._pushed)

    def stop(self) -> None:
        """Stop what runs under the request id."""
        stop_request(self._model, self._request_id)
