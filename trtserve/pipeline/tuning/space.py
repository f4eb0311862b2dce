"""What a search may change, and which combinations can work: the candidates of `tune`.

A *configuration* is what a server is made of, a *load* how much is asked of it. Combinations that `plan` refuses are
left out before anything is built.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import TrtserveError, UsageError
from trtserve.executor.runtimes import RUNTIMES, choose_runtime
from trtserve.host.gpus import list_gpus
from trtserve.pipeline.import_spec import ImportSpec, as_json
from trtserve.pipeline.importing import ImportPlan, plan_import, require_resources
from trtserve.pipeline.setup_file import (
    LOADS,
    ModelSetup,
    SearchSetup,
    ServerSetup,
    Setup,
    model_options,
    server_options,
)
from trtserve.pipeline.setup_file.plan import import_spec
from trtserve.pipeline.tuning.roofline import ModelShape
from trtserve.progress import SILENT, Progress
from trtserve.specs import BenchSpec, BuildSpec, ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.build import Device
from trtserve.specs.options import options_of
from trtserve.specs.runtime import Runtime
from trtserve.store import Store

_LEVELS = (1, 2, 4, 8, 16, 32)  # requests in flight that are tried where the file does not say it
_MOST = 20_000
Values = tuple[tuple[str, Any], ...]  # options and their values, in the order of the ranges


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that can work: the values that differ from the file, and the plan of its import."""

    values: Values
    plan: ImportPlan
    server: ServerSpec
    shape: ModelShape

    @property
    def name(self) -> str:
        """Its values for people; the file's own configuration is called so."""
        return words(self.values) or "as in the file"


@dataclass(frozen=True, kw_only=True)
class Space:
    """All candidates, the file's own one first, the loads, and what was ruled out."""

    model: ModelSetup
    server: ServerSetup
    candidates: tuple[Candidate, ...]
    loads: tuple[Values, ...]
    current: Mapping[str, Any]  # the file's own value of every option
    refused: Mapping[str, str]  # configuration → why it cannot work


def words(values: Values) -> str:
    """Return values for people: `max_batch_size 8, quantize int8`."""
    return ", ".join(f"{name} {value}" for name, value in values)


def find_space(setup: Setup, search: SearchSetup, *, store: Store, progress: Progress = SILENT) -> Space:
    """Return what the search tries. Raises UsageError for one without end, and the error of the file's own plan."""
    server = next(each for each in setup.servers if each.name == search.benchmark.server)
    model = next(each for each in setup.models if each.name == server.model)
    if server.cluster is not None or model.draft is not None:
        part = "is for a cluster" if server.cluster is not None else f"serves {model.name}, which has a draft"
        raise UsageError(f"servers.{server.name} {part}; `tune` tries servers of one model on this machine.")
    runtime = choose_runtime(model.build.runtime, container=model.build.container)
    device = runtime.device(model.build.device)
    ranges = dict(search.ranges) or _usual(runtime, device)
    loads = _loads({name: ranges.pop(name) for name in LOADS if name in ranges}, search.benchmark.spec)
    count = len(loads)
    for values in ranges.values():
        count *= len(values)
    if count > _MOST:
        raise UsageError(f"The ranges have {count} combinations; at most {_MOST} are searched.", hint="Leave some out.")
    own = _candidate((), model, server, store, progress)
    found, refused = {own.values: own}, dict[str, str]()
    specs = (server.spec, model.repository, model.build, model.convert)
    current = {name: getattr(spec, name) for spec in specs for name in options_of(type(spec))}
    for chosen in itertools.product(*ranges.values()):
        pairs = zip(ranges, chosen, strict=True)
        values = tuple((name, value) for name, value in pairs if value != current[name])
        try:
            found.setdefault(values, _candidate(values, model, server, store, SILENT))
        except TrtserveError as error:
            refused[words(values)] = error.message
    unique: dict[str, Candidate] = {}
    for each in found.values():
        unique.setdefault(_what(each), each)
    return Space(
        model=model, server=server, candidates=tuple(unique.values()), loads=loads, current=current, refused=refused
    )


def _what(candidate: Candidate) -> str:
    """Return what makes a server; a limit that equals the runtime's default makes the same one again."""
    asked = as_json(candidate.plan.spec)
    build = {key: value for key, value in asked["build"].items() if key not in _RESOLVED}
    return json.dumps([{**asked, "build": build}, asdict(candidate.server), asdict(candidate.shape)], default=str)


_RESOLVED = ("max_batch_size", "max_num_tokens")
"""Options whose values, as the runtime fills them in, are in a candidate's shape."""


def _usual(runtime: Runtime, device: Device) -> dict[str, tuple[Any, ...]]:
    """Return the runtime's ranges, with as many ranks as there are GPUs at most."""
    ranges: dict[str, tuple[Any, ...]] = dict(runtime.ranges[device])
    if "tp_size" in ranges:
        ranges["tp_size"] = tuple(size for size in ranges["tp_size"] if size <= max(1, len(list_gpus())))
    return ranges


def _loads(ranges: Mapping[str, Sequence[Any]], spec: BenchSpec) -> tuple[Values, ...]:
    if not ranges and not spec.open_loop:
        ranges = {"concurrency": (spec.concurrency,) if spec.concurrency else _LEVELS}
    return tuple(tuple(zip(ranges, chosen, strict=True)) for chosen in itertools.product(*ranges.values()))


def changed(model: ModelSetup, server: ServerSpec, values: Mapping[str, Any]) -> tuple[ModelSetup, ServerSpec]:
    """Return model and server with other values. Raises UsageError for values that cannot be together."""

    def other(spec: Any, known: Mapping[str, Any]) -> Any:
        own = options_of(type(spec))
        return replace(spec, **{name: value for name, value in values.items() if name in own and name in known})

    known = model_options()
    model = replace(
        model,
        convert=cast(ConvertSpec, other(model.convert, known)),
        build=cast(BuildSpec, other(model.build, known)),
        repository=cast(RepositorySpec, other(model.repository, known)),
    )
    only_server = {name: option for name, option in server_options().items() if name not in known}
    return model, cast(ServerSpec, other(server, only_server))


def _candidate(values: Values, model: ModelSetup, server: ServerSetup, store: Store, progress: Progress) -> Candidate:
    other, spec = changed(model, server.spec, dict(values))
    plan = plan_import(import_spec(other, store, progress), store=store, progress=progress)
    require_resources(plan)
    return Candidate(values=values, plan=plan, server=spec, shape=_shape(plan, plan.spec, spec, values))


def _shape(plan: ImportPlan, spec: ImportSpec, server: ServerSpec, values: Values) -> ModelShape:
    """Return what the model of speed has to know."""
    if plan.needs is not None:
        engine = plan.needs.engine
        limits, kv = engine.limits, engine.kv_bytes_per_token
        weights, item = engine.disk_bytes or plan.checkpoint_bytes, _ITEM.get(engine.weights_precision, 2.0)
    else:
        config = plan.hugging_face or EngineConfig()
        limits = RUNTIMES[plan.runtime].gpu_limits
        kv, weights, item = 0, plan.model.weight_bytes, 2.0
        if config:
            limits = replace(limits, max_batch_size=config.build.max_batch_size)
            limits = replace(limits, max_num_tokens=config.build.max_num_tokens)
    ranks = spec.convert.ranks
    return ModelShape(
        weight_bytes=weights / ranks,
        kv_bytes=kv,
        parameters=weights / item / ranks,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        replicas=server.instances,
        kind=words(tuple(pair for pair in values if pair[0] not in ("max_batch_size", "max_num_tokens"))),
    )


_ITEM = {"float32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}  # bytes of a weight; all others have two
