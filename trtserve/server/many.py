"""Many models behind one port: each gets a server of its own, a `trtserve start`, while it is loaded.

So a model's memory is that of processes, which the system takes back when they end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from trtserve.artifacts import ModelRepository
from trtserve.errors import MemoryLimitError, ServerRunningError, ServerStartError, UsageError
from trtserve.executor.engine.limits import DEFAULT_FREE_FRACTION
from trtserve.files import locked
from trtserve.gateway.keeping import ModelKeeper, OneModel
from trtserve.gateway.triton import TritonHttp
from trtserve.host.machine import format_bytes, free_memory
from trtserve.host.ports import free_ports, ipv4_address, listening_socket
from trtserve.process import Command, ProcessId, spawn, stop
from trtserve.process.signals import stop_signals
from trtserve.programs.shared.lora_names import LoraNames
from trtserve.progress import SILENT, Progress
from trtserve.repository.served import ServedRepository, inspect_repository
from trtserve.server.detach import reports, start_arguments
from trtserve.server.engine_fit import needs_of, server_processes
from trtserve.server.front import GatewayPlan, plan_gateway, require_protected, write_settings
from trtserve.server.shutdown import end_server
from trtserve.server.state import (
    GatewayState,
    Instance,
    Server,
    change_state,
    forget,
    log_file,
    ready_now,
    recorded_server,
    run_folder,
    start_lock,
    write_state,
)
from trtserve.server.triton.server_log import last_lines, rotate
from trtserve.server.triton.tritonserver import LOOPBACK, STOP_GRACE, Address, unique_prefix
from trtserve.specs import ServerSpec
from trtserve.specs.command_line import spec_arguments
from trtserve.specs.options import given_flags
from trtserve.specs.server import ManySpec
from trtserve.store import Store

_LOG = logging.getLogger(__name__)

NAME = "models"  # name of the server if none is given
_GIB = 1 << 30
_STOPPED_WITHIN = 20.0


@dataclass(frozen=True, kw_only=True)
class ManyPlan:
    """One port and its models."""

    name: str
    spec: ServerSpec
    many: ManySpec
    imports: Collection[str]  # names of the imports
    models: dict[str, tuple[ModelRepository, ServedRepository]]  # name in every API → its repository
    budget: int  # bytes that all loaded models may take
    front: GatewayPlan
    store: Store

    def memory(self, name: str) -> int:
        """Return the bytes that a model takes: its processes, its engine, and the KV cache that its executor keeps."""
        served = self.models[name][1]
        if not served.embedded:
            return server_processes() + (0 if served.needs_gpus else served.engine_bytes)
        needs, build = needs_of(served), served.engine.build
        cache = needs.kv
        if served.kv_tokens is None:  # that of the largest batch, or half of what is free, whichever is less
            rows = max(1, build.max_batch_size) * max(1, build.max_beam_width)
            cache = max(cache, min(cache * rows, int(DEFAULT_FREE_FRACTION * self.budget)))
        return needs.processes + needs.engine + cache

    def arguments(self, report_to: int) -> list[str]:
        """Return the words after `trtserve` that serve this plan, and report to an open file."""
        words = [
            "start",
            *(() if self.many.every else self.imports),
            "--name",
            self.name,
            "--report-to",
            str(report_to),
        ]
        words += [*spec_arguments(self.spec), *spec_arguments(self.many)]
        return [*words, "--", *self.spec.extra_arguments] if self.spec.extra_arguments else words


def plan_many(
    repositories: Mapping[str, ModelRepository], spec: ServerSpec, many: ManySpec, *, store: Store | None = None
) -> ManyPlan:
    """Plan one port for several imports, by their names.

    Raises UsageError for options that one port cannot have, and MemoryLimitError for a model that can never be loaded.
    """
    store = store or Store()
    if given := given_flags(
        spec, ("instances", "world_size", "raw_http", "ui", "multi_model", "grpc_port", "metrics_port")
    ):
        raise UsageError(f"{given[0]} is for the server of one model.", hint="Leave it out, or name one model only.")
    name = NAME if spec.name is None else spec.name
    models: dict[str, tuple[ModelRepository, ServedRepository]] = {}
    for repository in repositories.values():
        served = inspect_repository(repository)
        if served.model in models:
            raise UsageError(
                f"{repository.name} and {models[served.model][0].name} both call their model {served.model}.",
                hint="Serve one of them, or import it under another --name.",
            )
        if repository.name == name:
            raise UsageError(f"The server of many models would be called as {name} is.", hint="Choose another --name.")
        models[served.model] = repository, served
    host = ipv4_address(spec.host)
    require_protected(spec, host)
    address = Address(host=host, http_port=spec.http_port, grpc_port=0, metrics_port=0)
    repository, served = next(iter(models.values()))
    front = plan_gateway(name, address, 1, spec, served, repository.path, store)
    settings = replace(
        front.settings, model="", core_models=(), repository=None, admin_key_file=None, request_log=None, own=False
    )
    budget = free_memory() if many.memory_budget is None else int(many.memory_budget * _GIB)
    plan = ManyPlan(
        name=name,
        spec=spec,
        many=many,
        imports=tuple(repositories),
        models=models,
        budget=budget,
        front=replace(front, settings=settings),
        store=store,
    )
    for each in models if not many.every else ():
        if plan.memory(each) > budget:
            raise MemoryLimitError(
                f"{each} needs {format_bytes(plan.memory(each))} of memory; all loaded models together may take "
                f"{format_bytes(budget)}.",
                hint="Raise --memory-budget, or leave the model out.",
            )
    return plan


def serve_many(plan: ManyPlan, *, on_ready: Callable[[Server], None], progress: Progress = SILENT) -> None:
    """Serve until SIGINT, SIGTERM or `trtserve stop`. Raises ServerRunningError or PortInUseError."""
    from trtserve.gateway.listener import serve_application
    from trtserve.gateway.many import ManyModels

    store, spec, settings = plan.store, plan.spec, plan.front.settings
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    own_lock = locked(start_lock(plan.name, store), wait=False)
    with own_lock, store.in_use(*(repository.path for repository, _ in plan.models.values())):
        if (before := recorded_server(plan.name, store)) is not None:
            if before.alive():
                raise ServerRunningError(
                    f"The server {plan.name} is already running (pid {before.instances[0].process.pid}).",
                    hint=f"Stop it with `trtserve stop {plan.name}`, or give this one another --name.",
                )
            end_server(before, store)
        with listening_socket(settings.host, settings.port) as listening, stop_signals():
            folder = run_folder(plan.name, store)
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_settings(plan.front, None)
            process = ProcessId.of(os.getpid())
            assert process is not None
            log = log_file(f"{plan.name}@supervisor", store)
            encrypted = settings.certificate is not None
            front = GatewayState(process=process, log=log, settings=plan.front.file, encrypted=encrypted)
            address = Address(host=settings.host, http_port=settings.port, grpc_port=0, metrics_port=0)
            server = Server(
                name=plan.name,
                repository=store.root,
                model="",
                streaming=True,
                state="ready",
                mode="many",
                shm_prefix=unique_prefix(plan.name),
                exit_timeout=spec.exit_timeout + int(_STOPPED_WITHIN),
                instances=(Instance(address=address, process=process, log=log, gateway=front),),
                **ready_now(),
                kept=dict.fromkeys(plan.models, "unloaded"),
            )
            write_state(server, store)

            def record() -> None:
                change_state(server, store, kept={name: each.state for name, each in keeper.models.items()})

            keeper = ModelKeeper(
                [_one_model(plan, name) for name in plan.models],
                budget=plan.budget,
                idle=plan.many.idle_unload,
                changed=record,
            )
            try:
                on_ready(server)
                serve_application(ManyModels(settings, keeper), listening)
                progress.step(f"Stopping {plan.name} …")
            finally:
                forget(server, store)


def _one_model(plan: ManyPlan, name: str) -> OneModel:
    repository, served = plan.models[name]
    adapters = LoraNames(repository.path)
    return OneModel(
        name=name,
        memory=plan.memory(name),
        exclusive=served.needs_gpus,
        adapters=lambda: adapters.names,
        load=lambda: _load(plan, repository),
    )


@dataclass
class _ModelServer:
    """The server of one model, by its supervisor."""

    name: str
    process: ProcessId
    http: TritonHttp
    store: Store
    grace: float

    def alive(self) -> bool:
        return self.process.alive()

    async def stop(self) -> None:
        await self.http.close()
        await asyncio.to_thread(_end, self.name, self.process, self.store, self.grace)


async def _load(plan: ManyPlan, repository: ModelRepository) -> _ModelServer:
    """Start the server of a model, and return when it is ready. Raises what `trtserve start` raises."""
    ports, settings, name = free_ports(LOOPBACK, 3), plan.front.settings, repository.name
    spec = replace(
        plan.spec,
        name=name,
        host=LOOPBACK,
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
        auto_ports=True,
        api_key=None,
        api_key_file=settings.key_file,
        tls_certificate=None,
        tls_key=None,
        allow_origin=(),
    )
    log, grace = log_file(f"{name}@supervisor", plan.store), STOP_GRACE + spec.exit_timeout
    reading, writing = os.pipe()
    command = Command(
        argv=(sys.executable, "-m", "trtserve", *start_arguments(repository, spec, report_to=writing)),
        env={"TRTSERVE_HOME": str(plan.store.root)},
    )
    rotate(log)
    try:
        process = spawn(command, log=log, bound=True, keep=(writing,))
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb", buffering=0):
        try:
            told = await asyncio.to_thread(lambda: list(reports(reading, lambda: 0)))
        except asyncio.CancelledError:  # the thread reads the pipe until the process ends
            await asyncio.to_thread(_end, name, process, plan.store, grace)
            raise
    if told and told[-1].failed:
        raise told[-1].error
    server = recorded_server(name, plan.store)
    if not told or told[-1].kind != "ready" or server is None:  # clients read the message, and not the log
        _LOG.error("the last lines of %s:\n%s", log, last_lines(log))
        raise ServerStartError("Its server ended before it was ready.", log=log)
    http = TritonHttp(f"{LOOPBACK}:{server.endpoint.http_port}", "")
    return _ModelServer(name=name, process=process, http=http, store=plan.store, grace=grace)


def _end(name: str, process: ProcessId, store: Store, grace: float) -> None:
    """End a server by its supervisor, or what is left of it. Raises ServerStopError."""
    stop(process, grace=grace)
    remains = recorded_server(name, store)
    if remains is not None and remains.supervisor is not None and remains.supervisor.matches(process):
        end_server(remains, store)
