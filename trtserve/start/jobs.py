"""A server for other machines: the job of Slurm, or the objects of Kubernetes, that will run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.check.repository import require_sound
from trtserve.errors import ArtifactError, UsageError
from trtserve.files import writing
from trtserve.launch import Launch, Setup, leader, llmapi, orchestrator
from trtserve.launch.container import SQUASHFS, image_of, with_targets
from trtserve.launch.devices import require_node_devices
from trtserve.launch.kubernetes import KubernetesSpec, Object, compose_objects, gpus_on_node, to_yaml
from trtserve.launch.llmapi import task
from trtserve.launch.nodes import EngineNodes, fit_engines
from trtserve.launch.slurm import (
    SHM_PLACEHOLDER,
    Image,
    Job,
    SlurmSpec,
    compose_job,
    gpus_per_node,
    tasks_per_node,
)
from trtserve.ports import ipv4_address
from trtserve.progress import SILENT, Progress
from trtserve.releases.containers import containers_of
from trtserve.specs import ServerSpec
from trtserve.start.checks import require_release
from trtserve.start.elsewhere import require_sound_elsewhere
from trtserve.start.mentions import named_paths
from trtserve.start.plan import EMBEDDED, gpu_triton, server_name, server_setup
from trtserve.start.world import pool_of, require_engine_mode, require_world_size
from trtserve.triton.preflight import Served, inspect_repository, require_loadable
from trtserve.triton.server import CONTAINER_TRITON, Address, Triton

_MARK = "Written by `trtserve start --"
_EVERY_INTERFACE = "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What Kubernetes is given: the objects, and the notes that were made about them.

    `engines` are those that must be told about its nodes, in the repository here.
    """

    objects: Sequence[Object]
    notes: tuple[str, ...] = ()
    engines: Sequence[EngineNodes] = ()

    @property
    def text(self) -> str:
        """The manifest as a file for `kubectl apply`."""
        return f"# {_MARK}kubernetes`. Create it: kubectl apply -f FILE\n{to_yaml(self.objects)}"


def plan_job(
    repository: ModelRepository, spec: ServerSpec, slurm: SlurmSpec, folder: Path, *, progress: Progress = SILENT
) -> Job:
    """The job of Slurm that serves a repository, for `folder`; nothing is written.

    RepositoryError and UsageError say what stands in the way: the repository, the engine and the container's version,
    nodes × tasks and the world size.
    """
    name, served = _inspected(repository, spec, "--slurm", progress)
    if spec.multi_model and spec.spawn_processes:
        raise UsageError(
            "Under Slurm an orchestrator cannot spawn its workers.",
            hint="Add --disable-spawn-processes, with participant_ids in the repository.",
        )
    require_sound_elsewhere(repository, spec, progress)
    triton = CONTAINER_TRITON if spec.container else _node_triton(served)
    setup = _setup(triton, repository, served, spec, SHM_PLACEHOLDER, spec.host)
    launch = _launch(setup, served, spec, slurm.nodes)
    groups = launch.groups
    if served.runtime == "llmapi" and pool_of(served) > 1:
        groups = (task(setup),) * pool_of(served)
    without_gpu = 1 if spec.multi_model else 0
    each, gpus = tasks_per_node(slurm, len(groups)), gpus_per_node(slurm, len(groups), without_gpu)
    engines = _placed(repository, served, spec, [rank // each for rank in range(len(groups))], gpus, progress)
    job = compose_job(
        setup,
        groups,
        launch.environment,
        slurm,
        name=name,
        folder=folder,
        image=_image(repository, served, spec, folder, progress),
        without_gpu=without_gpu,
    )
    _warn_of_job(served, spec, slurm, progress)
    return replace(job, engines=engines)


def _image(
    repository: ModelRepository, served: Served, spec: ServerSpec, folder: Path, progress: Progress
) -> Image | None:
    """The container of the tasks: a tag, a name, or a squashfs file."""
    if spec.container is None:
        return None
    if spec.container.endswith(SQUASHFS):
        file = Path(spec.container).absolute()
        if not file.is_file():
            progress.warn(f"The image {file} is not on this machine; the nodes must have it.")
        image = str(file)
    else:
        image = image_of(spec.container)
    outside = named_paths(repository.path) + tuple(core.engine for core in served.core_models if core.engine)
    # The task's script lies beside the job's, so that folder is seen inside as well.
    return Image(name=image, mounts=_outer(with_targets((repository.path, *outside, folder))))


def _warn_of_job(served: Served, spec: ServerSpec, slurm: SlurmSpec, progress: Progress) -> None:
    if spec.host.startswith("127.") or spec.host == "localhost":
        progress.warn(f"The server will listen on {spec.host} of its node only: --host 0.0.0.0 lets others ask it.")
    if served.runtime == "llmapi" and slurm.time is None:
        progress.warn(
            "Without --time a server of the LLM API that fails may hold its GPUs as long as the partition allows: its "
            "launcher and workers wait for it."
        )


def _placed(
    repository: ModelRepository, served: Served, spec: ServerSpec, nodes: Sequence[int], gpus: int, progress: Progress
) -> Sequence[EngineNodes]:
    """The engines that must be told how many GPUs a node has; `nodes` holds the node of each rank.

    RepositoryError when a rank would take a GPU that its node does not give, or that another rank has.
    """
    if served.runtime == "llmapi":
        return ()
    require_node_devices(served.core_models, nodes, gpus, shared=not spec.multi_model)
    return fit_engines(repository.path, served.core_models, progress, nodes=max(nodes) + 1, gpus=gpus)


def write_job(job: Job) -> None:
    """Write the scripts, and make the folder of the logs; ArtifactError for files that are not ours."""
    for name, text in job.files.items():
        _write(job.folder / name, text, mode=0o755)
    with writing(job.logs):
        job.logs.mkdir(parents=True, exist_ok=True)
    for engine in job.engines:
        engine.write()


def plan_manifest(
    repository: ModelRepository,
    spec: ServerSpec,
    kubernetes: Callable[[str], KubernetesSpec],
    *,
    progress: Progress = SILENT,
) -> Manifest:
    """The objects of Kubernetes that serve a repository; `kubernetes` makes their wishes, given the image.

    The repository is expected in the volume under its own name, or where it is here if the volume is mounted there.
    """
    name, served = _inspected(repository, spec, "--kubernetes", progress)
    if spec.gpus:
        raise UsageError("--gpus does not go with --kubernetes: the cluster chooses the GPUs.", hint="Leave it out.")
    probe = _setup(CONTAINER_TRITON, repository, served, spec, f"trtserve_{name}_", _EVERY_INTERFACE)
    image = image_of(spec.container) if spec.container else containers_of(probe.release)[-1].image
    wishes = kubernetes(image)
    place = _place(repository.path, wishes)
    require_sound_elsewhere(repository, spec, progress, volume=Path(wishes.mount_path))
    setup = replace(probe, repository=place)
    launch = _launch(setup, served, spec, wishes.nodes)
    gpus = _claimed(served, wishes.nodes) if launch.ranks == 1 or spec.multi_model else launch.ranks
    if wishes.nodes > 1 and launch.ranks == 1:
        raise UsageError(
            f"--nodes is {wishes.nodes}; this server is one process, with its workers on its own node.",
            hint="Orchestrators: --disable-spawn-processes, with participant_ids. Several LLMs: one server for each."
            if spec.multi_model or served.runtime == "llmapi"
            else "Build the engine for more ranks: tensor × pipeline parallel.",
        )
    objects = compose_objects(setup, launch, wishes, name=name, gpus=gpus)
    each = gpus_on_node(wishes, gpus)
    pods = [rank // each for rank in range(gpus)]
    # The first pod has the orchestrator too.
    engines = _placed(repository, served, spec, [0, *pods] if spec.multi_model else pods, each, progress)
    if wishes.nodes > 1 and spec.container is None:
        progress.warn(f"{image} has no sshd, which pods need to start ranks: --container with an image that has it.")
    notes = [f"Image: {image}", f"Repository in the volume {wishes.claim}: {place}"]
    if engines:
        notes.append("Its engine's config.json was changed for these nodes: copy the repository to the volume again.")
    return Manifest(objects=objects, notes=tuple(notes), engines=engines)


def write_manifest(manifest: Manifest, file: Path) -> None:
    """Write the manifest; ArtifactError for a file that is not ours."""
    _write(file, manifest.text, mode=0o644)
    for engine in manifest.engines:
        engine.write()


def _inspected(repository: ModelRepository, spec: ServerSpec, flag: str, progress: Progress) -> tuple[str, Served]:
    """Name and content of a repository that another machine can serve."""
    name, served = server_name(repository, spec), inspect_repository(repository)
    require_loadable(repository)
    if served.runtime in EMBEDDED:
        require_sound(repository)  # one of the LLM API without its model.yaml looks like any Python model
        raise UsageError(
            f"{flag} is for engines on GPUs; this repository is served by one process on the CPU.",
            hint="Serve it here: leave the flag out.",
        )
    if flag == "--slurm" and spec.instances > 1:
        raise UsageError("--instances does not go with --slurm: one job is one server.", hint="Submit several jobs.")
    require_engine_mode(served, spec, elsewhere=True)
    require_world_size(served, spec, repository)
    require_release(served, spec, progress, repository=repository.path)
    return name, served


def _node_triton(served: Served) -> Triton:
    """Without a container what is installed here is expected on the nodes too, but not the wheel of a Python here."""
    found = gpu_triton(served, elsewhere=True)
    return found if found.package is None else CONTAINER_TRITON


def _setup(
    triton: Triton, repository: ModelRepository, served: Served, spec: ServerSpec, prefix: str, host: str
) -> Setup:
    address = Address(
        host=ipv4_address(host), http_port=spec.http_port, grpc_port=spec.grpc_port, metrics_port=spec.metrics_port
    )
    made = server_setup(triton, repository, served, address, spec, prefix)
    return replace(made, gpus=spec.gpus)


def _launch(setup: Setup, served: Served, spec: ServerSpec, nodes: int) -> Launch:
    if spec.multi_model:
        return orchestrator(setup, served.core_models, spawn=spec.spawn_processes, nodes=nodes)
    if served.runtime == "llmapi":
        return llmapi(setup, pool_of(served))
    return leader(setup, served.world_size)


def _claimed(served: Served, nodes: int) -> int:
    """GPUs of all models of an orchestrator; on several nodes the same numbers are other GPUs."""
    claimed = {device for core in served.core_models for group in core.gpu_device_ids for device in group}
    return (nodes == 1 and len(claimed)) or sum(core.world_size * core.instances for core in served.core_models)


def _place(repository: Path, wishes: KubernetesSpec) -> Path:
    """Where the repository is in the volume; UsageError for paths in its files that no volume has."""
    mount, here = Path(wishes.mount_path), repository.absolute()
    outside = next((path for path in named_paths(here) if not path.is_relative_to(mount)), None)
    if outside is not None:
        raise UsageError(
            f"The repository names {outside}, which is not below {mount}, where the volume is mounted.",
            hint="Make it with the engine inside and relative paths (trtserve repo), or choose --mount-path.",
        )
    return here if here.is_relative_to(mount) else mount / here.name


def _outer(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Paths without those below another one."""
    return tuple(path for path in paths if not any(path.is_relative_to(other) for other in paths if other != path))


def _write(path: Path, text: str, *, mode: int) -> None:
    with writing(path):
        if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise ArtifactError(
                f"{path} exists and was not written by trtserve; it is left alone.",
                hint="Choose another place with --out.",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
