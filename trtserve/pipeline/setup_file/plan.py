"""Plan what brings a machine to the state that a setup file describes, and do it.

Nothing is remembered about earlier runs: artefacts are reused by their fingerprints, and a running server is compared
by the arguments that its supervisor was started with. For a server that a cluster runs, its job or manifest is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from trtserve.artifacts import Adapter, Engine, Model, ModelRepository, load_artifact
from trtserve.bench.targets import missed_by
from trtserve.errors import LockedError, PortInUseError, ServerRunningError, UsageError
from trtserve.executor.loaders import is_embedded_runtime
from trtserve.executor.runtimes import RUNTIMES, choose_runtime
from trtserve.files import locked
from trtserve.host.ports import ipv4_address, is_free
from trtserve.pipeline import StageSummary
from trtserve.pipeline.import_spec import ImportSpec, as_json, engine_destination, pinned_source
from trtserve.pipeline.importing import ImportPlan, plan_import, require_resources, run_import
from trtserve.pipeline.setup_file import BenchmarkSetup, ClusterSetup, ModelSetup, ServerSetup, Setup, in_keys
from trtserve.process import arguments
from trtserve.progress import SILENT, Progress
from trtserve.server.checks import access_warnings
from trtserve.server.detach import start_arguments, start_in_background
from trtserve.server.front import require_protected
from trtserve.server.launch.cluster import ClusterJob, is_written, write_job
from trtserve.server.launch.clusters import CLUSTERS
from trtserve.server.plan import with_free_ports
from trtserve.server.shutdown import stop_server
from trtserve.server.state import Server, await_record, list_servers, recorded_server
from trtserve.specs import ServerSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.bench.report import BenchReport
    from trtserve.client.endpoint import Endpoint


Action = Literal["start", "restart", "keep", "write"]
_PORTS = ("http_port", "grpc_port", "metrics_port")


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model of the file and the plan of its import."""

    setup: ModelSetup
    plan: ImportPlan
    waits_for_draft: bool  # whether its repository can be planned only when the engine of its draft model exists

    def stages(self) -> list[StageSummary]:
        """Return the stages in order, as a dry run shows them."""
        *first, last = self.plan.stages()
        return [*first, {**last, "action": "make", "path": None} if self.waits_for_draft else last]

    @property
    def repository(self) -> ModelRepository | None:
        """The repository, if it exists already."""
        found = self.plan.repository
        return (
            None
            if found is None or not found.reused or self.waits_for_draft
            else load_artifact(ModelRepository, found.path)
        )

    @property
    def differences(self) -> list[str]:
        """Options in which the file differs from the last import of that name."""
        last = next((each for each in self.plan.store.recorded() if each.name == self.setup.name), None)
        if last is None or not last.spec:
            return []
        old, new = _flat(last.spec), _flat({**as_json(self.plan.spec), "source": pinned_source(self.plan.model)})
        changed = [key for key, value in new.items() if key in old and old[key] != value]
        return [f"{key}: {_shown(old[key])} → {_shown(new[key])}" for key in changed]


@dataclass(frozen=True, kw_only=True)
class PlannedServer:
    """A server of the file, and what has to be done about it."""

    setup: ServerSetup
    action: Action  # `write` is for the files of a cluster
    differences: tuple[str, ...] = ()  # what a restart changes of the command line, such as `--ui is dropped`
    moved: tuple[str, ...] = ()  # ports of the file that it does not have, or will not get: `http_port 8000 → 8003`

    @property
    def text(self) -> str:
        """The action, with what it changes."""
        changes = (*self.differences, *(() if self.action == "keep" else self.moved))
        return f"{self.action} ({', '.join(changes)})" if changes else self.action


@dataclass(frozen=True, kw_only=True)
class SetupPlan:
    """What `up` does: first the models, each after its draft model, then the servers."""

    models: tuple[PlannedModel, ...]
    servers: tuple[PlannedServer, ...]
    benchmarks: tuple[BenchmarkSetup, ...] = ()  # what is measured when all servers are ready
    unnamed: tuple[str, ...] = ()  # servers of the store that run, and that the file does not name
    store: Store

    @property
    def notes(self) -> list[str]:
        """What `up` leaves as it is, though the file says otherwise."""
        return [
            *(
                f"Server {each.setup.name} keeps its ports, as auto_ports allows: {', '.join(each.moved)}. To move it "
                f"where those of the file are free: trtserve stop {each.setup.name}, then `trtserve up`."
                for each in self.servers
                if each.action == "keep" and each.moved
            ),
            *(
                f"Server {name} runs, and the file does not name it. To stop it: trtserve stop {name}"
                for name in self.unnamed
            ),
        ]

    @property
    def warnings(self) -> list[str]:
        """What others will be able to do to the servers that `up` starts on this machine."""
        embedded = {model.setup.name: is_embedded_runtime(model.plan.runtime) for model in self.models}
        return [
            f"servers.{server.name}: {in_keys(warning)}"
            for server, action in ((each.setup, each.action) for each in self.servers)
            if action in ("start", "restart")
            for warning in access_warnings(
                server.spec,
                ipv4_address(server.spec.host),
                embedded=embedded[server.model] and server.spec.container is None,
            )
        ]


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What `up` has brought up."""

    servers: tuple[Server, ...]  # ready servers on this machine
    jobs: tuple[WrittenJob, ...]  # servers that a cluster starts


def plan_setup(setup: Setup, *, store: Store | None = None, progress: Progress = SILENT) -> SetupPlan:
    """Plan all imports and compare the running servers. Raises what `plan_import` raises; nothing is changed."""
    store = store or Store()
    models: dict[str, PlannedModel] = {}
    for model in setup.models:
        spec = import_spec(model, store, progress)
        waits = False
        if model.draft is not None:
            drafting = models[model.draft].plan
            waits = drafting.builds
            spec = spec if waits else _with_draft(spec, drafting)
        plan = plan_import(spec, store=store, progress=progress)
        models[model.name] = PlannedModel(setup=model, plan=plan, waits_for_draft=waits)
    servers = []
    for server in setup.servers:
        served = models[server.model]
        if server.cluster is not None:
            require_cluster(server, server.cluster, served.plan.runtime)
        else:
            _require_protected(server)
        action = _action(server, served.repository, store)
        differences = _differences(server, served.repository, store) if action == "restart" else ()
        moved = _moved(server.spec, _ports(server, action, store))
        servers.append(PlannedServer(setup=server, action=action, differences=differences, moved=moved))
    named = {server.name for server in setup.servers}
    return SetupPlan(
        models=tuple(models.values()),
        servers=tuple(servers),
        benchmarks=setup.benchmarks,
        unnamed=tuple(each.name for each in list_servers(store) if each.name not in named),
        store=store,
    )


def bring_up(plan: SetupPlan, *, progress: Progress = SILENT) -> Brought:
    """Run the imports that are missing, start the servers in the background, and return when they are ready.

    An interrupted run leaves only complete artefacts and ready servers; the next one continues after them. A server
    whose options or model changed is stopped when all models are there.
    """
    for planned in plan.models:
        require_resources(planned.plan)
    for server in plan.servers:
        if server.action == "start" and not _is_recorded(server.setup, plan.store):
            _require_ports(server.setup.spec)
    made: dict[str, ModelRepository] = {}
    specs = {planned.setup.name: planned.plan.spec for planned in plan.models}
    for planned in plan.models:
        name, imported = planned.setup.name, planned.plan
        if planned.waits_for_draft:
            drafting = plan_import(specs[str(planned.setup.draft)], store=plan.store)
            imported = plan_import(_with_draft(imported.spec, drafting), store=plan.store, progress=progress)
            specs[name] = imported.spec
        progress.step(f"Model {name}")
        with plan.store.in_use(name):
            made[name] = run_import(imported, progress=progress)
    servers, jobs = [], []
    for server in plan.servers:
        setup, repository = server.setup, made[server.setup.model]
        if setup.cluster is not None:
            progress.step(f"Files of server {setup.name} for {setup.cluster.kind}")
            jobs.append(write_files(setup, setup.cluster, repository, progress))
            continue
        # What another `up` is starting is not ready, and would be stopped.
        with locked(plan.store.root / "locks" / f"up-{setup.name}.lock"):
            servers.append(_serve(setup, repository, plan.store, progress))
    return Brought(servers=tuple(servers), jobs=tuple(jobs))


def _serve(setup: ServerSetup, repository: ModelRepository, store: Store, progress: Progress, tries: int = 3) -> Server:
    """Return the ready server. One that an `up` had begun to start, and that was killed, is stopped first."""
    await_record(setup.name, store)
    running = recorded_server(setup.name, store)
    action = _action(setup, repository, store)
    if running is not None and action == "keep":
        progress.step(f"Server {setup.name} is running already")
        return running
    if action == "restart":
        stop_server(setup.name, store=store, progress=progress)
    spec = with_free_ports(setup.spec) if setup.spec.auto_ports else setup.spec
    try:
        return start_in_background(repository, spec, store=store, progress=progress)
    except (LockedError, ServerRunningError):
        if tries == 1:
            raise
        progress.step(f"Another process starts {setup.name} too …")
    return _serve(setup, repository, store, progress, tries - 1)


def _is_recorded(server: ServerSetup, store: Store) -> bool:
    """Return whether a server of this name runs, after another process that is about to start it has recorded it."""
    if server.cluster is None:
        await_record(server.name, store)
    running = recorded_server(server.name, store)
    return running is not None and running.alive()


def bring_down(setup: Setup, *, drain: float = 0.0, progress: Progress = SILENT) -> list[Server]:
    """Stop the servers of the file that run, the last one first, and return them; remove what a killed `up` left."""
    store = Store()
    for server in setup.servers:
        await_record(server.name, store)
    named = [server.name for server in reversed(setup.servers) if recorded_server(server.name, store) is not None]
    stopped = [stop_server(name, drain=drain, store=store, progress=progress) for name in named]
    store.sweep()
    return stopped


def import_spec(model: ModelSetup, store: Store, progress: Progress) -> ImportSpec:
    convert = model.convert
    runtime = choose_runtime(model.build.runtime, container=model.build.container)
    if (used := runtime.without_unused(convert)) != convert:
        progress.warn(f"trtllm_version {convert.trtllm_version} of {model.name} is not used: {runtime.name} serves it.")
        convert = used
    adapters = {
        name: folder if folder.is_absolute() else store.find(Adapter, str(folder)).path
        for name, folder in model.repository.lora.items()
    }
    return ImportSpec(
        source=model.source,
        convert=convert,
        build=model.build,
        repository=replace(model.repository, lora=adapters),
        tokenizer=None if model.tokenizer is None else store.find(Model, model.tokenizer, progress=progress).path,
        engine_out=engine_destination(model.name),
    )


def _with_draft(spec: ImportSpec, drafting: ImportPlan) -> ImportSpec:
    if drafting.build is None:
        raise UsageError(f"{drafting.spec.name} has no engine that could draft for {spec.name}.")
    engine = load_artifact(Engine, drafting.build.path)
    return replace(spec, draft=engine, draft_tokenizer=drafting.model.path)


def _action(server: ServerSetup, repository: ModelRepository | None, store: Store) -> Action:
    if server.cluster is not None:
        written = repository is not None and is_written(_plan_job(server, server.cluster, repository, SILENT))
        return "keep" if written else "write"
    running = recorded_server(server.name, store)
    if running is None or not running.alive():
        return "start"
    if repository is None or running.supervisor is None or running.state != "ready":
        return "restart"
    wanted = start_arguments(repository, _on_ports_of(running, server.spec))
    return "keep" if _started_with(arguments(running.supervisor)) == wanted else "restart"


def _require_protected(server: ServerSetup) -> None:
    """Raise UsageError for an exposed server without protection, which would be refused only after the imports."""
    try:
        require_protected(server.spec, ipv4_address(server.spec.host))
    except UsageError as error:
        raise UsageError(
            f"servers.{server.name}: {in_keys(error.message)}",
            hint="Its keys are api_key_file, tls_certificate, tls_key, no_tls, no_auth: `trtserve help security.md`.",
        ) from error


def _require_ports(spec: ServerSpec) -> None:
    """Raise PortInUseError for a taken port, before the long work."""
    ports = {key: getattr(spec, key) for key in _PORTS}
    host = ipv4_address(spec.host)
    taken = [f"{key} {port}" for key, port in ports.items() if not is_free(host, port)]
    if taken and not spec.auto_ports:
        raise PortInUseError(
            f"Server {spec.name}: {', '.join(taken)} of {spec.host} is in use.",
            hint="Give other ports in the file, or auto_ports: true",
        )


def _ports(server: ServerSetup, action: Action, store: Store) -> ServerSpec:
    """Return the options with the ports that a server has (`keep`), or gets by the action."""
    spec, running = server.spec, recorded_server(server.name, store)
    if not spec.auto_ports or server.cluster is not None:
        return spec
    if action == "start" or running is None:
        return with_free_ports(spec)
    kept = _on_ports_of(running, spec)
    if action == "keep":
        return kept
    host = ipv4_address(spec.host)  # those of the file may have become free
    free = {key: port for key in _PORTS if is_free(host, port := getattr(spec, key))}
    return replace(kept, **free)


def _moved(wanted: ServerSpec, found: ServerSpec) -> tuple[str, ...]:
    ports = ((key, getattr(wanted, key), getattr(found, key)) for key in _PORTS)
    return tuple(f"{key} {old} → {new}" for key, old, new in ports if old != new)


def _on_ports_of(running: Server, spec: ServerSpec) -> ServerSpec:
    """Return the options with the ports that the running server got, if it was free to choose."""
    if not spec.auto_ports:
        return spec
    address = running.address
    ports = replace(spec, http_port=address.http_port, grpc_port=address.grpc_port, metrics_port=address.metrics_port)
    return ports if running.proxy is None else replace(ports, proxy_port=running.proxy.http_port)


def _differences(server: ServerSetup, repository: ModelRepository | None, store: Store) -> tuple[str, ...]:
    """Return how the command line of the running server differs from that of the file, an option each."""
    running = recorded_server(server.name, store)
    if running is None or running.supervisor is None or repository is None:
        return ()
    before = _options_in(_started_with(arguments(running.supervisor)))
    after = _options_in(start_arguments(repository, _ports(server, "restart", store)))
    found = []
    for name in dict.fromkeys((*before, *after)) if before else ():
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            found.append(" ".join(filter(None, (name, old, new, "is dropped" if new is None else "is added"))))
        elif old != new:
            found.append(f"{name} {old} → {new}")
    return tuple(found)


def _options_in(words: list[str]) -> dict[str, str]:
    """Return the options of a command line → their values, "" for a switch."""
    found: dict[str, list[str]] = {}
    values: list[str] = []  # of the option before; the name of a model has none
    for word in words[1:]:
        name, given, value = word.partition("=")
        if word.startswith("--"):
            values = found.setdefault(name, [])
            values += [value] if given else []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in found.items()}


def _started_with(words: list[str]) -> list[str]:
    """Return the arguments of a supervisor's command line, without the file that it reported to."""
    found = words[words.index("start") :] if "start" in words else []
    if "--report-to" in found:
        at = found.index("--report-to")
        found = found[:at] + found[at + 2 :]
    return found


def _shown(value: Any) -> str:
    """Return a value as a setup file has it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return key → value of a recorded import, whose stages' options stand together as in the file."""
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        flat |= value if key in ("convert", "build", "repository") else {key: value}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat.items()}


@dataclass(frozen=True, kw_only=True)
class WrittenJob:
    """The files of a server that a cluster runs."""

    server: str
    model: str
    kind: str
    job: ClusterJob

    @property
    def next_steps(self) -> Sequence[str]:
        return self.job.next_steps

    def to_json(self) -> dict[str, Any]:
        """Return name, model, kind of cluster, and the files."""
        return {"name": self.server, "model": self.model, "cluster": self.kind, **self.job.record}


def require_cluster(server: ServerSetup, cluster: ClusterSetup, runtime: str) -> None:
    """Raise UsageError for options that no job can have, and for a model that is served on CPUs."""
    with _named(server, cluster):
        CLUSTERS[cluster.kind].settings(cluster.spec, cluster.options, server.spec)
    if RUNTIMES[runtime].device() == "cpu":
        raise UsageError(
            f"Server {server.name} is for {cluster.kind}, which starts engines on GPUs; the runtime {runtime} serves "
            f"{server.model} on the CPU.",
            hint=f"Give the model a runtime for GPUs, such as `runtime: torch`, or leave out `{cluster.kind}`.",
        )


def write_files(
    server: ServerSetup, cluster: ClusterSetup, repository: ModelRepository, progress: Progress = SILENT
) -> WrittenJob:
    """Write the job or manifest, unless it is there. Raises what `plan_job` of the cluster and `write_job` raise."""
    job = _plan_job(server, cluster, repository, progress)
    if not is_written(job):
        write_job(job)
    for note in job.notes:
        progress.step(note)
    return WrittenJob(server=server.name, model=server.model, kind=cluster.kind, job=job)


def stop_command(cluster: ClusterSetup) -> str:
    """Return what stops such a server."""
    return CLUSTERS[cluster.kind].stop_command(cluster.place)


def _plan_job(
    server: ServerSetup, cluster: ClusterSetup, repository: ModelRepository, progress: Progress
) -> ClusterJob:
    module = CLUSTERS[cluster.kind]
    with _named(server, cluster):
        settings = module.settings(cluster.spec, cluster.options, server.spec)
        return module.plan_job(repository, server.spec, settings, cluster.place, progress=progress)


@contextmanager
def _named(server: ServerSetup, cluster: ClusterSetup) -> Iterator[None]:
    """Let a refusal name the server and the keys of the file instead of the flags of `start`."""
    try:
        yield
    except UsageError as error:
        hint = None if error.hint is None else in_keys(error.hint)
        raise UsageError(f"servers.{server.name}.{cluster.kind}: {in_keys(error.message)}", hint=hint) from error


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """A benchmark that was run."""

    setup: BenchmarkSetup
    report: BenchReport

    @property
    def missed(self) -> list[str]:
        """The limits that its figures do not meet, one sentence for each."""
        return missed_by(self.report.statistics, self.setup.requirements)

    def to_json(self) -> dict[str, Any]:
        """Return name, report and missed limits."""
        return {"name": self.setup.name, "missed": self.missed, "report": self.report.to_json()}


def measure(
    setup: BenchmarkSetup, endpoint: Endpoint, *, metrics: str | None, progress: Progress = SILENT
) -> BenchmarkResult:
    """Measure a server of the file. Raises what `plan_benchmark` and `run_benchmark` raise."""
    from trtserve.bench.exports import write_result
    from trtserve.bench.plan import plan_benchmark
    from trtserve.bench.run import run_benchmark

    progress.step(f"Benchmark {setup.name}")
    report = run_benchmark(plan_benchmark(setup.spec, endpoint), progress=progress, metrics=metrics)
    if setup.out is not None:
        write_result(report, setup.out)
    return BenchmarkResult(setup=setup, report=report)
