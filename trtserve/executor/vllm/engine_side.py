"""vLLM's side of the vllm runtime: `AsyncLLM` in an interpreter of its own, which speaks over its standard streams.

It imports nothing of trtserve, because the interpreter has vLLM's packages. A frame is a MessagePack value behind its
length in four bytes (little endian):

- in: first `[arguments of the engine, adapters, place]`, then `["submit", number, request]` and `["cancel", number]`.
  The end of the input ends the engine.
- out: a list of `["ready", facts]`, `["stats", record]`, `["output", number, output]`, `["refused", number, reason]`,
  `["alive"]` and `["dead", reason]`.

On several nodes `place` is `[host, port, nodes]`, where `engine_side.py follow PORT` on each other node connects with
`{"node": number}` and gets the arguments. Each side ends when the other one does; `{}` announces an end in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import re
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
import psutil

_BEAT = 1.0
# A process may be stopped for this many beats, as by a program that looks at it.
_MOMENT = 2
_LENGTH = struct.Struct("<I")
# In vLLM's errors: a time and a place in C++, by xgrammar; what pydantic adds; "above", where the log has more.
_NOISE = re.compile(
    r"\[[\d:]+\] \S+:\d+: |\s*\[type=\w+, input_value=.*\]|\s*For further information visit \S+"
    r"|\. See (?:stack trace \(above\) for the root cause\.$|root cause above\..*)"
)
_LAST_SECONDS = 8.0  # after the end of the input vLLM has this many seconds to end its processes
# Of several nodes: how long a follower looks for its leader, and goes on without it after it was asked to end.
_LONGEST_SEARCH, _LONGEST_END = 600.0, 60.0
_LONGEST_FRAME = 1 << 20
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MOST_IMAGES = 64  # of a request, as in gateway/openai/images.py
_MOST_PIXELS, _MOST_PIXELS_TOGETHER = 40_000_000, 64_000_000  # a pixel takes 4 bytes while it is decoded, then 3
LEADER, NODE = "TRTSERVE_VLLM_LEADER", "TRTSERVE_VLLM_NODE"

Message = list[Any]
_decode = msgspec.msgpack.decode


def _frame(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    return _LENGTH.pack(len(data)) + data


class EngineSide:
    """One AsyncLLM on the event loop of the main thread; another thread reads the input."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._unsent: list[Message] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopped: dict[int, int] = {}
        self._followers: list[Peer] = []
        self._flushing = threading.Lock()
        self._ending = False

    async def run(self) -> None:
        """Start the engine, and serve until the input ends or the engine is dead."""
        self._loop = asyncio.get_running_loop()
        first = self._read()
        if first is None:
            return
        arguments, adapters, place = first
        if place is not None:
            self._gather(arguments, *place)
        self._llm = _start(arguments, self)
        for adapter in adapters:
            # A damaged one would end the engine with the first request that names it.
            await self._llm.add_lora(_lora(adapter))
        self._emit(["ready", _facts(self._llm.vllm_config)])
        threading.Thread(target=self._listen, daemon=True, name="input").start()
        while not self._llm.errored:
            self._emit(["alive"])
            self._require_running()
            await asyncio.sleep(_BEAT)
        self.die(_reason(self._llm.dead_error))

    def _gather(self, arguments: dict[str, Any], host: str, port: int, nodes: int) -> None:
        """Wait for the followers on all other nodes, and tell them what to start."""
        parent, found = os.getppid(), dict[int, Peer]()
        with socket.create_server((host, port)) as server:
            server.settimeout(1)
            while len(found) < nodes - 1:
                if os.getppid() != parent:
                    end_group()
                with contextlib.suppress(OSError):
                    peer = Peer(server.accept()[0])
                    node = (peer.receive() or {}).get("node")
                    if isinstance(node, int) and 0 < node < nodes and node not in found:
                        found[node] = peer
                        sys.stderr.write(f"The follower on node {node} is here; {len(found)} of {nodes - 1}.\n")
        self._followers = list(found.values())
        for node, peer in found.items():
            peer.send({**arguments, "node_rank": node})
            peer.watch(functools.partial(self._lost, node))

    def _lost(self, node: int, _: object) -> None:
        if not self._ending:
            self.die(f"the follower on node {node} has ended")

    def record(self, statistics: dict[str, Any]) -> None:
        """Send the statistics of one iteration. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._emit, ["stats", statistics])

    def die(self, reason: str) -> None:
        """Say why the engine is dead, and end all of its processes."""
        self._unsent.append(["dead", reason])
        self._flush()
        end_group()

    def _read(self) -> Any:
        head = self._source.read(_LENGTH.size)
        return _decode(self._source.read(_LENGTH.unpack(head)[0])) if len(head) == _LENGTH.size else None

    def _listen(self) -> None:
        while (message := self._read()) is not None:
            kind, number, *rest = message
            act = self._submit if kind == "submit" else self._cancel
            self._loop.call_soon_threadsafe(act, number, *rest)
        self._ending = True
        for peer in self._followers:
            peer.send({})
        # Nothing else can be answered: end vLLM's processes in order, then whatever is left of them.
        threading.Timer(_LAST_SECONDS, end_group).start()
        with contextlib.suppress(Exception):
            self._llm.shutdown()
        end_group()

    def _submit(self, number: int, request: dict[str, Any]) -> None:
        self._tasks[number] = self._loop.create_task(self._serve(number, request))

    def _cancel(self, number: int) -> None:
        if (task := self._tasks.get(number)) is not None:
            task.cancel()  # which aborts the request in vLLM

    async def _serve(self, number: int, request: dict[str, Any]) -> None:
        try:
            if "pooling" in request:
                self._emit(["output", number, await self._pooled(number, request)])
                return
            lora, tops = _lora(request.get("lora")), request.get("tops", 0)
            prompt = _prompt(request, self._llm.vllm_config.model_config)
            if images := request.get("images"):
                prompt["multi_modal_data"] = {"image": await asyncio.to_thread(_images, images)}
            if "salt" in request:
                prompt["cache_salt"] = request["salt"]
            params, priority = _sampling_params(request), request.get("priority", 0)
            async for answer in self._llm.generate(prompt, params, str(number), lora_request=lora, priority=priority):
                made = _texts(answer) if "text" in request else _output(answer, tops, counts=bool(images))
                self._emit(["output", number, made])
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - without an answer the client would wait for ever
            if self._llm.errored:
                self.die(_reason(error))
            self._emit(["refused", number, _reason(error)])
        finally:
            self._tasks.pop(number, None)

    async def _pooled(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """Return the vector of a text, or the score of a text for a query.

        A model that only scores pairs has no vector for a query that is going to rank texts.
        """
        tasks, query = await self._llm.get_supported_tasks(), request.get("query")
        makes_vectors = "embed" in tasks
        if not makes_vectors and "classify" not in tasks:
            raise ValueError(f"the model has no vectors or scores of whole texts; it is for {', '.join(tasks)}")
        if request.get("ranks") and not makes_vectors:
            return {"finished": True, "prompt_tokens": 0, "vector": None}
        if makes_vectors == (query is not None):
            raise ValueError(
                "the model makes vectors of texts, and reads no pairs of query and document"
                if makes_vectors
                else "the model makes no vectors: it reads query and document together, which /v1/rerank does"
            )
        from vllm import PoolingParams

        params = PoolingParams(task="embed" if makes_vectors else "classify", **request["pooling"])
        prompt = {"prompt": request["text"]} if "text" in request else {"prompt_token_ids": request["prompt"]}
        if query is not None:
            if not self._llm.vllm_config.model_config.use_sep_token:
                raise ValueError("the model reads query and document in a template of its own, which is not supported")
            pair = self._llm.get_tokenizer()(text=query, text_pair=request["text"])
            prompt = {"prompt_token_ids": pair["input_ids"]}
            if 1 in (kinds := pair.get("token_type_ids") or ()):  # vLLM takes the place where the second text begins
                params.extra_kwargs = {"compressed_token_type_ids": kinds.index(1)}
        (answer,) = [each async for each in self._llm.encode(prompt, params, str(number))]
        vector = answer.outputs.data.reshape(-1).tolist()
        if query is not None and len(vector) != 1:
            raise ValueError(f"the model sorts texts into {len(vector)} classes, and scores no documents")
        return {"finished": True, "prompt_tokens": len(answer.prompt_token_ids), "vector": vector}

    def _emit(self, message: Message) -> None:
        """Send a message together with all others of this turn of the loop."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        with self._flushing:
            messages, self._unsent = self._unsent, []
            if not messages:
                return
            try:
                self._target.write(_frame(messages))
                self._target.flush()
            except BrokenPipeError:
                end_group()

    def _require_running(self) -> None:
        """A process of vLLM that stays stopped will not answer, and vLLM would wait for it for ever."""
        stopped: dict[int, int] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    stopped[process.pid] = self._stopped.get(process.pid, 0) + 1
                    if stopped[process.pid] > _MOMENT:
                        self.die(f"vLLM's process {process.pid} ({process.name()}) is stopped")
        self._stopped = stopped


class Peer:
    """A connection between the leader and a follower; each message is a frame with a map."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(5)  # for the first message
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may go without a word
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._file = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the other side is gone."""
        with contextlib.suppress(OSError):
            self._connection.sendall(_frame(message))

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None when the other side is gone or says something else."""
        try:
            (size,) = _LENGTH.unpack(self._file.read(_LENGTH.size))
            found = _decode(self._file.read(size)) if size <= _LONGEST_FRAME else None
        except (OSError, ValueError, struct.error):
            return None
        return found if isinstance(found, dict) else None

    def watch(self, ended: Callable[[dict[str, Any] | None], object]) -> None:
        """Call `ended` in a thread, with the next message or None."""
        self._connection.settimeout(None)
        threading.Thread(target=lambda: ended(self.receive()), daemon=True).start()


def follow(port: int) -> None:
    """Start this node's workers for the leader, and end with it.

    Two processes do it: a worker whose parent was killed may wait for the other nodes for ever, so each of the two ends
    all others when its partner has ended.
    """
    guard, end = os.getpid(), end_children
    if child := os.fork():  # nothing has started a thread yet

        def pass_on(*_: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(child, signal.SIGTERM)

        signal.signal(signal.SIGTERM, pass_on)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            for _ in range(20):  # Python's resource tracker ends last
                os.killpg(child, 0)
                time.sleep(0.1)
            os.killpg(child, signal.SIGKILL)
        os._exit(code if code >= 0 else 1)
    os.setpgid(0, 0)
    threading.Thread(target=_end_after, args=(guard,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: threading.Timer(_LONGEST_END, end, [0]).start())
    leader, until = None, time.monotonic() + _LONGEST_SEARCH
    while leader is None:
        with contextlib.suppress(OSError):
            leader = Peer(socket.create_connection((os.environ[LEADER], port), timeout=5))
            break
        if time.monotonic() > until:
            raise SystemExit(f"{os.environ[LEADER]}:{port} does not answer.")
        time.sleep(1)
    leader.send({"node": int(os.environ[NODE])})
    leader._connection.settimeout(_LONGEST_SEARCH)  # noqa: SLF001 - until all followers are there
    arguments = leader.receive()
    if not arguments:
        raise SystemExit("The leader has ended before it said what to start.")
    leader.watch(lambda message: end(1 if message is None else 0))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    time.sleep(1)  # the leader ends its workers too, and says so
    end(1)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    end_children(1)


def end_children(code: int) -> None:
    """End this process and all that it has started, but for Python's resource tracker, as in `end_group`."""
    for process in psutil.Process().children(recursive=True):
        _end(process)
    os._exit(code)


def end_group() -> None:
    """End this process and all processes of vLLM, which are in its group, and remove their sockets.

    Python's resource tracker is left: it ends after the last of them, and removes their shared memory.
    """
    try:
        for _ in range(2):  # what a process has started meanwhile, too
            for process in psutil.process_iter():
                with contextlib.suppress(OSError):
                    if os.getpgid(process.pid) == os.getpid() != process.pid:
                        _end(process)
        if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(1)


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        if not any("resource_tracker" in word for word in process.cmdline()):
            process.kill()


def _start(arguments: dict[str, Any], side: EngineSide) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Reporter(StatLoggerBase):  # type: ignore[misc]
        """Sends the statistics of each iteration."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                side.record(_statistics(scheduler_stats, iteration_stats))

        def log_engine_initialized(self) -> None:
            """Nothing is logged."""

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Reporter])


def _facts(config: Any) -> dict[str, Any]:
    import vllm

    cache, model = config.cache_config, config.model_config
    return {
        "version": vllm.__version__,
        "max_model_len": model.max_model_len,
        "vocab_size": model.get_vocab_size(),
        "hidden_size": model.get_hidden_size(),
        "blocks": cache.num_gpu_blocks or 0,
        "tokens_per_block": cache.block_size or 1,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def _statistics(scheduler: Any, iteration: Any) -> dict[str, Any]:
    """Return what the releases 0.19 – 0.33 have in common; counts are those of one iteration."""
    prefix = getattr(scheduler, "prefix_cache_stats", None)
    drafts = getattr(scheduler, "spec_decoding_stats", None)
    return {
        "active": scheduler.num_running_reqs,
        "queued": scheduler.num_waiting_reqs,
        "usage": scheduler.kv_cache_usage,
        "queried": getattr(prefix, "queries", 0),
        "reused": getattr(prefix, "hits", 0),
        "context_tokens": getattr(iteration, "num_prompt_tokens", 0),
        "generated_tokens": getattr(iteration, "num_generation_tokens", 0),
        "contexts": len(getattr(iteration, "time_to_first_tokens_iter", ())),
        "generations": len(getattr(iteration, "inter_token_latencies_iter", ())),
        "completed": len(getattr(iteration, "finished_requests", ())),
        "paused": getattr(iteration, "num_preempted_reqs", 0),
        "drafts": None
        if drafts is None
        else [drafts.num_draft_tokens, drafts.num_accepted_tokens, getattr(drafts, "num_drafts", 0)],
    }


def _sampling_params(request: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    words = dict(request["sampling"])
    if "guide" in request:
        words["structured_outputs"] = StructuredOutputsParams(**request["guide"])
    kind = RequestOutputKind.DELTA if request["stream"] else RequestOutputKind.FINAL_ONLY
    if "text" in request:  # any of vLLM's parameters, whose numbers may be texts
        unknown = next((name for name in words if name not in SamplingParams.__annotations__), None)
        if unknown is not None:
            raise ValueError(f"sampling_parameters: vLLM's SamplingParams has no {unknown}")
        params = msgspec.convert(words, SamplingParams, strict=False)
        params.output_kind = kind
        return params
    params = SamplingParams(**words, detokenize=False, output_kind=kind)
    if "bad_words" in request:
        # The public field takes texts, and encodes them again.
        params._bad_words_token_ids = request["bad_words"]  # noqa: SLF001
    return params


def _prompt(request: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the prompt; ids beyond the vocabulary are rows of the request's table."""
    if "text" in request:
        return {"prompt": request["text"]}
    ids = request["prompt"]
    if "table" not in request:
        return {"prompt_token_ids": ids}
    import torch

    vocabulary, width, data = request["table"]
    table = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(-1, width)
    known = [token < vocabulary for token in ids]
    embeds = torch.zeros(len(ids), width, dtype=model.dtype)
    for place, token in enumerate(ids):
        if token >= vocabulary:
            embeds[place] = table[token - vocabulary]
    tokens = [token if is_known else 0 for token, is_known in zip(ids, known, strict=True)]
    return {"prompt_embeds": embeds, "prompt_token_ids": tokens, "prompt_is_token_ids": known}


def _images(files: list[bytes]) -> list[Any]:
    """Decode images. The size in the head of a file is checked before its content takes memory."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(files) > _MOST_IMAGES:
        raise ValueError(f"the request has {len(files)} images; at most {_MOST_IMAGES} are allowed")
    made, together = [], 0
    for number, data in enumerate(files):
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                pixels = image.width * image.height
                together += pixels
                fits = pixels <= _MOST_PIXELS and together <= _MOST_PIXELS_TOGETHER
                upright = ImageOps.exif_transpose(image) if fits else None
        except UnidentifiedImageError:
            raise ValueError(f"image {number} cannot be read: it is damaged, or no image") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"image {number} cannot be read: {error}") from None
        if upright is None:
            raise ValueError(
                f"image {number} has {pixels} pixels, and with those before it the request has {together}; an image "
                f"may have {_MOST_PIXELS}, a request {_MOST_PIXELS_TOGETHER}: make the images smaller"
            )
        if upright.has_transparency_data:  # it is seen on white
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
        made.append(upright.convert("RGB"))
    return made


def _reason(error: object) -> str:
    """Return what an error says to people who do not see where it was raised."""
    return _NOISE.sub("", str(error)) or type(error).__name__


def _lora(given: Any) -> Any:
    if given is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(*given)


def _output(answer: Any, tops: int, *, counts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "finished": answer.finished,
        "cached": getattr(answer, "num_cached_tokens", None) or 0,
        "sequences": [_sequence(each, tops) for each in answer.outputs],
    }
    if counts:
        found["prompt_tokens"] = len(answer.prompt_token_ids)
    if (times := getattr(answer, "metrics", None)) is not None:
        found["times"] = [times.scheduled_ts, times.first_token_ts, times.last_token_ts]
    if getattr(answer, "prompt_logprobs", None):
        rows = list(zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True))[1:]  # the first has none
        found["prompt"] = [[row[token].logprob for token, row in rows], [_best(row, tops) for _, row in rows]]
    return found


def _texts(answer: Any) -> dict[str, Any]:
    """Return what NVIDIA's backend `vllm` answers."""
    sequences = [
        {
            "index": each.index,
            "text": each.text,
            "tokens": len(each.token_ids),
            "reason": each.finish_reason,
            "cumulative": each.cumulative_logprob,
            "logprobs": None
            if each.logprobs is None
            else [
                {
                    str(token): {"logprob": found.logprob, "rank": found.rank, "decoded_token": found.decoded_token}
                    for token, found in row.items()
                }
                for row in each.logprobs
            ],
        }
        for each in answer.outputs
    ]
    return {"finished": answer.finished, "prompt_tokens": len(answer.prompt_token_ids or ()), "sequences": sequences}


def _sequence(output: Any, tops: int) -> dict[str, Any]:
    tokens = list(output.token_ids)
    found = {"index": output.index, "tokens": tokens, "reason": output.finish_reason}
    if output.logprobs is not None:
        found["log_probs"] = [each[token].logprob for token, each in zip(tokens, output.logprobs, strict=False)]
        if tops:
            found["tops"] = [_best(each, tops) for each in output.logprobs]
    return found


def _best(row: Any, count: int) -> list[Any]:
    """Return the `count` most likely tokens, as [id, log-probability]; vLLM's row also has the token itself."""
    ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)
    return [[token, each.logprob] for token, each in ranked[:count]]


def main() -> None:
    """Serve until the input ends."""
    if sys.path and sys.path[0] == os.path.dirname(__file__):  # noqa: PTH120 - as Python itself has spelled it
        del sys.path[0]  # the modules beside this one are not vLLM's
    if sys.argv[1:2] == ["follow"]:
        follow(int(sys.argv[2]))
        return
    # What vLLM and its libraries print goes to the log, which is the standard error output.
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(PermissionError):  # it leads a group already
        os.setpgid(0, 0)
    side = EngineSide(sys.stdin.buffer, target)
    try:
        asyncio.run(side.run())
    except BaseException as error:  # noqa: BLE001 - the other side is told why, whatever it is
        traceback.print_exc()
        side.die(f"{type(error).__name__}: {_reason(error)}")


if __name__ == "__main__":
    main()
