"""Options of `start`: how a model repository is served."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trtserve.errors import UsageError
from trtserve.host.machine import parse_cpus
from trtserve.specs.options import NVIDIA_TOOLS, InContainer, Spec, option

GPUS = "Engines on GPUs"
_gpus = partial(option, panel=GPUS)
_access = partial(option, panel="Access and protection")
_many = partial(option, panel="Many models behind one port")
Api = Literal["shared-memory", "trace", "logging", "model-control"]
"""Parts of Triton's protocol that change or reveal more than a client of a model needs."""
SUPERVISION = "Supervision"
_supervision = partial(option, panel=SUPERVISION)
_LAST_PORT = 65535
_HOST = r"(\[[0-9a-fA-F:]+\]|[^\s/?#,@:\[\]]+)(:\d{1,5})?"
_RECEIVER = re.compile(rf"https?://{_HOST}(/[^\s,]*)?")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?")
# Triton's default ports, which clients assume too.
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002


@dataclass(frozen=True, kw_only=True)
class ManySpec(Spec):
    """How several models share one port."""

    every: bool = _many(False, "--all", help="Serve every import behind one port.")
    idle_unload: float = _many(
        300.0,
        metavar="SECONDS",
        help="Unload a model that had no request for so long; 0: only when another one needs its memory.",
        minimum=0,
    )
    memory_budget: float | None = _many(
        None,
        metavar="GIB",
        help="Most memory of all loaded models together, as `trtserve plan` counts it.",
        above=0,
        unset="what is free at the start",
    )


@dataclass(frozen=True, kw_only=True)
class ServerSpec(InContainer):
    """How a server is started; ports are fixed beforehand, since clients must know them."""

    ui: bool = option(False, "--ui", help="Serve a page with a conversation and the server's figures.", common=True)
    name: str | None = option(None, metavar="NAME", help="Name of the server.", unset="the repository's", common=True)
    host: str = option("127.0.0.1", metavar="ADDRESS", help="Interface to listen on.", common=True)
    http_port: int = option(HTTP_PORT, metavar="PORT", help="HTTP port.", minimum=1, maximum=_LAST_PORT, common=True)
    grpc_port: int = option(GRPC_PORT, metavar="PORT", help="gRPC port.", minimum=1, maximum=_LAST_PORT, common=True)
    metrics_port: int = option(
        METRICS_PORT, metavar="PORT", help="Metrics port.", minimum=1, maximum=_LAST_PORT, common=True
    )
    auto_ports: bool = option(False, help="Replace each taken port by the next free one.", common=True)
    ready_timeout: float = _supervision(
        600.0, metavar="SECONDS", help="Longest wait until all models are ready.", above=0
    )
    bindings: str | None = option(
        None,
        metavar="RELEASE",
        help="Serve models that import tensorrt_llm.bindings.executor, such as NVIDIA's Python models, on the embedded "
        "executor, which says it is this release.",
        panel=NVIDIA_TOOLS,
    )
    restart: Literal["never", "on-failure", "always"] = _supervision(
        "never", help="When to start again a server that ended by itself.", common=True
    )
    restart_limit: int = _supervision(
        5,
        metavar="N",
        help="With --restart on-failure: most restarts in a row; five minutes of service begin a new row.",
        minimum=1,
    )
    verify: bool = _supervision(
        True, "/--no-verify", help="Serve files without comparing them with the checksums of the manifest."
    )
    log_format: Literal["text", "json"] = _supervision(
        "text", help="json: write every line of the logs, Triton's included, to stderr as one JSON object."
    )
    world_size: int | None = _gpus(
        None,
        metavar="RANKS",
        help="Number of ranks; another number than the engine's converts and builds an imported model again.",
        minimum=1,
        unset="the engine's",
    )
    gpus: tuple[int, ...] = _gpus(
        (), metavar="N,…", help="GPUs to use, such as 0,1.", separator=",", minimum=0, unset="all", common=True
    )
    instances: int = _gpus(
        1,
        metavar="N",
        help="Servers of this model, each with its own GPUs and ports, behind one gateway that balances.",
        minimum=1,
    )
    proxy_port: int = _gpus(
        8080,
        metavar="PORT",
        help="HTTP port of that gateway; the next port is for gRPC.",
        minimum=1,
        maximum=_LAST_PORT - 1,
    )
    multi_model: bool = _gpus(False, help="Orchestrator mode: one server spawns the workers of several models.")
    spawn_processes: bool = _gpus(
        True,
        "/--disable-spawn-processes",
        help="With --multi-model: start all workers together with the orchestrator, as participant_ids say.",
    )
    oversubscribe: bool = _gpus(False, help="Let mpirun start more ranks than there are cores.")
    gpu0_pool_bytes: int = _gpus(
        0,
        "--multimodal-gpu0-cuda-mem-pool-bytes",
        metavar="BYTES",
        help="CUDA memory pool of GPU 0 on rank 0.",
        minimum=0,
    )
    cpus: str | None = _supervision(
        None, metavar="LIST", help="Processors that the server may use, such as 0-7,16.", unset="all"
    )
    numa: int | None = _supervision(
        None,
        metavar="NODE",
        help="NUMA node that the server is bound to: its processors (fewer with --cpus) and its memory.",
        minimum=0,
    )
    exit_timeout: int = _gpus(3, metavar="SECONDS", help="Time for tritonserver to end in order.", minimum=1)
    api_key: str | None = _access(
        None,
        metavar="KEY",
        help="Key that clients must send. Other users can see it here: better set the variable, or give a file.",
        variable="TRTSERVE_API_KEY",
    )
    api_key_file: Path | None = _access(
        None,
        metavar="FILE",
        help="File with the key that clients must send, in its first line; readable only by you.",
        common=True,
    )
    tls_certificate: Path | None = _access(
        None, metavar="FILE", help="Encrypt HTTP and gRPC with this certificate chain (PEM)."
    )
    tls_key: Path | None = _access(None, metavar="FILE", help="Private key of the certificate (PEM).")
    no_auth: bool = _access(False, help="Let everyone who reaches --host use the server.")
    no_tls: bool = _access(
        False, help="Do not encrypt on other interfaces than loopback, because a proxy in front does."
    )
    open_api: tuple[Api, ...] = _access(
        (),
        metavar="NAME,…",
        help="Open parts of Triton's protocol: shared-memory, trace, logging, model-control.",
        separator=",",
    )
    allow_origin: tuple[str, ...] = _access(
        (),
        metavar="ORIGIN,…",
        help="Let pages of these sites use the server (CORS), such as https://app.example; * for all needs a key.",
        separator=",",
    )
    image_folder: Path | None = _access(
        None, metavar="DIR", help="Let clients of /v1 name images below this folder as file:// URLs."
    )
    image_host: tuple[str, ...] = _access(
        (),
        metavar="HOST,…",
        help="Fetch images that clients of /v1 name from these hosts; without it none are fetched.",
        separator=",",
    )
    raw_http: bool = _access(False, help="Let Triton itself answer on --http-port; malformed requests can crash it.")
    max_requests: int = _access(
        512, metavar="N", help="HTTP requests at the same time; further ones get 503.", minimum=1
    )
    gateway_processes: int = _access(
        1,
        metavar="N",
        help="Processes of the gateway that share its port; each passes on what one core can.",
        minimum=1,
        maximum=64,
    )
    request_log: Path | None = _access(
        None, metavar="FILE", help="Write a line of JSON for each HTTP request: path, status, seconds, model, tokens."
    )
    request_log_texts: bool = _access(False, help="Write prompts and answers into it too.")
    max_request_mib: int = _access(64, metavar="MIB", help="Largest body of an HTTP request.", minimum=1, maximum=4096)
    request_timeout: float = _access(
        3600.0, metavar="SECONDS", help="Longest time of an HTTP request, its answer included.", above=0
    )
    trace_to: str | None = _supervision(
        None,
        metavar="URL",
        help="Send OpenTelemetry traces of requests to this OTLP/HTTP receiver, such as "
        "http://localhost:4318/v1/traces.",
    )
    trace_every: int = _supervision(1, metavar="N", help="With --trace-to: trace one of N requests.", minimum=1)
    extra_arguments: tuple[str, ...] = ()  # for tritonserver

    def __post_init__(self) -> None:
        super().__post_init__()
        ports = (self.http_port, self.grpc_port, self.metrics_port)
        if len(set(ports)) != len(ports):
            raise UsageError(f"The HTTP, gRPC and metrics ports must differ; got {', '.join(map(str, ports))}.")
        if len(set(self.gpus)) != len(self.gpus):
            listed = ",".join(map(str, self.gpus))
            raise UsageError(f"--gpus {listed} names a GPU twice: two ranks cannot share it.")
        self._check_access()
        if self.cpus is not None:
            parse_cpus(self.cpus)
        if self.container is not None and (self.cpus is not None or self.numa is not None):
            raise UsageError(
                "--cpus and --numa bind processes of this machine, not those of a container.",
                hint="Use docker's own: --container-flag=--cpuset-cpus=0-7 --container-flag=--cpuset-mems=0",
            )
        if self.trace_to is not None and not _RECEIVER.fullmatch(self.trace_to):
            raise UsageError(
                f"--trace-to is {self.trace_to!r}; expected the URL of an OTLP/HTTP receiver.",
                hint="OpenTelemetry's collector listens at http://HOST:4318/v1/traces.",
            )
        if not self.spawn_processes and not self.multi_model:
            raise UsageError(
                "--disable-spawn-processes belongs to orchestrator mode.", hint="Give --multi-model with it."
            )
        if self.multi_model and self.instances > 1:
            raise UsageError(
                "--instances starts several leaders; an orchestrator has its instances in the repository.",
                hint="Set the instance_group count and gpu_device_ids of the core model: 0,1;2,3 for two.",
            )

    @property
    def has_key(self) -> bool:
        """Whether clients need an API key."""
        return self.api_key is not None or self.api_key_file is not None

    def _check_access(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("--tls-certificate and --tls-key must be given together.")
        if self.api_key is not None and self.api_key_file is not None:
            raise UsageError("The API key is given twice: in --api-key (or TRTSERVE_API_KEY) and in --api-key-file.")
        for origin in self.allow_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"--allow-origin is {origin!r}; expected a site such as https://app.example or *.",
                    hint="An origin is scheme, host and port as a browser sends them, without a path.",
                )
        for host in self.image_host:
            if not re.fullmatch(_HOST, host):
                raise UsageError(
                    f"--image-host is {host!r}; expected a host as URLs name it, such as images.example:8443.",
                    hint="Without the scheme and the path: every image of the host may be fetched.",
                )
        if "*" in self.allow_origin and not self.has_key:
            raise UsageError(
                "--allow-origin '*' would let every page that you open use the server.",
                hint="Add a key with --api-key-file, or name the sites.",
            )
        if self.raw_http and self.allow_origin:
            raise UsageError("--raw-http opens Triton's own HTTP service, which knows no --allow-origin.")
        if self.raw_http and (self.has_key or self.tls_certificate is not None):
            raise UsageError(
                "--raw-http opens Triton's own HTTP service, which knows neither keys nor TLS.",
                hint="Leave --raw-http out, or the key and the certificate.",
            )
