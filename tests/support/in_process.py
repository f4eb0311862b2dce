"""The executor of an engine in the test's own process: the expected result of requests through Triton."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtserve.executor import api
from trtserve.executor.interface.results import Result

END_ID = 2


class InProcess:
    """The reference for requests through Triton; other tests verify the executor itself."""

    def __init__(self, engine: Path, **config: Any) -> None:
        """Load the engine; `config` are keywords of ExecutorConfig."""
        self._executor = api.Executor(engine, api.ModelType.DECODER_ONLY, api.ExecutorConfig(**config))

    def results(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        sampling: dict[str, Any] | None = None,
        output: dict[str, Any] | None = None,
        **request: Any,
    ) -> list[Result]:
        """Return every result of a request for `count` tokens that ends at the tiny models' end id."""
        asked = api.Request(
            list(prompt),
            count,
            sampling_config=api.SamplingConfig(**(sampling or {})),
            output_config=api.OutputConfig(**{"exclude_input_from_output": True, **(output or {})}),
            **{"end_id": END_ID, "pad_id": END_ID, **request},
        )
        number = self._executor.enqueue_request(asked)
        found: list[Result] = []
        while not found or not found[-1].is_final:
            responses: Any = self._executor.await_responses(number)
            found += [response.result for response in responses]
        return found

    def result(self, prompt: Sequence[int], count: int, **request: Any) -> Result:
        """Return the only result of a request."""
        (result,) = self.results(prompt, count, **request)
        return result

    def tokens(self, prompt: Sequence[int], count: int, **request: Any) -> list[int]:
        """New tokens of the first beam."""
        return self.result(prompt, count, **request).output_token_ids[0]

    def close(self) -> None:
        """Shut the executor down."""
        self._executor.shutdown()
