"""vLLM in process, for comparison; vLLM's own interpreter runs it: `vllm_alone.py JSON` prints a JSON object a line.

It imports nothing of trtserve. JSON has `arguments` of AsyncEngineArgs, and `loads`, each the streams and the number of
requests. Prompts are random tokens, answers have their full length.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

PROMPT, ANSWER = 512, 128
BEGIN = time.perf_counter()


async def main(given: dict[str, Any]) -> None:
    """Start the engine, and put each load on it."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given["arguments"]))
    vocabulary = llm.vllm_config.model_config.get_vocab_size()
    draw = random.Random(1)

    async def answer(number: str, count: int = ANSWER, prompt: list[int] | None = None) -> list[int]:
        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        ids = prompt or [draw.randrange(3, vocabulary) for _ in range(PROMPT)]
        found: list[int] = []
        async for output in llm.generate({"prompt_token_ids": ids}, params, number):
            found += output.outputs[0].token_ids
        return found

    async def load(streams: int, requests: int) -> int:
        numbers = iter(range(requests))

        async def user() -> int:
            return sum([len(await answer(f"{streams}-{requests}-{number}")) for number in numbers])

        return sum(await asyncio.gather(*(user() for _ in range(streams))))

    await answer("first", 1, [1, 2, 3])
    print(json.dumps({"first_answer_seconds": time.perf_counter() - BEGIN}), flush=True)
    for prompt in given.get("prompts", []):
        print(json.dumps({"tokens": await answer(str(prompt), given["count"], prompt)}), flush=True)
    for streams, requests in given.get("loads", []):
        await load(streams, streams)  # what is compiled at first use
        begin = time.perf_counter()
        tokens = await load(streams, requests)
        print(json.dumps({"streams": streams, "tokens_per_second": tokens / (time.perf_counter() - begin)}), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
