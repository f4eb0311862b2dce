"""A launch as a value: its command, the arguments of each rank, and its shared-memory names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import trtserve
from trtserve.client.endpoint import grpc_token
from trtserve.executor.vllm.arguments import BACKEND
from trtserve.executor.vllm.installation import VARIABLE as VLLM_PYTHON
from trtserve.executor.vllm.installation import named_interpreter
from trtserve.gateway.settings import read_key
from trtserve.host.gpus import VISIBLE_DEVICES
from trtserve.host.ports import ipv4_address
from trtserve.nvidia.releases import NEWEST
from trtserve.nvidia.releases.converters import CORE_MODEL, TRITONSERVER, launcher_facts
from trtserve.process import Command
from trtserve.repository.served import ServedRepository
from trtserve.server.engine_fit import launch_release
from trtserve.server.triton.installation import Triton, backend_folder
from trtserve.server.triton.tritonserver import EXIT_TIMEOUT, Address, protection_arguments, stub_environment
from trtserve.specs import ServerSpec
from trtserve.store import Store

PACKAGE_FOLDER = Path(trtserve.__file__).parent
"""This package, which the core model imports. Of other packages the vllm runtime needs only some that vLLM has too."""
FOLLOWER = PACKAGE_FOLDER / "executor" / "vllm" / "engine_side.py"
IMAGE_PYTHON = "/usr/bin/python3"  # the Python of NVIDIA's images, with vLLM


@dataclass(frozen=True, kw_only=True)
class LaunchSetup:
    """What every launch mode composes its commands from."""

    executable: str = TRITONSERVER  # path of tritonserver where the server will run
    repository: Path
    address: Address
    release: str = NEWEST  # TensorRT-LLM release whose launch script is followed
    shm_prefix: str  # start of the names of this launch's shared-memory regions; each rank adds its number
    core_models: tuple[str, ...] = (CORE_MODEL,)  # models that ranks other than 0 load
    gpus: tuple[int, ...] = ()  # devices that the processes may see; empty: all
    backends: Path | None = None  # folder of Triton's backends; None: the installation's own
    pool_bytes: int = 0  # CUDA memory pool of GPU 0 on rank 0, in bytes
    exit_timeout: int = EXIT_TIMEOUT  # seconds that tritonserver has to finish its requests before it ends
    oversubscribe: bool = False  # whether mpirun may start more ranks than there are cores
    mpirun: str = "mpirun"
    bound: bool = True  # whether mpirun binds each rank to cores; with two ranks it gives each a single core
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of every rank, besides those of the mode
    completes: bool = False  # whether Triton's backends complete the configurations, as NVIDIA's `vllm` must
    arguments: tuple[str, ...] = ()  # further arguments of tritonserver, after all others


@dataclass(frozen=True, kw_only=True)
class Launch:
    mode: str  # a key of `modes.MODES`
    command: Command  # starts all ranks on this machine
    groups: tuple[tuple[str, ...], ...]
    """Command line of each rank, so that srun, a container or Kubernetes can start the same ranks."""

    @property
    def ranks(self) -> int:
        """Processes that MPI starts, or 1 without MPI."""
        return len(self.groups)


def server_setup(
    name: str,
    repository: Path,
    served: ServedRepository,
    spec: ServerSpec,
    triton: Triton,
    address: Address,
    prefix: str,
) -> LaunchSetup:
    """Return what the launches of the server `name` have in common, on this machine or another one."""
    return LaunchSetup(
        executable=str(triton.executable),
        repository=repository,
        address=address,
        release=launch_release(served, spec),
        shm_prefix=prefix,
        core_models=tuple(model.name for model in served.core_models),
        pool_bytes=spec.gpu0_pool_bytes,
        exit_timeout=spec.exit_timeout,
        gpus=spec.gpus,
        completes=BACKEND in served.backends,
        oversubscribe=spec.oversubscribe,
        arguments=(*protection_of(spec, address.inner_secret), *tracing_of(spec, name), *spec.extra_arguments),
    )


def in_this_python(setup: LaunchSetup, triton: Triton, store: Store, python: Path | None = None) -> LaunchSetup:
    """Return the setup for ranks whose models run in the Python that runs trtserve, as the embedded executor's do.

    `python` is the folder of another `python3`.
    """
    environment = {**stub_environment(python), **named_interpreter()}
    return replace(setup, backends=backend_folder(triton, store), bound=False, environment=environment)


def in_vllm_image(setup: LaunchSetup) -> LaunchSetup:
    """Return the setup for an image of NVIDIA's with vLLM, into which PACKAGE_FOLDER is mounted."""
    return replace(setup, environment={"PYTHONPATH": str(PACKAGE_FOLDER.parent), VLLM_PYTHON: IMAGE_PYTHON})


def tracing_of(spec: ServerSpec, name: str) -> tuple[str, ...]:
    """Return the flags that send traces, with `name` as the service."""
    if spec.trace_to is None:
        return ()
    settings = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"rate={spec.trace_every}",
        f"opentelemetry,url={spec.trace_to}",
        f"opentelemetry,resource=service.name={name}",
    )
    return tuple(f"--trace-config={setting}" for setting in settings)


def protection_of(spec: ServerSpec, secret: str | None) -> tuple[str, ...]:
    """Return the flags of tritonserver that close and protect what the options say; `secret`: that of its gateway."""
    key = spec.api_key if spec.api_key_file is None else read_key(spec.api_key_file)
    tls = None
    if spec.tls_certificate is not None and spec.tls_key is not None:
        tls = (spec.tls_certificate.expanduser().absolute(), spec.tls_key.expanduser().absolute())
    token = None if key is None else grpc_token(key)
    return protection_arguments(spec.open_api, token=token, secret=secret, tls=tls)


def first_address(spec: ServerSpec, host: str | None = None) -> Address:
    """Return the address and ports of the options. Raises UsageError for a host without an IPv4 address."""
    return Address(
        host=ipv4_address(spec.host if host is None else host),
        http_port=spec.http_port,
        grpc_port=spec.grpc_port,
        metrics_port=spec.metrics_port,
    )


def under_mpirun(
    setup: LaunchSetup, mode: str, groups: tuple[tuple[str, ...], ...], environment: Mapping[str, str] | None = None
) -> Launch:
    """Return one MPI job of all `groups`: `-n 1 GROUP :` for each, with a colon after the last one, as upstream has it.

    --tag-output puts the rank in front of every line, so that one log tells the ranks apart.
    """
    switches = (*(("--oversubscribe",) if setup.oversubscribe else ()), *(() if setup.bound else ("--bind-to", "none")))
    prefix = (setup.mpirun, "--allow-run-as-root", *switches)
    ranks = (part for group in groups for part in ("-n", "1", *group, ":"))
    command = _command(setup, (*prefix, "--tag-output", *ranks), environment or {})
    return Launch(mode=mode, command=command, groups=groups)


def without_mpi(setup: LaunchSetup, mode: str) -> Launch:
    """Return one tritonserver alone."""
    argv = rank_arguments(setup, 0)
    return Launch(mode=mode, command=_command(setup, argv, {}), groups=(argv,))


def _command(setup: LaunchSetup, argv: tuple[str, ...], own: Mapping[str, str]) -> Command:
    shown = {VISIBLE_DEVICES: ",".join(map(str, setup.gpus))} if setup.gpus else {}
    return Command(argv=argv, env={**setup.environment, **shown, **own}, cwd=setup.repository.absolute())


def rank_arguments(setup: LaunchSetup, rank: int, *, emptied_pools: int | None = None) -> tuple[str, ...]:
    """Return tritonserver's command line on `rank`.

    `emptied_pools` is the number of GPUs whose memory pools orchestrator mode sets to 0, or None in every other mode.
    Arguments that upstream does not have (addresses to bind, folder of the backends, a timeout before 1.0) follow its
    own. Upstream's --log has no counterpart: the output of every server is kept, and --log-verbose can be given.
    """
    facts = launcher_facts(setup.release)
    ports = [
        f"{flag}={setup.address.port_arguments[flag]}" for flag in ("--grpc-port", "--http-port", "--metrics-port")
    ]
    exit_timeout = f"--exit-timeout-secs={setup.exit_timeout}"

    arguments = [setup.executable, f"--model-repository={setup.repository.absolute()}"]
    if facts.exit_timeout:
        arguments.append(exit_timeout)
    if facts.ports_twice:
        arguments += ports
    if rank:
        # Other ranks load only the core models. These never finish loading there, so no port is opened.
        arguments += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in setup.core_models)]
    if facts.memory_pools:
        if rank == 0 and setup.pool_bytes:
            arguments.append(f"--cuda-memory-pool-byte-size=0:{setup.pool_bytes}")
        if emptied_pools is not None:
            arguments += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
            arguments += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(emptied_pools)]
    arguments += ports
    if not setup.completes:
        arguments.append("--disable-auto-complete-config")
    arguments.append(f"--backend-config=python,shm-region-prefix-name={setup.shm_prefix}r{rank}_")
    if not facts.exit_timeout:
        arguments.append(exit_timeout)
    if setup.backends is not None:
        arguments.append(f"--backend-directory={setup.backends}")
    # Triton keeps the messages of so many gRPC requests for reuse, each as large as the largest it has had (60 MiB).
    arguments.append("--grpc-infer-allocation-pool-size=0")
    # Loopback by default; upstream's script listens on every interface.
    arguments += [f"{flag}={host}" for flag, host in setup.address.host_arguments.items()]
    return (*arguments, *setup.arguments)
