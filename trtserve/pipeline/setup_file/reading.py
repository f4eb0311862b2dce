"""Read a setup file; every refusal names the file, the line and the nearest known key. Write one of an import.

Its keys are the fields of the specs, so their declarations (`specs/options.py`) check the values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from trtserve.bench.targets import read_goal, read_requirements
from trtserve.errors import ArtifactError, UsageError, did_you_mean
from trtserve.files import LARGEST_YAML, read_text
from trtserve.pipeline.import_spec import recorded_spec
from trtserve.pipeline.setup_file import (
    AIMS,
    BENCHMARK_KEYS,
    MODEL_SPECS,
    SCALARS,
    SEARCH_KEYS,
    BenchmarkSetup,
    ClusterSetup,
    ModelSetup,
    SearchSetup,
    ServerSetup,
    Setup,
    benchmark_options,
    cluster_options,
    in_keys,
    model_options,
    range_options,
    server_options,
)
from trtserve.specs import BenchSpec, ServerSpec
from trtserve.specs.bench import FILE_DEFAULTS, RANDOM
from trtserve.specs.cluster import INSTEAD, ON_THIS_MACHINE, OPTIONS, ClusterSpec
from trtserve.specs.command_line import given_values
from trtserve.specs.options import Option, options_of, read_value
from trtserve.store import Store

HINT = "`trtserve help how-to/setup-file` explains each key; `trtserve init FILE` writes one with comments."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def template() -> str:
    """Return a file with comments, which serves the demo model."""
    return (Path(__file__).parent / "template.yaml").read_text(encoding="utf-8")


def read_setup(path: Path) -> Setup:
    """Return what the file asks for. Raises UsageError, with the line, for everything that it should not say."""
    hint = f"Write one with comments: trtserve init {path}"
    try:
        text = read_text(path, UsageError, limit=LARGEST_YAML)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.", hint=hint) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = text.rstrip().count("\n")  # what ends too early ends before its line break
        line = "" if mark is None else f":{min(mark.line, last) + 1}"
        raise UsageError(f"{path}{line}: not YAML: {error.problem or error.context}.", hint=HINT) from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {error}.", hint=HINT) from error
    except RecursionError:
        raise UsageError(f"{path}: its lists or mappings are nested too deeply.") from None
    if root is None:
        raise UsageError(f"{path} is empty.", hint=f"Remove it first. {hint}")
    return _Document(path).setup(root)


@dataclass(frozen=True)
class _Document:
    path: Path
    lines: dict[str, yaml.Node] = field(default_factory=dict)  # model → where its draft is named

    def error(self, node: yaml.Node, message: str, *, hint: str | None = None) -> UsageError:
        return UsageError(f"{self.path}:{node.start_mark.line + 1}: {message}", hint=hint or HINT)

    def setup(self, root: yaml.Node) -> Setup:
        parts = self.mapping(root, "the file", ("models", "servers", "benchmarks", "tune"))
        if "models" not in parts:
            raise self.error(root, "models is missing.", hint="Name at least one model.")
        models = {name: self.model(name, node) for name, node in self.mapping(parts["models"], "models").items()}
        for model in models.values():
            if model.draft is not None:
                self.require_known(model.draft, models, self.lines[model.name], f"models.{model.name}.draft", "model")
        servers = self.mapping(parts["servers"], "servers") if "servers" in parts else {}
        made = [self.server(name, node, models) for name, node in servers.items()]
        self.require_own_ports(made, servers)
        benchmarks = self.mapping(parts["benchmarks"], "benchmarks") if "benchmarks" in parts else {}
        searches = self.mapping(parts["tune"], "tune") if "tune" in parts else {}
        return Setup(
            path=self.path,
            models=self.in_order(models),
            servers=tuple(made),
            benchmarks=tuple(self.benchmark(name, node, made) for name, node in benchmarks.items()),
            searches=tuple(self.search(name, node, made) for name, node in searches.items()),
        )

    def mapping(self, node: yaml.Node, what: str, known: Collection[str] = ()) -> dict[str, yaml.Node]:
        """Return key → node of a mapping, whose keys are among the `known` ones if there are any."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping: lines of `key: value`.")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.tag)
            if known and name not in known:
                hint = did_you_mean(name.replace("-", "_"), known, f"Known: {', '.join(sorted(known))}.")
                raise self.error(key, f"{what} has no key {name!r}.", hint=hint)
            if name in found:
                raise self.error(key, f"{what} has {name!r} twice.")
            if what in ("models", "servers", "benchmarks", "tune") and not _NAME.fullmatch(name):
                raise self.error(
                    key, f"{name!r} is not a valid name.", hint="Use at most 100 letters, digits, '.', '_' and '-'."
                )
            found[name] = value
        return found

    def model(self, name: str, node: yaml.Node) -> ModelSetup:
        what, options = f"models.{name}", model_options()
        given = self.mapping(node, what, [*SCALARS, *options])
        self.lines[name] = given.get("draft", node)
        own = {key: self.text(given[key], f"{what}.{key}") for key in SCALARS if key in given}
        if "source" not in own:
            raise self.error(node, f"{what} has no source.", hint=f"Say where it comes from: {SCALARS['source']}")
        values = {key: self.value(each, options[key], what) for key, each in given.items() if key in options}
        convert, build, repository = (self.spec(spec, values, node, what) for spec in MODEL_SPECS)
        return ModelSetup(
            name=name,
            source=self.beside(own["source"]),
            tokenizer=self.beside(own["tokenizer"]) if "tokenizer" in own else None,
            draft=own.get("draft"),
            convert=convert,
            build=build,
            repository=replace(repository, name=name),
        )

    def server(self, name: str, node: yaml.Node, models: Collection[str]) -> ServerSetup:
        what, options = f"servers.{name}", server_options()
        given = self.mapping(node, what, ["model", *OPTIONS, *options])
        if "model" not in given:
            raise self.error(node, f"{what} has no model.", hint=f"Name one of the file: {', '.join(models)}.")
        model = self.text(given["model"], f"{what}.model")
        self.require_known(model, models, given["model"], f"{what}.model", "model")
        values = {key: self.value(each, options[key], what) for key, each in given.items() if key in options}
        return ServerSetup(
            model=model,
            spec=self.spec(ServerSpec, {**values, "name": name}, node, what),
            cluster=self.cluster(name, given, node, what),
        )

    def cluster(self, name: str, given: Mapping[str, yaml.Node], node: yaml.Node, what: str) -> ClusterSetup | None:
        """Return the cluster of a server, whose files go beside this one unless `out` says otherwise."""
        kinds = [kind for kind in OPTIONS if kind in given]
        if not kinds:
            return None
        if len(kinds) > 1:
            raise self.error(node, f"{what} has {' and '.join(kinds)}.", hint="Give one of them.")
        (kind,) = kinds
        here = next((key for key in ON_THIS_MACHINE[kind] if key in given), None)
        if here is not None:
            raise self.error(
                given[here],
                f"{what}.{here} is for a server on this machine, and this one has {kind}.",
                hint=in_keys(INSTEAD[kind]),
            )
        where, options = f"{what}.{kind}", cluster_options(kind)
        own = self.mapping(given[kind], where, options)
        values = {key: self.value(each, options[key], where) for key, each in own.items()}
        return ClusterSetup(
            kind=kind,
            spec=self.spec(ClusterSpec, {**values, kind: True}, given[kind], where),
            options=self.spec(OPTIONS[kind], values, given[kind], where),
            place=values.get("out", self.path_beside(f"{name}{OPTIONS[kind].SUFFIX}")),
        )

    def search(self, name: str, node: yaml.Node, made: Collection[ServerSetup]) -> SearchSetup:
        what = f"tune.{name}"
        own = self.mapping(node, what, [*BENCHMARK_KEYS, *SEARCH_KEYS, *benchmark_options()])
        goal, aim = (self.text(own[key], f"{what}.{key}") if key in own else "" for key in ("goal", "max"))
        if aim not in ("", *AIMS):
            raise self.error(own["max"], f"{what}.max is {aim!r}; expected one of {', '.join(AIMS)}.")
        try:
            limits = read_goal(goal)
        except UsageError as error:
            raise self.error(own["goal"], f"{what}: {error.message}", hint=error.hint) from error
        return SearchSetup(
            benchmark=self.benchmark(name, node, made, "tune", SEARCH_KEYS),
            goal=limits,
            aim=aim or AIMS[0],
            ranges=self.ranges(own["ranges"], f"{what}.ranges") if "ranges" in own else {},
        )

    def ranges(self, node: yaml.Node, what: str) -> dict[str, tuple[Any, ...]]:
        options, found = range_options(), {}
        for key, each in self.mapping(node, what, options).items():
            if not isinstance(each, yaml.SequenceNode) or not each.value:
                raise self.error(each, f"{what}.{key} must be a list of values to try, such as [4, 8, 16].")
            found[key] = tuple(dict.fromkeys(self.value(value, options[key], what) for value in each.value))
        return found

    def benchmark(
        self,
        name: str,
        node: yaml.Node,
        made: Collection[ServerSetup],
        part: str = "benchmarks",
        others: Collection[str] = (),
    ) -> BenchmarkSetup:
        """Return a benchmark of the file; a search has the keys `others` besides."""
        what, options, servers = f"{part}.{name}", benchmark_options(), [server.name for server in made]
        given = self.mapping(node, what, [*BENCHMARK_KEYS, *others, *options])
        if "server" not in given:
            known = (
                f"Name one of the file: {', '.join(servers)}." if servers else "Describe one under `servers:` first."
            )
            raise self.error(node, f"{what} has no server.", hint=known)
        server = self.text(given["server"], f"{what}.server")
        self.require_known(server, servers, given["server"], f"{what}.server", "server")
        if any(each.name == server and each.cluster is not None for each in made):
            raise self.error(
                given["server"],
                f"{what} measures {server}, which a cluster runs: `up` only writes its files.",
                hint="When it runs: trtserve bench token-norm-dist --url HOST:PORT",
            )
        values = {key: self.value(each, options[key], what) for key, each in given.items() if key in options}
        strict = values.pop("strict", False)
        traffic = self.traffic(given, node, what)
        return BenchmarkSetup(
            name=name,
            server=server,
            spec=self.spec(
                BenchSpec, {**FILE_DEFAULTS.get(str(traffic["traffic"]), {}), **values}, node, what, traffic
            ),
            strict=strict,
            requirements=self.requirements(given["limits"], what) if "limits" in given else {},
            out=self.path_beside(self.text(given["out"], f"{what}.out")) if "out" in given else None,
        )

    def traffic(self, given: Mapping[str, yaml.Node], node: yaml.Node, what: str) -> dict[str, Any]:
        """Return the kind of a benchmark's traffic, and its file."""
        kinds = [key for key in ("traffic", "dataset", "trace") if key in given]
        if len(kinds) > 1:
            raise self.error(node, f"{what} has {' and '.join(kinds)}.", hint="Give one of them.")
        if not kinds:
            return {"traffic": RANDOM[0]}
        (key,) = kinds
        text = self.text(given[key], f"{what}.{key}")
        if key != "traffic":
            return {"traffic": "replay" if key == "trace" else key, key: self.path_beside(text)}
        if text not in RANDOM:
            raise self.error(given[key], f"{what}.traffic is {text!r}; expected one of {', '.join(RANDOM)}.")
        return {"traffic": text}

    def requirements(self, node: yaml.Node, what: str) -> Mapping[str, float]:
        name = f"{what}.limits"
        words = {key: self.text(each, f"{name}.{key}") for key, each in self.mapping(node, name).items()}
        try:
            return read_requirements(words)
        except UsageError as error:
            raise self.error(node, f"{name}: {error.message}", hint=error.hint) from error

    def spec(
        self,
        kind: type[Any],
        values: Mapping[str, Any],
        node: yaml.Node,
        what: str,
        fixed: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Return a spec of those values that are its options, and of fields that are none."""
        try:
            return kind(**{name: value for name, value in values.items() if name in options_of(kind)}, **fixed)
        except UsageError as error:
            hint = None if error.hint is None else in_keys(error.hint)
            raise self.error(node, f"{what}: {in_keys(error.message)}", hint=hint) from error

    def text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise self.error(node, f"{what} must be one word.")
        return str(node.value)

    def value(self, node: yaml.Node, option: Option, what: str) -> Any:
        """Return a field's value. A version such as 25.12 is read as it is written, not as a number."""
        name = f"{what}.{option.name}"
        if node.tag == "tag:yaml.org,2002:null":
            if option.nullable:
                return None
            raise self.error(node, f"{name} has no value.")
        value = self.contained(node, option, name)
        try:
            # Messages name the key instead of the flag.
            replace(option, declared=replace(option.declared, flags=(name,))).check(value)
        except UsageError as error:
            raise self.error(node, error.message) from error
        return value

    def contained(self, node: yaml.Node, option: Option, name: str) -> Any:
        if option.container == "dict":
            return {key: self.scalar(each, option, f"{name}.{key}") for key, each in self.mapping(node, name).items()}
        if option.container == "tuple":
            if not isinstance(node, yaml.SequenceNode):
                raise self.error(node, f"{name} must be a list, such as [a, b].")
            return tuple(self.scalar(each, option, name) for each in node.value)
        return self.scalar(node, option, name)

    def scalar(self, node: yaml.Node, option: Option, name: str) -> Any:
        text = self.text(node, name)
        try:
            value = read_value(option.type, text, name)
        except UsageError as error:
            raise self.error(node, error.message) from error
        if not isinstance(value, Path):
            return value
        if option.container == "dict" and "/" not in text and not (self.path.parent / value).exists():
            return value  # the name of an adapter in the store
        return self.path_beside(text)

    def path_beside(self, text: str) -> Path:
        """Return a path, which is relative to the file's folder."""
        return (self.path.parent / Path(text).expanduser()).absolute()

    def beside(self, text: str) -> str:
        """Return a name as it is, and a relative path as one that starts at the file's folder."""
        return str((self.path.parent / text).resolve()) if text.startswith(("./", "../")) else text

    def require_known(self, name: str, known: Collection[str], node: yaml.Node, what: str, kind: str) -> None:
        if name not in known:
            hint = did_you_mean(name, known, f"The file has: {', '.join(known) or f'no {kind}'}.")
            raise self.error(node, f"{what} is {name!r}, which is no {kind} of this file.", hint=hint)

    def require_own_ports(self, servers: Collection[ServerSetup], nodes: Mapping[str, yaml.Node]) -> None:
        """Refuse two servers on one port."""
        owners: dict[int, str] = {}
        for server in servers:
            if server.spec.auto_ports or server.cluster is not None:
                continue
            for port in (server.spec.http_port, server.spec.grpc_port, server.spec.metrics_port):
                other = owners.setdefault(port, server.name)
                if other != server.name:
                    raise self.error(
                        nodes[server.name],
                        f"servers.{server.name} and servers.{other} both listen on port {port}.",
                        hint="Give one of them other ports: http_port, grpc_port and metrics_port, or auto_ports: true",
                    )

    def in_order(self, models: Mapping[str, ModelSetup]) -> tuple[ModelSetup, ...]:
        """Return the models, each after the one that drafts for it."""
        ordered: dict[str, ModelSetup] = {}
        for model in models.values():
            chain = [model]
            while (draft := chain[-1].draft) is not None and draft not in ordered:
                if any(each.name == draft for each in chain):
                    raise self.error(self.lines[model.name], f"models.{model.name} drafts for itself.")
                chain.append(models[draft])
            ordered |= {each.name: each for each in reversed(chain)}
        return tuple(ordered.values())


def setup_of_import(name: str, store: Store) -> str:
    """Return a setup file that makes the import `name` again, with its options, and serves it.

    Raises ArtifactError when there is no such import, and UsageError for one that a file cannot describe.
    """
    known = {record.name: record for record in store.recorded()}
    if name not in known:
        names = ", ".join(known)
        raise ArtifactError(
            f"Nothing was imported as {name!r}.", hint=f"Imports: {names}." if names else "Import a model first."
        )
    spec = recorded_spec(known[name])
    if spec is None:
        raise UsageError(f"The record of {name!r} does not say how it was made.", hint="Import it again.")
    if spec.draft is not None:
        raise UsageError(
            f"{name!r} has a draft engine, and a setup file describes the model that drafts.",
            hint="Start from examples/setups/draft-and-target.yaml.",
        )
    model: dict[str, Any] = {"source": spec.source}
    if spec.tokenizer is not None:
        model["tokenizer"] = str(spec.tokenizer)
    for part in (spec.convert, spec.build, spec.repository):
        model |= given_values(part)
    content = {"models": {name: model}, "servers": {name: {"model": name}}}
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text
