"""The functions of `import trtserve`: what the commands do, for Python programs and their tests.

`trtserve/__init__.py` offers them under the package's own name and loads this module when a name is first used.
"""

from __future__ import annotations

import asyncio
import itertools
import reprlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

from trtserve.artifacts import ModelRepository
from trtserve.client.answer import Answer, Generation
from trtserve.client.endpoint import Endpoint, Tls
from trtserve.client.grpc_transport import GrpcTransport
from trtserve.client.query import Pieces, connect, generate, request_contexts, request_id_of, stop_in_engine, stream
from trtserve.client.request import RequestContext, model_request
from trtserve.client.spec import REQUEST_OPTIONS, QuerySpec
from trtserve.client.tensors import CORE_MODEL
from trtserve.errors import LockedError, RequestError, UsageError, did_you_mean
from trtserve.files import locked, whole_number
from trtserve.pipeline.import_spec import resolve_import
from trtserve.pipeline.importing import import_to_repository
from trtserve.pipeline.world_size import repository_for
from trtserve.progress import SILENT, Progress
from trtserve.server.detach import start_in_background
from trtserve.server.discovery import endpoint_of, find_server
from trtserve.server.plan import with_free_ports
from trtserve.server.repositories import find_repository
from trtserve.server.shutdown import stop_server
from trtserve.server.state import Server, recorded_server
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.command_line import spec_of
from trtserve.specs.options import Option, options_of
from trtserve.store import Store


@contextmanager
def serve(
    model: str | Path | ModelRepository | None = None,
    *,
    name: str | None = None,
    triton_arguments: tuple[str, ...] = (),
    progress: Progress = SILENT,
    **options: Any,
) -> Iterator[Server]:
    """Serve a model with Triton until the end of the `with` block.

    Several servers, also of other processes, do not disturb each other: each gets ports and a name of its own. The
    server ends with this process, also when that is killed.

    Args:
        model: Name of an import, path of a model repository, or what `import_model` returned; default: the last import.
        name: Name of the server; default: the model's, with a number while another server has it.
        triton_arguments: Flags for tritonserver, passed on unchanged.
        progress: Receives the steps and warnings; default: nothing is reported.
        options: The options of `trtserve start` with underscores, such as `ui=True` or `ready_timeout=60`. A port that
            is taken is replaced by the next free one, unless `auto_ports=False`.

    Yields:
        The server, when all its models are ready: `url` is where it answers HTTP (OpenAI's API under `/v1`),
        `address.grpc_port` and `address.metrics_port` are its other ports, `name` and `model` its names.

    Raises:
        UsageError: an option does not exist, or its value cannot work.
        ModelNotFoundError, RepositoryError: there is no such model, or its repository is damaged.
        ServerStartError, PortInUseError, MachineError: the server did not become ready; the message quotes its log.
    """
    require_known(options, set(options_of(ServerSpec)), "trtserve.serve")
    spec = replace(spec_of(ServerSpec, {"auto_ports": True, **options}), extra_arguments=tuple(triton_arguments))
    repository = repository_for(_repository(model), spec, progress=progress)
    with _name_of(repository, name) as chosen:
        placed = with_free_ports(spec) if spec.auto_ports else spec
        placed = replace(placed, name=chosen)
        server = start_in_background(repository, placed, bound=True, progress=progress)
        try:
            yield server
        finally:
            if recorded_server(chosen, Store()) is not None:
                stop_server(chosen, progress=progress)


def _repository(model: str | Path | ModelRepository | None) -> ModelRepository:
    if isinstance(model, ModelRepository):
        return find_repository(path=model.path)
    if isinstance(model, Path) or (model is not None and "/" in model):
        return find_repository(path=Path(model).expanduser())
    return find_repository(model)


@contextmanager
def _name_of(repository: ModelRepository, name: str | None) -> Iterator[str]:
    """Keep a name for the length of the block, so that servers that start at the same time do not choose the same."""
    if name is not None:
        yield name
        return
    store = Store()
    with ExitStack() as held:
        for number in itertools.count(1):
            chosen = repository.name if number == 1 else f"{repository.name}-{number}"
            other = recorded_server(chosen, store)
            if other is None or not other.alive():
                try:
                    held.enter_context(locked(store.root / "locks" / f"serve-{chosen}.lock", wait=False))
                except LockedError:
                    continue
                yield chosen
                return


_SPECS = (ConvertSpec, BuildSpec, RepositorySpec)


def import_model(
    source: str | Path,
    *,
    name: str | None = None,
    tokenizer: str | Path | None = None,
    draft: str | Path | None = None,
    out: str | Path | None = None,
    token: str | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> ModelRepository:
    """Download a model, convert it, build its engine and assemble its Triton model repository.

    What exists is reused, so calling it again returns at once. Artefacts are kept in `$TRTSERVE_HOME`.

    Args:
        source: `demo`, an alias (`trtserve models`), `org/name` or `org/name@revision` of the hub, or a folder.
        name: Name of the model; default: the alias, the last part of the id, or the folder.
        tokenizer: Folder of another tokenizer, or the name of an imported model.
        draft: Engine of a smaller model that proposes tokens: a folder, or the name of an imported model.
        out: Folder of the repository; default: in the store.
        token: Token of the hub for gated models; default: the one of `hf auth login` or `$HF_TOKEN`.
        progress: Receives the steps and warnings; default: nothing is reported.
        options: The options of `trtserve import` with underscores, such as `quantize="int8"` or `max_batch_size=8`.

    Raises:
        UsageError: an option does not exist, or its value cannot work.
        ModelNotFoundError, AccessDeniedError, NetworkError: the model cannot be downloaded.
        UnsupportedModelError, ConversionError, BuildError, RepositoryError: a stage failed.
        DiskSpaceError, MemoryLimitError: the model is too large for this machine.
    """
    known = {key for spec in _SPECS for key in options_of(spec)} - {"name"}
    require_known(options, known, "trtserve.import_model")
    spec = resolve_import(
        str(source),
        name=name,
        convert=spec_of(ConvertSpec, options),
        build=spec_of(BuildSpec, options),
        repository=spec_of(RepositorySpec, options),
        tokenizer=None if tokenizer is None else str(tokenizer),
        draft=None if draft is None else str(draft),
        out=None if out is None else Path(out),
        progress=progress,
    )
    return import_to_repository(spec, token=token, progress=progress)


def require_known(options: dict[str, Any], known: set[str], function: str) -> None:
    """Raise UsageError for an option that `function` does not have."""
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known, f"Known: {', '.join(sorted(known))}.")
            raise UsageError(f"{function} has no option {name!r}.", hint=hint)


Prompt = str | Sequence[int]
"""A text, or the token ids of a core model."""
Turns = Sequence[Mapping[str, str]]
"""Earlier turns of a conversation: `role` and `content`."""

_OPTIONS = {name: option for name, option in options_of(QuerySpec).items() if name not in ("stream", "batch", "system")}
_OPTIONS |= REQUEST_OPTIONS


class Asker:
    """A server, and the defaults of all requests to it."""

    def __init__(
        self,
        server: Server | str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Choose the server; nothing is sent.

        Args:
            server: What `serve` yields, the name of a running server, or `host:port` of the gRPC service of any Triton;
                default: the only server that runs here.
            model: Triton model to ask; default: the name under which the model is served.
            api_key: API key of a server elsewhere; that of a server which this user started is found.
            tls: Certificates of an encrypted connection; those of a server which this user started are found.
            timeout: Longest wait for a whole answer, in seconds.

        Raises:
            ServerNotFoundError, ServerAmbiguousError: no server, or more than one, is meant.
        """
        endpoint = _endpoint(server)
        self._server = replace(endpoint, api_key=api_key or endpoint.api_key, tls=tls or endpoint.tls)
        self._defaults = {"model": model, "timeout": timeout}

    def _spec(
        self, prompt: Prompt, system: str | None, history: Turns, options: dict[str, Any], *, stream: bool = False
    ) -> QuerySpec:
        require_known(options, set(_OPTIONS), "A request")
        asked = {name: _value(_OPTIONS[name], value) for name, value in {**self._defaults, **options}.items()}
        text = isinstance(prompt, str)
        return QuerySpec(
            prompts=(str(prompt),) if text else (),
            token_ids=() if isinstance(prompt, str) else (_token_ids(prompt),),
            stream=stream,
            system=system,
            history=tuple(history),
            model=asked.pop("model") or (None if text else CORE_MODEL),
            options={name: asked.pop(name) for name in list(asked) if name in REQUEST_OPTIONS},
            **asked,
        )


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        ids = tuple(map(index, prompt))  # of NumPy too, but no float and no text
    except TypeError:
        ids = (-1,)
    if not all(0 <= token < 1 << 31 for token in ids):
        raise UsageError(f"The prompt is {reprlib.repr(prompt)}; expected a text, or a list of token ids.")
    return ids


def _value(option: Option, value: Any) -> Any:
    return option.from_json((value,) if option.container == "tuple" and isinstance(value, str) else value)


def _endpoint(server: Server | str | None) -> Endpoint:
    if isinstance(server, Server):
        return endpoint_of(server)
    if server is None or ":" not in server:
        return endpoint_of(find_server(server))
    host, _, digits = server.rpartition(":")
    port = whole_number(digits)
    if not host or "/" in host or port is None or not 0 < port < 1 << 16:
        raise UsageError(f"The server is {server[:300]!r}; expected a name, or HOST:PORT of its gRPC service.")
    return Endpoint(host=host, grpc_port=port)


class Client(Asker):
    """Asks the models of one server. It keeps no connection open, and threads may share it."""

    def ask(self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any) -> Generation:
        """Return the whole answer: its `text`, `output_tokens`, `sequences` and more.

        Args:
            prompt: A text, which a chat model gets in its chat template, or token ids for the core model.
            system: System message of a chat model.
            history: Earlier turns of a conversation: mappings with `role` and `content`.
            options: The options of `trtserve query` with underscores, such as `max_tokens=40`, `temperature=0.7`,
                `stop_words=["."]`, `lora="poet"`, `return_log_probs=True` or `model="ensemble"`.

        Raises:
            UsageError: there is no such option, or the model cannot do it.
            ServerUnreachableError: nothing answers at the server's address.
            RequestError: the server refused the request or failed, or the timeout has passed.
        """
        return generate(self._spec(prompt, system, history, options), self._server)

    def stream(self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any) -> TextStream:
        """Return the pieces of the answer's text as they are generated. Takes what `ask` takes.

        The request is sent when the first piece is read, which raises what `ask` raises. Closing the stream before its
        end stops the request in the engine.
        """
        return TextStream(self._pieces(self._spec(prompt, system, history, options, stream=True)))

    def _pieces(self, spec: QuerySpec) -> Pieces:
        with closing(connect(spec, self._server)) as client:
            (context,) = request_contexts(spec, self._server, client)
            return (yield from stream(context, self._server, client))


class TextStream(Iterator[str]):
    """The pieces of an answer's text. Use a `with` block where the loop may end early."""

    def __init__(self, pieces: Pieces) -> None:
        """Wrap what `trtserve.client.query.stream` returns."""
        self._pieces = pieces
        self._answer: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._answer = self._answer or end.value
            raise

    @property
    def answer(self) -> Generation:
        """The whole answer, as `ask` returns it; reads the pieces that are left. UsageError for a closed stream."""
        for _ in self:
            pass
        return require_complete(self._answer)

    def close(self) -> None:
        """End the request if it still runs."""
        self._pieces.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def require_complete(answer: Generation | None) -> Generation:
    """Return the answer. Raises UsageError when its stream was closed before its end."""
    if answer is None:
        raise UsageError("The stream was closed before its end, so there is no whole answer.")
    return answer


class AsyncClient(Asker):
    """As `Client`, for asyncio: all requests share one gRPC connection, which the `async with` block closes."""

    _connection: GrpcTransport | None = None

    async def ask(
        self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any
    ) -> Generation:
        """Return the whole answer. Takes and raises what `Client.ask` does."""
        stream = self._stream(self._spec(prompt, system, history, options))
        return await stream.answer()

    def stream(
        self, prompt: Prompt, *, system: str | None = None, history: Turns = (), **options: Any
    ) -> AsyncTextStream:
        """Return the pieces of the answer's text as they are generated. Takes and raises what `Client.stream` does."""
        return self._stream(self._spec(prompt, system, history, options, stream=True))

    async def close(self) -> None:
        """Close the connection, which ends running requests."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, spec: QuerySpec) -> AsyncTextStream:
        stream = AsyncTextStream()
        stream.pieces = self._pieces(spec, stream)
        return stream

    async def _pieces(self, spec: QuerySpec, stream: AsyncTextStream) -> AsyncGenerator[str, None]:
        context = await asyncio.to_thread(self._context, spec)
        request_id = request_id_of(spec)
        self._connection = self._connection or GrpcTransport(self._server, timeout=spec.timeout)
        answer = Answer(context)
        replies = self._connection.infer(model_request(context, request_id))
        try:
            async with aclosing(replies):
                async for reply in replies:
                    if text := answer.add(reply):
                        yield text
                    if answer.stopped:
                        await asyncio.to_thread(stop_in_engine, context, self._server, request_id)
                        break
            if text := answer.rest():
                yield text
        except (asyncio.CancelledError, GeneratorExit, RequestError):
            # As in `trtserve.client.query.stream`: a cancelled call does not reach the engine on every path.
            await asyncio.shield(asyncio.to_thread(stop_in_engine, context, self._server, request_id))
            raise
        stream.received = answer.generation(request_id)

    def _context(self, spec: QuerySpec) -> RequestContext:
        with closing(connect(spec, self._server)) as client:
            return request_contexts(spec, self._server, client)[0]


class AsyncTextStream(AsyncIterator[str]):
    """The pieces of an answer's text. Use an `async with` block where the loop may end early."""

    pieces: AsyncGenerator[str, None]
    received: Generation | None = None

    async def __anext__(self) -> str:
        return await anext(self.pieces)

    async def answer(self) -> Generation:
        """Return the whole answer; reads the pieces that are left. Raises UsageError for a closed stream."""
        async for _ in self:
            pass
        return require_complete(self.received)

    async def close(self) -> None:
        """End the request if it still runs."""
        await self.pieces.aclose()

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
