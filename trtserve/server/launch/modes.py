"""The launch modes: how the ranks of one server are started on the machine, or the nodes, that run it.

A new mode is one class here and a word in `MODES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from trtserve.errors import RepositoryError, UsageError, counted
from trtserve.executor.runtimes import RUNTIMES
from trtserve.executor.vllm.arguments import MODEL_JSON, follower_port
from trtserve.executor.vllm.installation import VARIABLE as VLLM_PYTHON
from trtserve.executor.vllm.installation import find_installation, require_installation
from trtserve.host.gpus import count_gpus
from trtserve.nvidia.releases.converters import LLMAPI_LAUNCH, ORCHESTRATOR, SPAWN_PROCESSES, launcher_facts
from trtserve.repository.served import CoreModel, ServedRepository
from trtserve.server.launch.commands import FOLLOWER, Launch, LaunchSetup, rank_arguments, under_mpirun, without_mpi
from trtserve.server.launch.devices import (
    require_engines_here,
    require_leader_devices,
    require_own_devices,
    require_own_ranks,
    world_of,
)
from trtserve.specs import ServerSpec


class LaunchMode(ABC):
    name: str  # what `start --dry-run` and the state file call it

    @abstractmethod
    def serves(self, served: ServedRepository, spec: ServerSpec) -> bool:
        """Return whether this mode starts such a repository with these options."""

    @abstractmethod
    def check(self, served: ServedRepository, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
        """Raise UsageError or RepositoryError when the mode cannot run these models.

        The GPUs of other machines are unknown, so they are checked only for this one.
        """

    def ranks(self, served: ServedRepository, spec: ServerSpec) -> int:
        """Return the world size that --world-size is compared with."""
        return served.world_size

    @abstractmethod
    def compose(
        self, setup: LaunchSetup, served: ServedRepository, spec: ServerSpec, *, nodes: int | None = None
    ) -> Launch:
        """Return the launch for this machine, or for `nodes` of a cluster; nothing is started."""


class Single(LaunchMode):
    """One process: on the CPU it merges the shards of a checkpoint, however many there are; vLLM starts its workers."""

    name = "single"

    def serves(self, served: ServedRepository, spec: ServerSpec) -> bool:
        return served.runtime is None or served.merges_ranks  # None means a plain Triton model

    def check(self, served: ServedRepository, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
        on_gpus = served.starts_workers
        given = {
            "--multi-model": spec.multi_model,
            "--gpus": bool(spec.gpus) and not on_gpus,
            "--container": spec.container is not None and not on_gpus,
        }
        flag = next((flag for flag, is_given in given.items() if is_given), None)
        own_workers = served.runtime is not None and RUNTIMES[served.runtime].folder_as_engine
        if own_workers and on_this_machine and spec.container is None:
            require_installation(recorded=served.engine.trtserve.vllm_python)
        inner = (str(core.settings.get("model")) for core in served.core_models if core.backend == "vllm")
        if spec.container is not None and (found := next((each for each in inner if not _names_itself(each)), None)):
            raise UsageError(
                f"NVIDIA's backend in the container does not find the model's folder {found}, which is relative.",
                hint="Make the repository again with --absolute-paths.",
            )
        if flag is not None and on_gpus:
            raise UsageError(
                f"{flag} does not work with the {served.runtime} runtime, whose engine starts its workers itself.",
                hint=f"Leave {flag} out; --instances N starts further copies.",
            )
        if own_workers and spec.world_size not in (None, served.world_size):
            raise UsageError(
                f"--world-size is {spec.world_size}; the engine of the {served.runtime} runtime starts its workers "
                f"itself, {served.world_size} in this repository.",
                hint=f"Leave it out, or set tensor_parallel_size to {spec.world_size} in {MODEL_JSON}."
                if served.backend == "vllm"
                else f"Leave it out, or make the repository again with --tp-size {spec.world_size}.",
            )
        if flag is not None:
            raise UsageError(
                f"{flag} is for engines on GPUs; this repository is served by one process on the CPU.",
                hint=f"Leave {flag} out.",
            )

    def ranks(self, served: ServedRepository, spec: ServerSpec) -> int:
        """Return the number that --world-size gives, since one process serves any number of shards."""
        return spec.world_size or served.world_size

    def compose(
        self, setup: LaunchSetup, served: ServedRepository, spec: ServerSpec, *, nodes: int | None = None
    ) -> Launch:
        alone = without_mpi(setup, self.name)
        followers = (follower(setup, served),) * (nodes - 1) if nodes is not None and nodes > 1 else ()
        return replace(alone, groups=(*alone.groups, *followers))


def _names_itself(model: str) -> bool:
    """Return whether a model has the same name everywhere: an absolute path, or an id of the hub."""
    return model.startswith("/") or model.count("/") < 2


class LlmApi(LaunchMode):
    """The LLM API behind Triton: one process, or several: trtllm-llmapi-launch makes workers of ranks > 0."""

    name = "llmapi"

    def serves(self, served: ServedRepository, spec: ServerSpec) -> bool:
        return served.uses_llmapi

    def check(self, served: ServedRepository, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
        if spec.multi_model:
            raise UsageError(
                "--multi-model is for TensorRT engines; the LLM API starts its own workers.",
                hint="Leave --multi-model out.",
            )

    def compose(
        self, setup: LaunchSetup, served: ServedRepository, spec: ServerSpec, *, nodes: int | None = None
    ) -> Launch:
        return llmapi(setup, mpi_ranks(served))


class Orchestrator(LaunchMode):
    """One tritonserver serves several models, whose workers it spawns or finds running."""

    name = "orchestrator"

    def serves(self, served: ServedRepository, spec: ServerSpec) -> bool:
        return not served.uses_llmapi and spec.multi_model

    def check(self, served: ServedRepository, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
        if served.embedded:
            raise UsageError(
                f"--multi-model is for engines of TensorRT-LLM; this repository's is for the {served.runtime} runtime.",
                hint="Start one server for each model, with --gpus and --auto-ports.",
            )
        require_engines_here(served.core_models)

    def ranks(self, served: ServedRepository, spec: ServerSpec) -> int:
        """Return 1 for an orchestrator that spawns its workers, else the number of all processes."""
        return 1 if spec.spawn_processes else world_of(served.core_models)

    def compose(
        self, setup: LaunchSetup, served: ServedRepository, spec: ServerSpec, *, nodes: int | None = None
    ) -> Launch:
        gpus = (len(spec.gpus) or count_gpus()) if nodes is None else 0
        return orchestrator(setup, served.core_models, spawn=spec.spawn_processes, gpus=gpus, nodes=nodes or 1)


class Leader(LaunchMode):
    """One tritonserver per GPU, of which rank 0 answers clients."""

    name = "leader"

    def serves(self, served: ServedRepository, spec: ServerSpec) -> bool:
        return not served.uses_llmapi and not spec.multi_model

    def check(self, served: ServedRepository, spec: ServerSpec, *, on_this_machine: bool = True) -> None:
        require_engines_here(served.core_models)
        if served.embedded:
            _require_own_processes(served, spec, on_this_machine=on_this_machine)
        sizes = {model.name: model.world_size for model in served.core_models}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise UsageError(
                f"The engines of this repository have different world sizes ({listed}); leader mode needs one size.",
                hint="Serve them in orchestrator mode: --multi-model, with gpu_device_ids of each model.",
            )
        visible = served.world_size if spec.instances > 1 else len(spec.gpus)
        require_leader_devices(served.core_models, visible if on_this_machine else None)

    def compose(
        self, setup: LaunchSetup, served: ServedRepository, spec: ServerSpec, *, nodes: int | None = None
    ) -> Launch:
        return leader(setup, served.world_size)


# The first one that serves a repository is taken.
MODES: Final = {mode.name: mode for mode in (Single(), LlmApi(), Orchestrator(), Leader())}


def launch_mode(served: ServedRepository, spec: ServerSpec) -> LaunchMode:
    """Return the mode that serves this repository with these options."""
    return next(mode for mode in MODES.values() if mode.serves(served, spec))


def follower(setup: LaunchSetup, served: ServedRepository) -> tuple[str, ...]:
    """Return the command of the workers on each further node of vLLM, which needs neither sshd nor mpirun there."""
    python = setup.environment.get(VLLM_PYTHON)
    if python is None:
        found = find_installation(recorded=served.engine.trtserve.vllm_python)  # pods have their own
        python = "python3" if found is None else str(found.python)
    return (python, str(FOLLOWER), "follow", str(follower_port(served.engine)))


def leader(setup: LaunchSetup, world_size: int) -> Launch:
    """Return `world_size` ranks under mpirun; one rank is a plain process where the release has --no-mpi."""
    if world_size == 1 and launcher_facts(setup.release).no_mpi:
        return without_mpi(setup, Single.name)
    return under_mpirun(setup, Leader.name, tuple(rank_arguments(setup, rank) for rank in range(world_size)))


def _require_own_processes(served: ServedRepository, spec: ServerSpec, *, on_this_machine: bool) -> None:
    """Raise an error unless each rank of the embedded executor can be one process of a Python that has trtserve."""
    if on_this_machine and spec.container is not None:
        raise UsageError(
            f"--container runs NVIDIA's images, which lack trtserve; the {served.runtime} runtime needs it.",
            hint="Leave it out, or run trtserve itself in a container (`trtserve help how-to/gpus`).",
        )
    if spec.gpus and not served.needs_gpus:
        raise UsageError("--gpus does not apply: the engine was built for the CPU.", hint="Leave --gpus out.")
    models = sum(model.instances for model in served.core_models)
    if served.world_size > 1 and models > 1:
        raise RepositoryError(
            f"The repository has {counted(models, 'instance')} of models with {served.world_size} ranks; the "
            f"{served.runtime} runtime serves one of them per launch, because each rank is one process.",
            hint="Start one server for each, with --gpus and --auto-ports; --instances starts several of one model.",
        )


def orchestrator(
    setup: LaunchSetup, models: Sequence[CoreModel], *, spawn: bool = True, gpus: int = 0, nodes: int = 1
) -> Launch:
    """Return the orchestrator alone, which spawns its workers, or with `spawn` False all ranks.

    `gpus` is the number of GPUs of this machine, 0 when unknown. On several `nodes` the caller knows where each rank
    runs, and checks its GPUs (`require_node_devices`). Raises RepositoryError when the devices or ranks of the models
    collide and UsageError for a release whose workers cannot be started beforehand.
    """
    facts = launcher_facts(setup.release)
    if not spawn and not facts.spawn_switch:
        raise UsageError(
            f"Workers can be started before the orchestrator since TensorRT-LLM 0.13; this is {setup.release}.",
            hint="Leave --disable-spawn-processes out.",
        )
    if nodes == 1:
        require_own_devices(models, gpus)
    if not spawn:
        require_own_ranks(models)
    size = 1 if spawn else world_of(models)
    groups = tuple(rank_arguments(setup, rank, emptied_pools=gpus if spawn else None) for rank in range(size))
    environment = {ORCHESTRATOR: "1"}
    if facts.spawn_switch:
        environment[SPAWN_PROCESSES] = "1" if spawn else "0"
    return under_mpirun(setup, Orchestrator.name, groups, environment)


def mpi_ranks(served: ServedRepository) -> int:
    """Return the ranks that trtllm-llmapi-launch joins: 1 for several LLMs, which start workers of their own."""
    several = len(served.core_models) > 1 or served.core_models[0].instances > 1
    return 1 if several else served.world_size


def llmapi(setup: LaunchSetup, world_size: int) -> Launch:
    """Return a plain process for one GPU and for releases before 1.0, else ranks under mpirun.

    trtllm-llmapi-launch runs tritonserver on rank 0 and a worker of TensorRT-LLM on every other rank. Before 1.0 the
    LLM API starts its own workers.
    """
    if world_size == 1 or not launcher_facts(setup.release).llmapi_launch:
        return without_mpi(setup, LlmApi.name)
    _require_no_blanks(setup)
    groups = tuple((LLMAPI_LAUNCH, *rank_arguments(setup, rank)) for rank in range(world_size))
    return under_mpirun(setup, LlmApi.name, groups)


def slurm_task(setup: LaunchSetup) -> tuple[str, ...]:
    """Return the command of every task of srun. All have rank 0's arguments, since rank 0 alone starts tritonserver.

    trtllm-llmapi-launch hides SLURM_ and OMPI_ variables from tritonserver, so the command must not refer to them.
    """
    _require_no_blanks(setup)
    return (LLMAPI_LAUNCH, *rank_arguments(setup, 0))


def _require_no_blanks(setup: LaunchSetup) -> None:
    wrong = next((word for word in rank_arguments(setup, 0) if any(sign.isspace() for sign in word)), None)
    if wrong is not None:
        raise UsageError(
            f"{LLMAPI_LAUNCH} splits its command at spaces, and {wrong!r} contains one.",
            hint="Move the repository to a path without spaces.",
        )
