"""What `start` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.errors import UsageError
from trtserve.specs.fields import require_above_zero, require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How a server is started; port 0 is not allowed, since clients must know the ports beforehand.

    With `auto_ports` further instances pass over ports that are taken. `gpus` are the devices for all instances, empty
    for all of the machine. `multi_model` is orchestrator mode, whose workers `spawn_processes` False starts before it.
    `trtllm_version` replaces the version that is found. `gpu0_pool_bytes` is the CUDA pool of GPU 0 on rank 0,
    `exit_timeout` the seconds that tritonserver has to end in order. `proxy_port` and the one above it are those of
    the reverse proxy that is written for several `instances`. `container` is the tag or image to run in.
    """

    name: str | None = None
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    auto_ports: bool = False
    world_size: int | None = None
    instances: int = 1
    proxy_port: int = 8080
    gpus: tuple[int, ...] = ()
    multi_model: bool = False
    spawn_processes: bool = True
    oversubscribe: bool = False
    gpu0_pool_bytes: int = 0
    exit_timeout: int = 3
    trtllm_version: str | None = None
    ready_timeout: float = 600.0
    extra_arguments: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ports = (self.http_port, self.grpc_port, self.metrics_port)
        for port in ports:
            if not 1 <= port <= 65535:
                raise UsageError(f"Port {port} is outside 1 … 65535.")
        if len(set(ports)) != len(ports):
            raise UsageError(f"The HTTP, gRPC and metrics ports must differ; got {', '.join(map(str, ports))}.")
        require_positive(self, "world_size", "instances", "exit_timeout")
        require_not_negative(self, "gpu0_pool_bytes")
        require_above_zero(self, "ready_timeout")
        if not 1 <= self.proxy_port < 65535:
            raise UsageError(f"--proxy-port {self.proxy_port} is outside 1 … 65534 (the next one is for gRPC).")
        self._require_mode()

    def _require_mode(self) -> None:
        if not self.spawn_processes and not self.multi_model:
            raise UsageError(
                "--disable-spawn-processes belongs to orchestrator mode.", hint="Give --multi-model with it."
            )
        if self.multi_model and self.instances > 1:
            raise UsageError(
                "--instances starts several leaders; an orchestrator has its instances in the repository.",
                hint="Set the instance_group count and gpu_device_ids of the core model: 0,1;2,3 for two.",
            )
