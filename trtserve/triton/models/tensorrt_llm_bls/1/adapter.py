"""The core model with the LoRA adapter that a request names: its tensors are sent only when they are not cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from inner_models import InnerModelError, Tensors, call_streamed, stop_request
from lora_names import NOT_CACHED, LoraNames, name_of


def adapter_of(inputs: Tensors) -> str | None:
    """The name under `lora_name`, one for all rows of the batch; None when there is none. ValueError otherwise."""
    name = name_of(inputs.get("lora_name"))
    if name and any(other in inputs for other in ("lora_task_id", "lora_weights", "lora_config")):
        raise ValueError("lora_name and lora_task_id were both given; each of them chooses the adapter.")
    return name


class CoreModel:
    """Asks the core model under one request id."""

    def __init__(
        self, model: str, request_id: str, *, lora: LoraNames, adapter: str | None, pushed: bool = False
    ) -> None:
        """ValueError for an adapter that the repository does not know."""
        self._pushed = pushed
        self._model = model
        self._request_id = request_id
        self._lora = lora
        self._adapter = adapter
        self._task_id = None if adapter is None else lora.task_id(adapter)

    def answers(self, inputs: Tensors, outputs: Sequence[str]) -> Iterator[Tensors]:
        """Every answer with tensors; InnerModelError carries the message of an error."""
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
                self.stop()  # another row may have found the adapter, when someone else just sent it
            weights, config = self._lora.tensors(self._adapter)
            tensors = {"lora_weights": np.repeat(weights, batch, axis=0), "lora_config": np.repeat(config, batch, 0)}
            yield from call_streamed(self._model, inputs | tensors, outputs, self._request_id, pushed=self._pushed)

    def stop(self) -> None:
        """Stop what is running under the request id."""
        stop_request(self._model, self._request_id)
